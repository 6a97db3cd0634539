//! The gate in Redis, shared by many nodes. The keys, and what they hold, are listed in `keys`.
//!
//! - `admit`: buying, `admit_batch`; `outbox`: the orders that it has admitted; `consumer`: the outbox as a queue
//! - `marks`: reading and loading marks; `availability`: what nodes remember to refuse without asking
//! - `incarnation`: the scripts that are valid and the sales that are open; `rebuild`: what a rebuild does before it opens sales
//! - `server`: checks of the server; `breaker`: whether it answers; `calls`: calls of scripts and commands, and their errors
//! - `announcements`: messages to all nodes; `dead_letters`: entries that cannot be read; `markers`: what has come through a queue;
//!   `scripts`: the scripts in `lua/`
//!
//! The text of the scripts contains the id of the ledger and the incarnation, a number of the ledger. They are called by `EVALSHA` only: Redis keeps loaded
//! scripts neither on disk nor on replicas, so `NOSCRIPT` means that another process answers, which may have lost marks. Only a
//! rebuild loads the scripts, under a new incarnation. A server that was demoted to a replica and promoted again still has the scripts, and
//! perhaps an older copy of the marks; but then it has another replication id than the ledger has noted, which is checked with every new
//! connection.

mod admit;
mod announcements;
mod availability;
mod breaker;
mod calls;
mod consumer;
mod dead_letters;
mod incarnation;
mod keys;
mod markers;
mod marks;
mod outbox;
mod rebuild;
mod scripts;
mod server;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use parking_lot::RwLock;
use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Decision, Gate, GateError, GateRecord, LoadedSale, Snapshot};
use stampede_core::{OrderId, Sale, SaleId, Timestamp, UserId, mark_digest};
use stampede_redis::{Client, Script};

pub use self::availability::Availability;
use self::breaker::Breaker;
pub use self::dead_letters::DeadEntry;
use self::incarnation::Incarnation;
pub use self::outbox::{Entry, EntryId};
pub use self::rebuild::RebuildStage;

/// The consumer group of every outbox.
const GROUP: &str = "ledger";

/// A gate in Redis, under the incarnation that the ledger calls valid.
pub struct RedisGate {
    client: Arc<Client>,
    breaker: Breaker,
    writable: Script,
    accepts_writes: AtomicBool,
    ledger: String,
    /// The most entries in the outbox of a sale.
    outbox_bound: u32,
    current: RwLock<Arc<Incarnation>>,
}

impl RedisGate {
    /// The gate of the ledger with this record. Nothing is sent.
    pub fn new(client: Arc<Client>, record: &GateRecord, outbox_bound: u32) -> Self {
        let current = RwLock::new(Incarnation::new(record));
        Self {
            client,
            breaker: Breaker::new(),
            writable: Script::new(include_str!("lua/writable.lua")),
            accepts_writes: AtomicBool::new(true),
            ledger: record.ledger_id.clone(),
            outbox_bound,
            current,
        }
    }

    /// Whether Redis answers, as far as this node knows. While it does not, requests to buy should not be sent: the next call of anything
    /// else finds out whether it does again.
    pub fn is_answering(&self) -> bool {
        !self.breaker.is_open()
    }

    /// The id of the ledger, which is a part of every key.
    pub fn ledger_id(&self) -> &str {
        &self.ledger
    }
}

#[async_trait]
impl Gate for RedisGate {
    /// Redis uses its own clock, so `now` is not used.
    async fn admit(
        &self,
        sale: SaleId,
        requests: &[AdmitRequest],
        _now: Timestamp,
    ) -> Result<Option<Vec<Decision>>, GateError> {
        Ok(self.admit_batch(sale, requests).await?.map(|(decisions, _)| decisions))
    }

    async fn release(&self, sale: SaleId, releases: &[Release]) -> Result<Vec<bool>, GateError> {
        let current = self.current();
        let open = current.find(sale).ok_or(GateError::NotOpen)?;
        let mut args = vec![open.epoch.0.to_string(), self.channel(), sale.to_string()];
        for Release { user, order, existing, ended } in releases {
            args.push(user.to_string());
            args.push(order.to_string());
            args.push(existing.map(|order| order.to_string()).unwrap_or_default());
            args.push(u8::from(*ended).to_string());
        }
        let keys = ["sale", "live", "ended"].map(|part| self.key(sale, part));
        let released: Vec<i64> = self.call(&current, &current.scripts.release, &keys, &args).await?;
        Ok(released.into_iter().map(|released| released == 1).collect())
    }

    async fn edit(&self, sale: &Sale) -> Result<Option<u32>, GateError> {
        let current = self.current();
        let open = current.find(sale.id).ok_or(GateError::NotOpen)?;
        let args = [
            open.epoch.0.to_string(),
            sale.version.to_string(),
            sale.cap.to_string(),
            sale.window.begin.ms().to_string(),
            sale.window.end.ms().to_string(),
            sale.status.as_str().to_owned(),
            self.channel(),
            sale.id.to_string(),
        ];
        let keys = [self.key(sale.id, "sale"), self.key(sale.id, "live")];
        self.call(&current, &current.scripts.edit, &keys, &args).await.map(Some)
    }

    async fn open(&self, loaded: LoadedSale) -> Result<(), GateError> {
        self.open_under(self.incarnation(), loaded).await
    }

    async fn snapshot(&self, sale: SaleId) -> Result<Option<Snapshot>, GateError> {
        Ok(self.snapshot_with_generation(sale).await?.map(|(snapshot, ..)| snapshot))
    }

    async fn digest(&self, sale: SaleId) -> Result<Option<(Snapshot, u64)>, GateError> {
        let (Some(snapshot), Some(marks)) = (self.snapshot(sale).await?, self.marks(sale).await?) else {
            return Ok(None);
        };
        Ok(Some((snapshot, mark_digest(marks.into_iter()))))
    }

    async fn marks(&self, sale: SaleId) -> Result<Option<Vec<(UserId, OrderId)>>, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(None) };
        match self.surviving_marks(sale).await? {
            Some((epoch, marks)) if epoch == open.epoch => Ok(Some(marks)),
            _ => Err(GateError::Lost),
        }
    }
}

impl fmt::Debug for RedisGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisGate").field("incarnation", &self.incarnation()).finish_non_exhaustive()
    }
}

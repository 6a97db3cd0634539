//! Reads the outboxes of all sales, and records their orders. Any number of processes do this: an entry goes to one of them, and to
//! another one if it is not settled for a while.
//!
//! One task waits for new entries of all sales for which nothing is being recorded. The entries of a sale are recorded by a task of its
//! own, which goes on reading until there is nothing left, so that a sale whose orders cannot be recorded does not hold up others. A
//! process has one batch per sale at a time; what it has not read stays in Redis.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use metrics::{Counter, counter};
use parking_lot::Mutex;
use stampede_core::SaleId;
use stampede_core::ports::GateError;
use stampede_gate::redis::{Entry, EntryId};
use stampede_redis::Backoff;
use tokio_util::task::TaskTracker;

use super::StreamConfig;
use crate::tier::redis::{BusySales, RedisTier};

/// How long Redis waits for a new entry. A sale that has become idle meanwhile is waited for after this time.
pub(in crate::tier) const MAX_WAIT: Duration = Duration::from_millis(50);
/// Entries of a sale that are read at once.
const READ: usize = 16;
/// An entry that was read this long ago and is not settled is taken over: its consumer has died, or could not record it.
const CLAIM_AFTER: Duration = Duration::from_secs(3);
const CLAIM_INTERVAL: Duration = Duration::from_secs(1);
/// An entry that was read and is still there after this time can be claimed by no consumer, or has not been recorded for as long: it is
/// recorded without being claimed. Measured from when this process first saw it.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10);
const FORGOTTEN_INTERVAL: Duration = Duration::from_secs(5);
/// A consumer that has read nothing for this long, and has nothing left to settle, is gone.
const GONE_AFTER: Duration = Duration::from_secs(600);
const FORGET_INTERVAL: Duration = Duration::from_secs(60);
/// Where a search for entries begins.
const FIRST_ENTRY: &str = "0-0";

/// The sales whose orders are being recorded by this process.
#[derive(Debug)]
pub(in crate::tier) struct Consumer {
    name: String,
    busy: Arc<BusySales>,
    /// Where the search for entries that were left goes on.
    cursors: Mutex<HashMap<SaleId, String>>,
    /// When the oldest entries of each sale that were read and are not settled were first seen.
    delivered: Mutex<HashMap<SaleId, HashMap<EntryId, Instant>>>,
    tasks: TaskTracker,
    orders: Counter,
}

impl Consumer {
    /// `name` tells this process apart from other consumers.
    pub(in crate::tier) fn new(name: String) -> Arc<Self> {
        Arc::new(Self {
            name,
            busy: Arc::default(),
            cursors: Mutex::default(),
            delivered: Mutex::default(),
            tasks: TaskTracker::new(),
            orders: counter!("stampede_queue_consumed_orders_total"),
        })
    }

    /// Returns when the batches that are being recorded are done. [`run`] must have ended.
    pub(in crate::tier) async fn close(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Records entries of a sale, and what is in its outbox after that.
    fn start(self: &Arc<Self>, tier: &Arc<RedisTier>, sale: SaleId, entries: Vec<Entry>) {
        if entries.is_empty() {
            return;
        }
        let Some(busy) = self.busy.try_enter(sale) else { return };
        let (consumer, tier) = (self.clone(), tier.clone());
        self.tasks.spawn(async move {
            consumer.record(&tier, sale, entries).await;
            drop(busy);
        });
    }

    async fn record(&self, tier: &Arc<RedisTier>, sale: SaleId, mut entries: Vec<Entry>) {
        let mut claimed_at = Instant::now();
        while !entries.is_empty() {
            let Ok(seller) = tier.seller(sale) else { return };
            self.orders.increment(entries.iter().map(|entry| entry.orders.len() as u64).sum());
            seller.record_entries(&entries, tier.config.max_batch).await;
            if self.tasks.is_closed() {
                return;
            }
            entries = match tier.gate.read_new(&tier.config.redis, &self.name, &[sale], READ, None).await {
                Ok(read) => read.into_iter().flat_map(|(_, entries)| entries).collect(),
                // The task that waits for entries notices as well, and reports it.
                Err(_) => return,
            };
            // While a sale is busy, the task that waits for entries does not look for what was left.
            if claimed_at.elapsed() >= CLAIM_INTERVAL {
                claimed_at = Instant::now();
                entries.extend(self.claim(tier, sale).await.unwrap_or_default());
            }
        }
    }
}

impl Consumer {
    /// Takes over entries of a sale that were read and not settled.
    async fn claim(&self, tier: &Arc<RedisTier>, sale: SaleId) -> Result<Vec<Entry>, GateError> {
        let mut cursor = self.cursors.lock().remove(&sale).unwrap_or_else(|| FIRST_ENTRY.to_owned());
        let entries = tier.gate.claim(sale, &self.name, CLAIM_AFTER, READ, &mut cursor).await?;
        if cursor != FIRST_ENTRY {
            self.cursors.lock().insert(sale, cursor);
        }
        if !entries.is_empty() {
            tracing::info!(%sale, entries = entries.len(), "recording orders that another consumer has left");
        }
        Ok(entries)
    }

    /// The entries of a sale that were read long ago, and are in the outbox still.
    async fn forgotten(&self, tier: &Arc<RedisTier>, sale: SaleId) -> Result<Vec<Entry>, GateError> {
        let delivered = tier.gate.delivered(sale, READ).await?;
        let now = Instant::now();
        let mut seen = self.delivered.lock();
        let before = seen.remove(&sale).unwrap_or_default();
        let first_seen = |entry: &Entry| before.get(&entry.id).copied().unwrap_or(now);
        seen.insert(sale, delivered.iter().map(|entry| (entry.id, first_seen(entry))).collect());
        drop(seen);
        Ok(delivered.into_iter().filter(|entry| now.duration_since(first_seen(entry)) >= FORGOTTEN_AFTER).collect())
    }
}

/// Reads entries until the tier is dropped.
pub(in crate::tier) async fn run(tier: Weak<RedisTier>, consumer: Arc<Consumer>, config: StreamConfig) {
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
    let mut claimed_at: Option<Instant> = None;
    let mut forgot_at = Instant::now();
    let mut looked_at = Instant::now();
    loop {
        let Some(tier) = tier.upgrade() else { return };
        if forgot_at.elapsed() >= FORGET_INTERVAL {
            forgot_at = Instant::now();
            forget_consumers(&tier).await;
        }
        if looked_at.elapsed() >= FORGOTTEN_INTERVAL {
            looked_at = Instant::now();
            record_forgotten(&tier, &consumer).await;
        }
        let idle = consumer.busy.idle(tier.gate.sales());
        let is_claim_due = claimed_at.is_none_or(|at| at.elapsed() >= CLAIM_INTERVAL);
        let read = match (idle.is_empty(), is_claim_due) {
            (true, _) => {
                // Not an error: all sales are busy, or there are none.
                let _ = tokio::time::timeout(MAX_WAIT, consumer.busy.became_idle()).await;
                continue;
            }
            (false, true) => {
                claimed_at = Some(Instant::now());
                claim(&tier, &consumer, &idle).await
            }
            (false, false) => {
                let read = tier.gate.read_new(&config.redis, &consumer.name, &idle, READ, Some(MAX_WAIT)).await;
                read.map(|read| read.into_iter().for_each(|(sale, entries)| consumer.start(&tier, sale, entries)))
            }
        };
        match read {
            Ok(()) => backoff.reset(),
            Err(error) => {
                if error.is_loss() {
                    report_losses(&tier, &consumer, &idle).await;
                }
                tracing::debug!(%error, "cannot read the outboxes; trying again");
                backoff.sleep().await;
            }
        }
    }
}

/// Deletes the names of consumers whose processes are gone. Every process has a name of its own.
async fn forget_consumers(tier: &Arc<RedisTier>) {
    for sale in tier.gate.sales() {
        match tier.gate.forget_consumers(sale, GONE_AFTER).await {
            Ok(0) => {}
            Ok(deleted) => tracing::debug!(%sale, deleted, "deleted the names of consumers that are gone"),
            Err(error) => tracing::debug!(%sale, %error, "cannot delete the names of consumers that are gone"),
        }
    }
}

/// Takes over entries that were read and not settled.
async fn claim(tier: &Arc<RedisTier>, consumer: &Arc<Consumer>, sales: &[SaleId]) -> Result<(), GateError> {
    let mut first_error = Ok(());
    for &sale in sales {
        match consumer.claim(tier, sale).await {
            Ok(entries) => consumer.start(tier, sale, entries),
            // A sale that has lost its outbox does not hold up the others.
            Err(error) => first_error = first_error.and(Err(error)),
        }
    }
    first_error
}

/// Records entries that were read and that no consumer can claim: another client of Redis has acknowledged them, or moved the group ahead
/// of them.
async fn record_forgotten(tier: &Arc<RedisTier>, consumer: &Arc<Consumer>) {
    let sales = tier.gate.sales_with_entries();
    consumer.delivered.lock().retain(|sale, _| sales.contains(sale));
    for sale in consumer.busy.idle(sales) {
        match consumer.forgotten(tier, sale).await {
            Ok(entries) if entries.is_empty() => {}
            Ok(entries) => {
                tracing::warn!(%sale, entries = entries.len(), "recording orders that were read and that no consumer has recorded");
                consumer.start(tier, sale, entries);
            }
            Err(error) => tracing::debug!(%sale, %error, "cannot look for entries that no consumer has"),
        }
    }
}

/// Finds the sales whose outbox is missing: the answer for many sales does not name it.
async fn report_losses(tier: &Arc<RedisTier>, consumer: &Arc<Consumer>, sales: &[SaleId]) {
    for &sale in sales {
        let Some((incarnation, epoch)) = tier.gate.opened_as(sale) else { continue };
        match tier.gate.read_new(&tier.config.redis, &consumer.name, &[sale], READ, None).await {
            Ok(read) => read.into_iter().for_each(|(sale, entries)| consumer.start(tier, sale, entries)),
            Err(error) if error.is_loss() => tier.losses.report(sale, incarnation, epoch),
            Err(_) => return,
        }
    }
}

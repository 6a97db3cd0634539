//! The gate in Redis, shared by many nodes.
//!
//! | key | type | holds | written by | deleted by |
//! |---|---|---|---|---|
//! | `stampede:L:{S}:sale` | hash | inc (incarnation), epoch, ver (version), state, cap, begin, end, price, hw (highest time seen), seq, gen, pending (orders in the outbox) | all scripts | `remove` |
//! | `stampede:L:{S}:live` | hash | `#epoch`, and user → order: the marks | `admit`, `release`, `open` | `remove` |
//! | `stampede:L:{S}:out` | stream | the outbox: an entry `epoch-seq` per admitted batch | `admit`, `settle`, `open` | `remove` |
//! | `stampede:L:dead` | stream | entries of outboxes that cannot be read | `store_dead` | an operator, or beyond about 10,000 |
//! | `stampede:L:{S}:load:E` | hash | marks that are being loaded for epoch E | `load` | renamed by `open`, or expires |
//! | `stampede:L:writable` | string | nothing; written to find out whether Redis accepts writes | every node | expires |
//!
//! `L` is the id of the ledger, so that two installations on one Redis do not meet; `S` is the sale. Ids are strings in the scripts,
//! because numbers in Lua lose 63-bit integers.
//!
//! The text of the scripts contains the id of the ledger and the incarnation, a number of the ledger. They are called by `EVALSHA` only: Redis keeps loaded
//! scripts neither on disk nor on replicas, so `NOSCRIPT` means that another process answers, which may have lost marks. Only a
//! rebuild loads the scripts, under a new incarnation. A server that was demoted to a replica and promoted again still has the scripts, and
//! perhaps an older copy of the marks; but then it has another replication id than the ledger has noted, which is checked with every new
//! connection.

mod availability;
mod breaker;
mod consumer;
mod dead_letters;
mod scripts;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use async_trait::async_trait;
use futures_util::{StreamExt as _, TryStreamExt as _};
use parking_lot::RwLock;
use redis::{FromRedisValue, Value};
use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Admitted, Decision, Gate, GateError, GateRecord, LoadedSale, Snapshot};
use stampede_core::{
    Admission, Epoch, Money, OrderId, Refusal, Sale, SaleId, SaleStatus, Timestamp, UserId, Window, mark_digest,
};
use stampede_redis::{Client, CommandError, EvalShaError, Script};

pub use self::availability::Availability;
use self::breaker::Breaker;
use self::consumer::parse_rows;
pub use self::dead_letters::DeadEntry;
use self::scripts::Scripts;

/// The consumer group of every outbox.
const GROUP: &str = "ledger";
/// Marks that are loaded with one command.
const LOAD_BATCH: usize = 1000;
/// Commands that load marks at once, so that Redis does not wait for the next one.
const CONCURRENT_LOADS: usize = 4;
/// Loaded marks that no `open` has used are deleted after this time.
const LOAD_TTL_S: u32 = 3600;
/// How long the key stays with which a node finds out whether Redis accepts writes.
const WRITABLE_TTL_MS: u32 = 10_000;

/// An entry of an outbox: a batch of orders that were admitted together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub id: EntryId,
    pub orders: Vec<Admitted>,
    /// The fields of an entry that cannot be read; it has no orders then.
    pub unreadable: Option<Vec<String>>,
}

/// Names an entry of a sale's outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryId {
    pub epoch: Epoch,
    /// The sequence number of the last order of the entry.
    pub last_seq: i64,
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch.0, self.last_seq)
    }
}

impl EntryId {
    fn parse(text: &str) -> Option<Self> {
        let (epoch, last_seq) = text.split_once('-')?;
        Some(Self { epoch: Epoch(epoch.parse().ok()?), last_seq: last_seq.parse().ok()? })
    }
}

/// What this node knows about a sale that is open in the gate.
#[derive(Debug)]
struct OpenSale {
    epoch: Epoch,
    /// The highest sequence number that this node has seen. A gate with a lower one has lost admissions.
    seen_seq: AtomicI64,
    /// What was left at the last call of this node.
    remaining: AtomicU32,
    /// Whether the outbox may hold entries, as far as this node knows.
    has_entries: AtomicBool,
}

/// The scripts of one incarnation, and the sales that are open under it.
#[derive(Debug)]
struct Incarnation {
    number: u64,
    /// The replication id of the server on which it was opened; empty if any server will do.
    replication_id: String,
    /// The connection whose server was found to have this replication id.
    verified_connection: AtomicU64,
    scripts: Scripts,
    sales: RwLock<HashMap<SaleId, Arc<OpenSale>>>,
}

impl Incarnation {
    fn new(record: &GateRecord) -> Arc<Self> {
        Arc::new(Self {
            number: record.incarnation,
            replication_id: record.replication_id.clone(),
            // Connections are counted from 1.
            verified_connection: AtomicU64::new(0),
            scripts: Scripts::new(&record.ledger_id, record.incarnation),
            sales: RwLock::default(),
        })
    }

    fn find(&self, sale: SaleId) -> Option<Arc<OpenSale>> {
        self.sales.read().get(&sale).cloned()
    }

    fn adopt(&self, sale: SaleId, epoch: Epoch, remaining: u32) {
        let mut sales = self.sales.write();
        if sales.get(&sale).is_none_or(|open| open.epoch < epoch) {
            let (seen_seq, remaining) = (AtomicI64::new(0), AtomicU32::new(remaining));
            sales.insert(sale, Arc::new(OpenSale { epoch, seen_seq, remaining, has_entries: AtomicBool::new(true) }));
        }
    }
}

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

    fn current(&self) -> Arc<Incarnation> {
        self.current.read().clone()
    }

    /// The id of the ledger, which is a part of every key.
    pub fn ledger_id(&self) -> &str {
        &self.ledger
    }

    pub fn incarnation(&self) -> u64 {
        self.current.read().number
    }

    /// Replaces an older incarnation. No sale is open under the new one until it is adopted.
    pub fn set_incarnation(&self, record: &GateRecord) {
        let mut current = self.current.write();
        if current.number < record.incarnation {
            *current = Incarnation::new(record);
        }
    }

    /// The replication id of the server. It changes when the server becomes a replica and when a replica becomes the master; also when the
    /// first replica of a master is attached, and some time after the last one was detached.
    pub async fn replication_id(&self) -> Result<String, GateError> {
        let mut command = redis::cmd("INFO");
        command.arg("replication");
        let info: String = self.send(command).await?;
        let id = info.lines().find_map(|line| line.strip_prefix("master_replid:"));
        Ok(id.ok_or(GateError::Unanswered)?.trim().to_owned())
    }

    /// Checks that the server is the one on which this incarnation was opened: [`GateError::Lost`] if it is another one, or has been a
    /// replica since.
    pub async fn verify_server(&self) -> Result<(), GateError> {
        self.verify(&self.current()).await
    }

    async fn verify(&self, incarnation: &Incarnation) -> Result<(), GateError> {
        if incarnation.replication_id.is_empty() {
            return Ok(());
        }
        // Read before the call: if the connection is replaced during the call, the new one is not verified.
        let connection = self.client.current_connection();
        let found = self.replication_id().await?;
        if found != incarnation.replication_id {
            tracing::debug!(found, expected = incarnation.replication_id, "Redis has another replication id");
            incarnation.verified_connection.store(0, Ordering::Relaxed);
            return Err(GateError::Lost);
        }
        incarnation.verified_connection.store(connection.unwrap_or_default(), Ordering::Relaxed);
        Ok(())
    }

    /// Loads the scripts of this incarnation. Only a rebuild does this.
    pub async fn load_scripts(&self) -> Result<(), GateError> {
        for script in self.current().scripts.all() {
            self.answered(self.client.script_load(script).await).map_err(|error| gate_error(&error))?;
        }
        Ok(())
    }

    /// Whether Redis has the scripts of this incarnation. If not, it may have lost marks, too.
    pub async fn has_scripts(&self) -> Result<bool, GateError> {
        let mut command = redis::cmd("SCRIPT");
        command.arg("EXISTS");
        for script in self.current().scripts.all() {
            command.arg(script.hash());
        }
        let found: Vec<bool> = self.send(command).await?;
        Ok(found.into_iter().all(|found| found))
    }

    /// Why Redis refuses to write or to publish (its memory is full, its replicas are away, or the rights of its user do not suffice);
    /// `None` if it does both.
    pub async fn write_refusal(&self) -> Result<Option<String>, GateError> {
        let name = format!("stampede:{}:writable", self.ledger);
        let args = [WRITABLE_TTL_MS.to_string(), name.clone()];
        let reply = self.client.eval(&self.writable, &[name], &args).await;
        self.accepts_writes.store(reply.is_ok(), Ordering::Release);
        match reply {
            Err(error) if error.is_write_refusal() || matches!(error, CommandError::Refused(_)) => {
                self.breaker.answered();
                Ok(Some(error.to_string()))
            }
            reply => self.answered(reply).map(|_| None).map_err(|error| gate_error(&error)),
        }
    }

    /// Whether Redis wrote and published when it was last asked to.
    pub fn accepts_writes(&self) -> bool {
        self.accepts_writes.load(Ordering::Acquire)
    }

    /// Makes requests for this sale go to the gate, under the epoch that the ledger calls open.
    pub fn adopt(&self, sale: &Sale) {
        self.current().adopt(sale.id, sale.epoch, sale.cap.saturating_sub(sale.sold));
    }

    /// The epoch under which this node sends requests for this sale to the gate, and the incarnation.
    pub fn opened_as(&self, sale: SaleId) -> Option<(u64, Epoch)> {
        let current = self.current();
        current.find(sale).map(|open| (current.number, open.epoch))
    }

    /// The sales that this node sends requests for.
    pub fn sales(&self) -> Vec<SaleId> {
        self.current().sales.read().keys().copied().collect()
    }

    /// The sales whose outbox may hold entries: those of which this node has admitted orders since the last snapshot, or the snapshot
    /// found entries.
    pub fn sales_with_entries(&self) -> Vec<SaleId> {
        let current = self.current();
        let sales = current.sales.read();
        let with_entries = sales.iter().filter(|(_, open)| open.has_entries.load(Ordering::Relaxed));
        with_entries.map(|(sale, _)| *sale).collect()
    }

    /// What was left of the sale at the last call of this node.
    pub fn remaining(&self, sale: SaleId) -> Option<u32> {
        self.current().find(sale).map(|open| open.remaining.load(Ordering::Relaxed))
    }

    /// Removes a sale that is over: from this node, and from Redis once its outbox is empty. Returns whether it is gone.
    pub async fn remove(&self, sale: SaleId) -> Result<bool, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(true) };
        let keys = [self.key(sale, "sale"), self.key(sale, "live"), self.key(sale, "out")];
        let removed: i64 = self.call(&current, &current.scripts.remove, &keys, &[open.epoch.0.to_string()]).await?;
        if removed == 1 {
            current.sales.write().remove(&sale);
        }
        Ok(removed == 1)
    }

    /// Closes a sale at the beginning of a rebuild. `false` if a newer incarnation has it.
    pub async fn close(&self, sale: SaleId, epoch: Epoch) -> Result<bool, GateError> {
        let current = self.current();
        let keys = [self.key(sale, "sale"), self.key(sale, "live"), self.key(sale, "out")];
        let closed: i64 = self.call(&current, &current.scripts.close, &keys, &[epoch.0.to_string()]).await?;
        Ok(closed == 1)
    }

    /// Decides on requests, in their order. The new orders are in the outbox under the returned entry.
    pub async fn admit_batch(
        &self,
        sale: SaleId,
        requests: &[AdmitRequest],
    ) -> Result<Option<(Vec<Decision>, Option<EntryId>)>, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(None) };
        let keys = [self.key(sale, "sale"), self.key(sale, "live"), self.key(sale, "out")];
        let mut args = Vec::with_capacity(5 + 2 * requests.len());
        args.push(open.epoch.0.to_string());
        args.push(open.seen_seq.load(Ordering::Relaxed).to_string());
        args.push(self.outbox_bound.to_string());
        args.push(self.channel());
        args.push(sale.to_string());
        for request in requests {
            args.push(request.user.to_string());
            args.push(request.order.to_string());
        }
        type Reply = (i64, u64, i64, i64, u32, String, Vec<String>);
        let (now, generation, price, seq, remaining, entry, answers): Reply =
            self.call(&current, &current.scripts.admit, &keys, &args).await?;
        if answers.len() != requests.len() {
            return Err(GateError::Unanswered);
        }
        let at = Timestamp::from_ms(now);
        let price = Money::from_cents(price).ok_or(GateError::Lost)?;
        let mut next = seq;
        let mut decisions = Vec::with_capacity(requests.len());
        for (request, answer) in requests.iter().zip(&answers) {
            let admission = match answer.as_str() {
                "a" => {
                    next += 1;
                    Admission::Admitted(request.order)
                }
                "r" => Admission::Admitted(request.order),
                "b" => Admission::Busy,
                answer => match answer.strip_prefix('h').map(str::parse) {
                    Some(Ok(held)) => Admission::AlreadyHas(held),
                    _ => Admission::Refused(parse_refusal(answer).ok_or(GateError::Unanswered)?),
                },
            };
            decisions.push(Decision { admission, epoch: open.epoch, generation, seq: next, price, at });
        }
        open.seen_seq.fetch_max(next, Ordering::Relaxed);
        open.remaining.store(remaining, Ordering::Relaxed);
        let entry = EntryId::parse(&entry);
        if entry.is_some() {
            open.has_entries.store(true, Ordering::Relaxed);
        }
        Ok(Some((decisions, entry)))
    }

    /// Removes entries whose orders the ledger has. With `announce`, nodes are told that orders of the sale were recorded.
    pub async fn settle_entries(&self, sale: SaleId, entries: &[EntryId], announce: bool) -> Result<(), GateError> {
        let channel = if announce { self.channel() } else { String::new() };
        let mut args = vec![GROUP.to_owned(), channel, sale.to_string()];
        args.extend(entries.iter().map(EntryId::to_string));
        let current = self.current();
        let keys = [self.key(sale, "sale"), self.key(sale, "out")];
        let _orders: i64 = self.call(&current, &current.scripts.settle, &keys, &args).await?;
        Ok(())
    }

    /// The entries of the outbox after this one, oldest first, at most `limit`.
    pub async fn entries(&self, sale: SaleId, after: Option<EntryId>, limit: usize) -> Result<Vec<Entry>, GateError> {
        let from = after.map_or_else(|| "-".to_owned(), |after| format!("({after}"));
        let mut command = redis::cmd("XRANGE");
        command.arg(self.key(sale, "out")).arg(from).arg("+").arg("COUNT").arg(limit);
        let rows: Vec<(String, Vec<String>)> = self.send(command).await?;
        Ok(parse_rows(sale, &rows))
    }

    /// Every mark that Redis holds for the sale, with their epoch; `None` if there are none. Also for a sale that is closed.
    pub async fn surviving_marks(&self, sale: SaleId) -> Result<Option<(Epoch, Vec<(UserId, OrderId)>)>, GateError> {
        let mut command = redis::cmd("HGETALL");
        command.arg(self.key(sale, "live"));
        let fields: Vec<(String, String)> = self.send(command).await?;
        let epoch = fields.iter().find(|(user, _)| user == "#epoch").and_then(|(_, epoch)| epoch.parse().ok());
        let Some(epoch) = epoch else { return Ok(None) };
        let marks = fields.iter().filter(|(user, _)| user != "#epoch");
        let parse = |(user, order): &(String, String)| Some((user.parse().ok()?, order.parse().ok()?));
        let (all, marks) = (fields.len() - 1, marks.filter_map(parse).collect::<Vec<_>>());
        if marks.len() < all {
            tracing::error!(%sale, marks = all - marks.len(), "marks in Redis cannot be read and are ignored; the gate did not write them");
        }
        Ok(Some((Epoch(epoch), marks)))
    }

    /// Notes that a rebuild goes on.
    pub async fn beat(&self) -> Result<(), GateError> {
        let mut command = redis::cmd("INCR");
        command.arg(self.heartbeat_key());
        let _beats: i64 = self.send(command).await?;
        Ok(())
    }

    /// Rises while a rebuild goes on, on whichever node.
    pub async fn heartbeat(&self) -> Result<i64, GateError> {
        let mut command = redis::cmd("GET");
        command.arg(self.heartbeat_key());
        let beats: Option<i64> = self.send(command).await?;
        Ok(beats.unwrap_or_default())
    }

    fn heartbeat_key(&self) -> String {
        format!("stampede:{}:rebuild", self.ledger)
    }

    /// Tells all nodes that the sale has changed in the ledger.
    pub async fn announce(&self, sale: SaleId) -> Result<(), GateError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.channel()).arg(format!("changed {sale}"));
        let _receivers: i64 = self.send(command).await?;
        Ok(())
    }

    /// Tells all nodes that orders of the sale were recorded.
    pub async fn announce_recorded(&self, sale: SaleId) -> Result<(), GateError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.channel()).arg(format!("recorded {sale}"));
        let _receivers: i64 = self.send(command).await?;
        Ok(())
    }

    fn key(&self, sale: SaleId, part: &str) -> String {
        format!("stampede:{}:{{{sale}}}:{part}", self.ledger)
    }

    /// The channel on which nodes listen: a message is a word and the sale's id, perhaps followed by more. `reset` and `changed`: the sale
    /// has changed; `soldout`: nothing is left; `recorded`: orders of it were recorded.
    pub fn channel(&self) -> String {
        format!("stampede:{}:sales", self.ledger)
    }

    async fn call<T: FromRedisValue>(
        &self,
        incarnation: &Incarnation,
        script: &Script,
        keys: &[String],
        args: &[String],
    ) -> Result<T, GateError> {
        let verified = incarnation.verified_connection.load(Ordering::Relaxed);
        if self.client.current_connection() != Some(verified) {
            self.verify(incarnation).await?;
        }
        let reply = self.client.eval_sha(script, keys, args).await;
        match &reply {
            Err(EvalShaError::Command(CommandError::NotSent(_) | CommandError::Unknown(_))) => {
                self.breaker.unanswered();
            }
            _ => self.breaker.answered(),
        }
        let reply = reply.map_err(|error| match error {
            EvalShaError::NoScript => GateError::Lost,
            EvalShaError::Command(error) => gate_error(&error),
        })?;
        if matches!(&reply, Value::BulkString(text) if text == b"lost") {
            return Err(GateError::Lost);
        }
        read(reply)
    }

    async fn send<T: FromRedisValue>(&self, command: redis::Cmd) -> Result<T, GateError> {
        read(self.answered(self.client.send(command).await).map_err(|error| gate_error(&error))?)
    }

    /// Notes whether Redis has answered.
    fn answered<T>(&self, reply: Result<T, CommandError>) -> Result<T, CommandError> {
        match &reply {
            Err(CommandError::NotSent(_) | CommandError::Unknown(_)) => self.breaker.unanswered(),
            Ok(_) | Err(CommandError::Refused(_)) => self.breaker.answered(),
        }
        reply
    }

    /// The snapshot, with the generation and the time of Redis of the same moment.
    async fn snapshot_with_generation(
        &self,
        sale: SaleId,
    ) -> Result<Option<(Snapshot, Epoch, u64, Timestamp)>, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(None) };
        let keys = [self.key(sale, "sale"), self.key(sale, "live"), self.key(sale, "out")];
        // Read before the call: an admission that is answered during the call raises it.
        let seen_seq = open.seen_seq.load(Ordering::Relaxed);
        type Reply = (i64, String, i64, i64, u32, u64, i64, u32, u32, u32, i64);
        let (version, state, begin, end, cap, generation, seq, marks, entries, pending, now): Reply =
            self.call(&current, &current.scripts.snapshot, &keys, &[open.epoch.0.to_string()]).await?;
        if seq < seen_seq {
            return Err(GateError::Lost);
        }
        let status = SaleStatus::parse(&state).ok_or(GateError::Lost)?;
        let window = Window { begin: Timestamp::from_ms(begin), end: Timestamp::from_ms(end) };
        let (settled, outbox) = (marks.saturating_sub(pending), Some(pending.max(entries)));
        let snapshot = Snapshot { version, status, window, cap, marks, settled, outbox };
        open.remaining.store(snapshot.remaining(), Ordering::Relaxed);
        open.has_entries.store(entries > 0, Ordering::Relaxed);
        Ok(Some((snapshot, open.epoch, generation, Timestamp::from_ms(now))))
    }

    /// Loads marks under a key of their own, to be renamed by `open`.
    async fn load(&self, key: &str, epoch: Epoch, marks: &[(UserId, OrderId)]) -> Result<(), GateError> {
        let mut delete = redis::cmd("DEL");
        delete.arg(key);
        let _deleted: i64 = self.send(delete).await?;
        let mut first = redis::cmd("HSET");
        first.arg(key).arg("#epoch").arg(epoch.0);
        let _added: i64 = self.send(first).await?;
        let chunk = |chunk: &[(UserId, OrderId)]| {
            let mut command = redis::cmd("HSET");
            command.arg(key);
            for (user, order) in chunk {
                command.arg(user.get()).arg(order.get());
            }
            self.send::<i64>(command)
        };
        let chunks = futures_util::stream::iter(marks.chunks(LOAD_BATCH).map(chunk));
        chunks.buffer_unordered(CONCURRENT_LOADS).try_for_each(|_added| std::future::ready(Ok(()))).await?;
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(key).arg(LOAD_TTL_S);
        let _set: i64 = self.send(expire).await?;
        Ok(())
    }
}

/// The letter by which `admit.lua` names a refusal.
const fn refusal_letter(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::SoldOut => "s",
        Refusal::NotStarted => "n",
        Refusal::Ended => "e",
        Refusal::Paused => "p",
        Refusal::NoSuchSale => "d",
    }
}

fn parse_refusal(answer: &str) -> Option<Refusal> {
    Refusal::ALL.iter().copied().find(|&refusal| refusal_letter(refusal) == answer)
}

fn parse_entry(id: &str, fields: &[String]) -> Option<Entry> {
    let [_, first, _, at, orders @ ..] = fields else { return None };
    let (first, at): (i64, i64) = (first.parse().ok()?, at.parse().ok()?);
    let order = |(seq, pair): (i64, &[String])| {
        let [user, order] = pair else { return None };
        Some(Admitted { order: order.parse().ok()?, user: user.parse().ok()?, seq, at: Timestamp::from_ms(at) })
    };
    let orders = (first..).zip(orders.chunks(2)).map(order).collect::<Option<Vec<_>>>()?;
    Some(Entry { id: EntryId::parse(id)?, orders, unreadable: None })
}

fn read<T: FromRedisValue>(reply: Value) -> Result<T, GateError> {
    T::from_redis_value(reply).map_err(|error| {
        tracing::error!(%error, "the gate returned an unexpected reply");
        GateError::Unanswered
    })
}

/// Whether a key has another type, or lacks a field, that the gate's scripts have written.
fn is_damaged(error: &redis::RedisError) -> bool {
    let is_failed_script = || {
        let text = error.to_string();
        text.contains("user_script") && !text.contains("ACL failure")
    };
    match error.code() {
        Some("WRONGTYPE") => true,
        Some("ERR") => is_failed_script(),
        _ => false,
    }
}

fn gate_error(error: &CommandError) -> GateError {
    match error {
        CommandError::NotSent(_) => GateError::NotSent,
        CommandError::Unknown(_) => GateError::Unanswered,
        CommandError::Refused(error) if is_damaged(error) => {
            tracing::error!(%error, "keys of the gate in Redis are damaged: another program has written to them");
            GateError::Lost
        }
        // A script that fails half-way may have written.
        CommandError::Refused(error) => {
            tracing::error!(%error, "the gate refused a command");
            GateError::Unanswered
        }
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
        for Release { user, order, existing } in releases {
            args.push(user.to_string());
            args.push(order.to_string());
            args.push(existing.map(|order| order.to_string()).unwrap_or_default());
        }
        let released: Vec<i64> = self
            .call(&current, &current.scripts.release, &[self.key(sale, "sale"), self.key(sale, "live")], &args)
            .await?;
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
        let LoadedSale { sale, marks } = loaded;
        let loading = self.key(sale.id, &format!("load:{}", sale.epoch.0));
        self.load(&loading, sale.epoch, &marks).await?;
        let keys = [self.key(sale.id, "sale"), self.key(sale.id, "live"), self.key(sale.id, "out"), loading];
        let args = [
            sale.epoch.0.to_string(),
            marks.len().to_string(),
            sale.version.to_string(),
            sale.cap.to_string(),
            sale.window.begin.ms().to_string(),
            sale.window.end.ms().to_string(),
            sale.status.as_str().to_owned(),
            sale.price.cents().to_string(),
            GROUP.to_owned(),
            self.channel(),
            sale.id.to_string(),
        ];
        let current = self.current();
        let opened: i64 = self.call(&current, &current.scripts.open, &keys, &args).await?;
        if opened < 0 {
            return Err(GateError::Lost);
        }
        let marks = u32::try_from(marks.len()).unwrap_or(u32::MAX);
        current.adopt(sale.id, sale.epoch, sale.cap.saturating_sub(marks));
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A new refusal needs a letter of its own, which the script returns and its header explains.
    #[test]
    fn every_refusal_has_its_own_letter_in_the_script() {
        let script = include_str!("lua/admit.lua");
        for &refusal in Refusal::ALL {
            let letter = refusal_letter(refusal);
            assert!(!["a", "r", "h", "b"].contains(&letter), "{refusal:?} has the letter of another answer");
            assert_eq!(parse_refusal(letter), Some(refusal), "{refusal:?} shares its letter");
            assert!(script.matches(&format!("'{letter}'")).count() >= 2, "{refusal:?} is not in admit.lua");
        }
    }
}

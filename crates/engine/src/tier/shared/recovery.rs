//! Follows the ledger's record of the gate: which incarnation is valid, and which sales are open in it. When Redis has lost the gate,
//! one node rebuilds it; the others wait until the ledger calls the sales open again.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use stampede_core::ports::{Gate as _, GateError, LedgerError};
use stampede_core::{Epoch, Sale, SaleId, SalePhase, Timestamp};
use tokio::sync::{Notify, oneshot};

use super::{Shared, rebuild, requirements};
use crate::alerts::AlertKind;
use crate::error::{Error, describe};
use crate::retention::{RETENTION, is_past_retention};

const INTERVAL: Duration = Duration::from_secs(1);
/// How often a Redis that stays connected is checked: its clock may be set while it runs.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
/// The shortest pause between two readings of changed sales.
const CHANGES_PAUSE: Duration = Duration::from_millis(5);
/// A sale that is not open and makes no progress for this long is opened by the first node that notices. Doing so too early is harmless.
const STALLED_AFTER: Duration = Duration::from_secs(5);
/// Sales that are compared with the gate at once.
const CONCURRENT_SNAPSHOTS: usize = 16;
/// The epoch of a sale that has never been rebuilt.
const FIRST_EPOCH: Epoch = Epoch(1);

/// Whether the sale was created but not yet opened for the first time.
pub(super) fn is_new(sale: &Sale) -> bool {
    (sale.phase, sale.epoch) == (SalePhase::Loading, FIRST_EPOCH)
}

/// Why the gate cannot be used. The message is public; the causes are only logged.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum NotReady {
    #[error("the node is starting")]
    Starting,
    #[error("Redis cannot be used")]
    Redis(String),
    /// Redis must be set up differently.
    #[error("{0}")]
    Unsuitable(String),
    #[error("the database cannot be used")]
    Ledger(String),
    #[error("the gate is being rebuilt")]
    Rebuilding,
    #[error("the node is stopping")]
    Stopping,
}

impl NotReady {
    pub(super) fn cause(&self) -> &str {
        match self {
            Self::Redis(cause) | Self::Ledger(cause) => cause,
            _ => "",
        }
    }
}

impl From<GateError> for NotReady {
    fn from(error: GateError) -> Self {
        match error {
            GateError::Lost | GateError::NotOpen => Self::Rebuilding,
            GateError::Busy | GateError::NotSent | GateError::Unanswered => Self::Redis(error.to_string()),
        }
    }
}

impl From<LedgerError> for NotReady {
    fn from(error: LedgerError) -> Self {
        Self::Ledger(describe(&error))
    }
}

impl From<Error> for NotReady {
    /// The queues of the tier are closed.
    fn from(_: Error) -> Self {
        Self::Stopping
    }
}

/// Sales for which the gate has answered that it lost them, with the incarnation and the epoch that were used.
#[derive(Debug, Default)]
pub(super) struct LostSales {
    found: Mutex<HashMap<SaleId, (u64, Epoch)>>,
    notify: Notify,
}

impl LostSales {
    pub(super) fn report(&self, sale: SaleId, incarnation: u64, epoch: Epoch) {
        self.found.lock().insert(sale, (incarnation, epoch));
        self.notify.notify_one();
    }

    fn take(&self) -> HashMap<SaleId, (u64, Epoch)> {
        std::mem::take(&mut self.found.lock())
    }
}

/// Sales that other nodes have changed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    sales: Mutex<HashSet<SaleId>>,
    /// Something may have been missed.
    all: Notify,
    notify: Notify,
}

impl Changes {
    pub(super) fn add(&self, sale: SaleId) {
        self.sales.lock().insert(sale);
        self.notify.notify_one();
    }

    pub(super) fn add_all(&self) {
        self.all.notify_one();
    }
}

/// How far a sale that is not open has come, and since when.
#[derive(Debug)]
struct Progress {
    /// The incarnation, the sale's phase and epoch, and the heartbeat of rebuilds.
    at: (u64, SalePhase, Epoch, i64),
    since: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// The connection over which Redis was last checked.
    checked_connection: Option<u64>,
    /// When Redis last passed the check.
    checked_at: Option<Instant>,
    not_open: HashMap<SaleId, Progress>,
}

/// Runs until `shared` is dropped. Sends into `started` whether the gate can be used, once that is known.
pub(super) async fn run(shared: Weak<Shared>, started: oneshot::Sender<Result<(), NotReady>>) {
    let mut recovery = Recovery::default();
    let (losses, changes) = {
        let Some(shared) = shared.upgrade() else { return };
        // The start may have stopped waiting.
        let _ = started.send(recovery.start(&shared).await);
        (shared.losses.clone(), shared.changes.clone())
    };
    let mut rounds = tokio::time::interval(INTERVAL);
    rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let is_change = tokio::select! {
            () = changes.notify.notified() => true,
            () = changes.all.notified() => false,
            () = losses.notify.notified() => false,
            _ = rounds.tick() => false,
        };
        let Some(shared) = shared.upgrade() else { return };
        if is_change {
            apply(&shared).await;
            // What changes meanwhile is read together.
            tokio::time::sleep(CHANGES_PAUSE).await;
        } else {
            // The reason has been logged, and `ready` returns it.
            let _ = recovery.round(&shared).await;
            // LostSales are reported at the rate of the requests.
            tokio::time::sleep(SHORTEST_PAUSE).await;
        }
    }
}

/// Reads the sales that other nodes have changed.
async fn apply(shared: &Shared) {
    let changed = std::mem::take(&mut *shared.changes.sales.lock());
    for id in changed {
        match shared.refresh(id).await {
            Ok(Some(sale)) => compare(shared, &sale).await,
            Ok(None) => {}
            Err(error) => tracing::debug!(sale = %id, error = describe(&error), "cannot read a sale that was changed"),
        }
    }
}

/// Compares an open sale with the gate: reads what is left, and repeats an edit that has not reached the gate.
async fn compare(shared: &Shared, sale: &Sale) {
    let Some((incarnation, epoch)) = shared.gate.opened_as(sale.id) else { return };
    let compared = async {
        let snapshot = shared.gate.snapshot(sale.id).await?;
        if snapshot.is_some_and(|snapshot| snapshot.version < sale.version) {
            shared.gate.edit(sale).await?;
        }
        Ok::<_, GateError>(())
    };
    match compared.await {
        Ok(()) => {}
        Err(GateError::Lost) => shared.losses.report(sale.id, incarnation, epoch),
        Err(error) => tracing::debug!(sale = %sale.id, %error, "cannot compare a sale with the gate"),
    }
}

impl Recovery {
    /// Repeats rounds until the gate can be used, or it is certain that it cannot be for now.
    async fn start(&mut self, shared: &Arc<Shared>) -> Result<(), NotReady> {
        loop {
            match self.round(shared).await {
                Err(NotReady::Rebuilding) => tokio::time::sleep(SHORTEST_PAUSE).await,
                done => return done,
            }
        }
    }

    /// Brings this node in line with the ledger and the gate, and remembers whether it can sell.
    async fn round(&mut self, shared: &Arc<Shared>) -> Result<(), NotReady> {
        let done = self.follow(shared).await;
        let reason = done.as_ref().err().cloned();
        let before = std::mem::replace(&mut *shared.not_ready.lock(), reason.clone());
        shared.is_unsuitable.store(matches!(reason, Some(NotReady::Unsuitable(_))), Ordering::Relaxed);
        if let Some(NotReady::Unsuitable(reason)) = &reason {
            shared.context.alerts.raise(AlertKind::Unsuitable, "Redis".to_owned(), reason.clone()).await;
        }
        match (before, reason) {
            (None, Some(reason)) => tracing::error!(%reason, cause = reason.cause(), "the gate cannot be used"),
            (Some(_), None) => tracing::info!("the gate can be used"),
            _ => {}
        }
        done
    }

    async fn follow(&mut self, shared: &Arc<Shared>) -> Result<(), NotReady> {
        let (gate, ledger) = (&shared.gate, &shared.context.ledger);
        let redis = &shared.config.redis;
        let is_due = self.checked_at.is_none_or(|at| at.elapsed() >= CHECK_INTERVAL);
        let is_new = self.checked_connection != Some(redis.connection_count());
        if is_due || is_new {
            self.checked_at = None;
            requirements::check(redis, ledger.as_ref(), shared.config.assume_noeviction).await?;
            if is_new {
                requirements::warn_of_missing_persistence(redis).await?;
            }
            (self.checked_connection, self.checked_at) = (Some(redis.connection_count()), Some(Instant::now()));
        }
        let incarnation = ledger.gate_record("").await?.incarnation;
        shared.set_incarnation(incarnation);
        if !gate.has_scripts().await? {
            return rebuild::all(shared, "Redis does not have the scripts of the gate").await;
        }
        let losses = shared.losses.take();
        let now = shared.context.clock.now();
        let sales = ledger.sales(Some(now.minus(RETENTION))).await?;
        for sale in &sales {
            shared.adopt(sale);
            shared.context.sale_index.put(sale.clone());
        }
        // A loss counts only if the ledger still calls the sale open as it was used: otherwise another node has rebuilt it.
        let is_lost =
            |sale: &Sale| sale.phase == SalePhase::Open && losses.get(&sale.id) == Some(&(incarnation, sale.epoch));
        if sales.iter().any(is_lost) {
            return rebuild::all(shared, "Redis has lost a part of the gate").await;
        }
        self.open_stalled(shared, &sales, incarnation).await?;
        retire(shared, now).await?;
        let open = sales.iter().filter(|sale| sale.phase == SalePhase::Open);
        futures_util::stream::iter(open).for_each_concurrent(CONCURRENT_SNAPSHOTS, |sale| compare(shared, sale)).await;
        Ok(())
    }

    /// Opens sales that were left unopened by a node that died.
    async fn open_stalled(&mut self, shared: &Arc<Shared>, sales: &[Sale], incarnation: u64) -> Result<(), NotReady> {
        let (mut not_open, mut stalled) = (HashMap::new(), Vec::new());
        let waiting: Vec<&Sale> = sales.iter().filter(|sale| sale.phase != SalePhase::Open).collect();
        let heartbeat = if waiting.is_empty() { 0 } else { shared.gate.heartbeat().await? };
        for sale in waiting {
            let at = (incarnation, sale.phase, sale.epoch, heartbeat);
            let progress = self.not_open.remove(&sale.id).filter(|progress| progress.at == at);
            let progress = progress.unwrap_or_else(|| Progress { at, since: Instant::now() });
            if progress.since.elapsed() >= STALLED_AFTER {
                stalled.push(sale);
            }
            not_open.insert(sale.id, progress);
        }
        self.not_open = not_open;
        for sale in &stalled {
            if !is_new(sale) {
                return rebuild::all(shared, "a rebuild of the gate made no progress").await;
            }
            tracing::warn!(sale = %sale.id, "opening a sale that was created but not opened");
            rebuild::one(shared, sale, incarnation).await?;
        }
        Ok(())
    }
}

/// Removes sales that are long over from the gate.
async fn retire(shared: &Arc<Shared>, now: Timestamp) -> Result<(), NotReady> {
    for id in shared.gate.sales() {
        let is_over = shared.context.sale_index.get(id).is_some_and(|sale| is_past_retention(&sale, now));
        if is_over
            && shared.gate.remove(id).await?
            && let Some(queue) = shared.queues.remove(id)
        {
            // Not awaited: it may wait for an order that is being recorded.
            tokio::spawn(queue.close());
        }
    }
    Ok(())
}

//! Follows the ledger's record of the gate: which incarnation is valid, and which sales are open in it. When Redis has lost the gate,
//! one node rebuilds it; the others wait until the ledger calls the sales open again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use stampede_core::ports::{Gate as _, GateError, GateRecord, LedgerError};
use stampede_core::{Epoch, Sale, SaleId, SalePhase, Timestamp};
use stampede_gate::redis::RebuildStage;
use stampede_redis::{Backoff, jitter};
use tokio::sync::{Notify, oneshot};

use super::{RedisTier, rebuild, requirements, retirement};
use crate::alerts::AlertKind;
use crate::edits;
use crate::error::{Error, describe};
use crate::retention::{RETENTION, is_past_retention};

/// The pause between two rounds while the gate can be used. Shortened at random, so that nodes do not act at the same moment.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same while Redis does not answer or the gate is being rebuilt.
const UNREADY_INTERVAL: Duration = Duration::from_millis(200);
/// How long a node that has begun a rebuild is given to load the scripts.
const BEGUN_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a Redis that stays connected is checked: its clock may be set while it runs.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The shortest pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
/// The shortest pause between two readings of changed sales.
const CHANGES_PAUSE: Duration = Duration::from_millis(5);
/// A sale that is not open and makes no progress for this long is opened by the first node that notices. Doing so too early is harmless.
const STALLED_AFTER: Duration = Duration::from_secs(5);
/// So many rebuilds within [`REPEATED_WITHIN`] need an operator.
const REPEATED_REBUILDS: usize = 5;
const REPEATED_WITHIN: Duration = Duration::from_secs(300);
/// The case of an alert about the gate has ended when the gate could be used for this long. A Redis at the edge of what is allowed must not
/// raise an alert every few seconds.
const CASE_ENDED_AFTER: Duration = Duration::from_secs(60);
/// A sale that cannot be bought now, and not soon, is compared with the gate in every so many rounds only.
const IDLE_ROUNDS: u64 = 10;
/// A sale can be bought soon if it begins within this time, and was until lately if it has ended within it.
const NEAR_WINDOW: Duration = Duration::from_secs(60);
/// How many characters of what Redis answers tell two alerts apart.
const MAX_ALERT_CAUSE: usize = 80;
/// Sales that are compared with the gate at once.
const CONCURRENT_SNAPSHOTS: usize = 16;
/// By how much the clock of another node may be ahead when it removes a sale that is long over.
const MAX_CLOCK_LEAD: Duration = Duration::from_secs(60);
/// The reason while the ledger's incarnation is lower than one that this node has seen.
const OLDER_DATABASE: &str = "the database is older than the gate: it was restored while nodes were running, or is a copy that lags behind; \
    stop all nodes before a restore, and delete the gate's keys in Redis";
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
    /// Redis must be set up differently, or the database is not the one that belongs to the gate. `case` is what stays the same while the
    /// reason, which may hold measured values, changes.
    #[error("{reason}")]
    Unsuitable { case: &'static str, reason: String },
    #[error("Redis refuses writes")]
    ReadOnly(String),
    #[error("the database cannot be used")]
    Ledger(String),
    #[error("the queue cannot be used")]
    Queue(String),
    #[error("the gate is being rebuilt")]
    Rebuilding,
    #[error("the node is stopping")]
    Stopping,
}

impl NotReady {
    pub(super) fn cause(&self) -> &str {
        match self {
            Self::Redis(cause) | Self::Ledger(cause) | Self::Queue(cause) | Self::ReadOnly(cause) => cause,
            _ => "",
        }
    }

    /// The case of the alert that this raises; `None` if no operator is needed.
    fn alert_case(&self) -> Option<String> {
        match self {
            Self::Unsuitable { case, .. } => Some(format!("gate: {case}")),
            // The text of Redis says which limit or right it is, and is the same in every round.
            Self::ReadOnly(cause) => {
                Some(format!("gate: {self} {}", cause.chars().take(MAX_ALERT_CAUSE).collect::<String>()))
            }
            _ => None,
        }
    }
}

impl From<GateError> for NotReady {
    fn from(error: GateError) -> Self {
        match error {
            GateError::Lost | GateError::Damaged | GateError::NotOpen => Self::Rebuilding,
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
pub(in crate::tier) struct LostSales {
    found: Mutex<HashMap<SaleId, (u64, Epoch)>>,
    notify: Notify,
}

impl LostSales {
    pub(in crate::tier) fn report(&self, sale: SaleId, incarnation: u64, epoch: Epoch) {
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
    /// The incarnation, the sale's phase and epoch, and the heartbeats of rebuilds that may be about to open it.
    at: (u64, SalePhase, Epoch, [i64; 2]),
    since: Instant,
}

/// Which sales are open in the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    All,
    /// So many are closed: they are being rebuilt, or cannot be now.
    AllBut(usize),
}

#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// The connection over which Redis was last checked.
    checked_connection: Option<u64>,
    /// When Redis last passed the check.
    checked_at: Option<Instant>,
    /// The incarnation whose rebuild was begun and whose scripts are missing, and since when.
    begun: Option<(u64, Instant)>,
    not_open: HashMap<SaleId, Progress>,
    /// The incarnation of the last round that found sales open.
    opened: Option<u64>,
    /// The number of rounds in which the sales were read.
    rounds: u64,
    rebuilds: Rebuilds,
    reported: Reported,
}

/// The cases of alerts about the gate that have not ended for certain.
#[derive(Debug, Default)]
struct Reported {
    cases: HashSet<String>,
    /// Since when the gate can be used.
    usable_since: Option<Instant>,
}

impl Reported {
    fn begin(&mut self, case: String) {
        self.usable_since = None;
        self.cases.insert(case);
    }

    /// Notes that the gate can be used, and returns the cases that have ended.
    fn end(&mut self, now: Instant) -> HashSet<String> {
        let since = *self.usable_since.get_or_insert(now);
        if now.duration_since(since) < CASE_ENDED_AFTER { HashSet::new() } else { std::mem::take(&mut self.cases) }
    }
}

/// Notices that the gate is rebuilt again and again, by whichever node.
#[derive(Debug, Default)]
struct Rebuilds {
    incarnation: Option<u64>,
    /// When this node has noticed a new incarnation, at most [`REPEATED_REBUILDS`] times.
    noticed: VecDeque<Instant>,
}

impl Rebuilds {
    /// Returns whether an operator is needed.
    fn notice(&mut self, incarnation: u64, now: Instant) -> bool {
        if self.incarnation.replace(incarnation).is_none_or(|before| before == incarnation) {
            return false;
        }
        self.noticed.push_back(now);
        if self.noticed.len() > REPEATED_REBUILDS {
            self.noticed.pop_front();
        }
        self.noticed.len() == REPEATED_REBUILDS && now.duration_since(self.noticed[0]) <= REPEATED_WITHIN
    }
}

/// Runs until the tier is dropped. Sends into `started` whether the gate can be used, once that is known.
pub(super) async fn run(tier: Weak<RedisTier>, started: oneshot::Sender<Result<(), NotReady>>) {
    let mut recovery = Recovery::default();
    let (losses, changes) = {
        let Some(tier) = tier.upgrade() else { return };
        // The start may have stopped waiting.
        let _ = started.send(recovery.start(&tier).await);
        (tier.losses.clone(), tier.changes.clone())
    };
    let mut next_round = tokio::time::Instant::now();
    loop {
        let is_change = tokio::select! {
            () = changes.notify.notified() => true,
            () = changes.all.notified() => false,
            () = losses.notify.notified() => false,
            () = tokio::time::sleep_until(next_round) => false,
        };
        let Some(tier) = tier.upgrade() else { return };
        if is_change {
            apply(&tier).await;
            // What changes meanwhile is read together.
            tokio::time::sleep(CHANGES_PAUSE).await;
        } else {
            // The reason has been logged, and `ready` returns it.
            let interval = match recovery.round(&tier).await {
                Ok(Opened::AllBut(_)) | Err(NotReady::Redis(_) | NotReady::ReadOnly(_) | NotReady::Rebuilding) => {
                    UNREADY_INTERVAL
                }
                _ => INTERVAL,
            };
            next_round = tokio::time::Instant::now() + jitter(interval);
            // LostSales are reported at the rate of the requests.
            tokio::time::sleep(SHORTEST_PAUSE).await;
        }
    }
}

/// Reads the sales that other nodes have changed.
async fn apply(tier: &Arc<RedisTier>) {
    let changed = std::mem::take(&mut *tier.changes.sales.lock());
    for id in changed {
        match tier.refresh(id).await {
            Ok(Some(sale)) => compare(tier, &sale, false).await,
            Ok(None) => {}
            Err(error) => tracing::debug!(sale = %id, error = describe(&error), "cannot read a sale that was changed"),
        }
    }
}

/// Compares an open sale with the gate: reads what is left, repeats an edit that has not reached the gate, and has a reduction
/// completed. `has_pending_edits`: the ledger does not know whether the gate has the sale's edits.
async fn compare(tier: &Arc<RedisTier>, sale: &Sale, has_pending_edits: bool) {
    let Some((incarnation, epoch)) = tier.gate.opened_as(sale.id) else { return };
    let compared = async {
        let Some(snapshot) = tier.gate.snapshot(sale.id).await? else { return Ok(()) };
        let cap = match snapshot.version.cmp(&sale.version) {
            std::cmp::Ordering::Less => tier.gate.edit(sale).await?,
            std::cmp::Ordering::Equal => Some(snapshot.cap),
            // The sale was edited after it was read.
            std::cmp::Ordering::Greater => return Ok(()),
        };
        tier.start_reduction(sale, cap);
        if has_pending_edits || snapshot.version < sale.version {
            tier.note_applied_edits(sale).await?;
        }
        Ok::<_, Error>(())
    };
    match compared.await {
        Ok(()) => {}
        Err(Error::Gate(error)) if error.is_loss() => tier.losses.report(sale.id, incarnation, epoch),
        Err(error) => {
            tracing::debug!(sale = %sale.id, error = describe(&error), "cannot compare a sale with the gate");
        }
    }
}

impl Recovery {
    /// Repeats rounds until the gate can be used, or it is certain that it cannot be for now.
    async fn start(&mut self, tier: &Arc<RedisTier>) -> Result<(), NotReady> {
        let mut backoff = Backoff::new(SHORTEST_PAUSE, UNREADY_INTERVAL);
        loop {
            match self.round(tier).await {
                Err(NotReady::Rebuilding) => backoff.sleep().await,
                done => return done.map(drop),
            }
        }
    }

    /// Brings this node in line with the ledger and the gate, and remembers whether it can sell.
    async fn round(&mut self, tier: &Arc<RedisTier>) -> Result<Opened, NotReady> {
        let done = self.follow(tier).await;
        match done {
            Ok(Opened::All) => tier.closed.end(),
            Ok(Opened::AllBut(_)) | Err(_) => tier.closed.begin(),
        }
        let has_gate = match &done {
            Ok(_) => {
                self.opened = Some(tier.gate.incarnation());
                true
            }
            Err(NotReady::Ledger(_)) => self.opened == Some(tier.gate.incarnation()) && has_gate(tier).await,
            Err(_) => false,
        };
        tier.has_gate.store(has_gate, Ordering::Relaxed);
        let reason = done.as_ref().err().cloned();
        let before = std::mem::replace(&mut *tier.not_ready.lock(), reason.clone());
        tier.is_unsuitable.store(matches!(reason, Some(NotReady::Unsuitable { .. })), Ordering::Relaxed);
        if let Some(reason) = &reason
            && let Some(about) = reason.alert_case()
        {
            let message = format!("{reason} {}", reason.cause()).trim_end().to_owned();
            self.reported.begin(about.clone());
            tier.context.alerts.raise(AlertKind::Unsuitable, about, message).await;
        }
        if done.is_ok() {
            for about in self.reported.end(Instant::now()) {
                tier.context.alerts.clear(AlertKind::Unsuitable, &about).await;
            }
        }
        match (before, reason) {
            (None, Some(reason)) => tracing::error!(%reason, cause = reason.cause(), "the gate cannot be used"),
            (Some(_), None) => tracing::info!("the gate can be used"),
            _ => {}
        }
        done
    }

    async fn follow(&mut self, tier: &Arc<RedisTier>) -> Result<Opened, NotReady> {
        let (gate, ledger) = (&tier.gate, &tier.context.ledger);
        self.check_redis(tier).await?;
        if let Some(refusal) = gate.write_refusal().await? {
            return Err(NotReady::ReadOnly(refusal));
        }
        let record = ledger.gate_record("").await?;
        let incarnation = record.incarnation;
        if self.rebuilds.notice(incarnation, Instant::now()) {
            let message = format!(
                "the gate was rebuilt {REPEATED_REBUILDS} times within {} minutes: nodes of one database use different Redis servers or \
                 database numbers, or Redis keeps losing its data",
                REPEATED_WITHIN.as_secs() / 60
            );
            tier.context.alerts.raise(AlertKind::RebuiltRepeatedly, "gate".to_owned(), message).await;
        }
        if incarnation < gate.incarnation() {
            // The ledger would reject every order of the gate's later epochs.
            return Err(NotReady::Unsuitable { case: "the database is older", reason: OLDER_DATABASE.to_owned() });
        }
        tier.set_incarnation(&record);
        let has_scripts = gate.has_scripts().await?;
        if has_scripts {
            self.begun = None;
            if let Some(reason) = other_server(tier, &record).await? {
                return rebuild::all(tier, reason).await;
            }
        }
        let losses = tier.losses.take();
        let now = tier.context.clock.now();
        let sales = ledger.sales(Some(now.minus(RETENTION))).await?;
        self.rounds += 1;
        if !has_scripts {
            if self.is_begun_elsewhere(&sales, &record) {
                return Err(NotReady::Rebuilding);
            }
            return rebuild::all(tier, "Redis does not have the scripts of the gate").await;
        }
        for sale in &sales {
            tier.adopt(sale);
            tier.context.sale_index.put(sale.clone());
        }
        tier.sales_read_at_ms.fetch_max(now.ms(), Ordering::Relaxed);
        // A loss counts only if the ledger still calls the sale open as it was used: otherwise another node has rebuilt it. A sale that is
        // about to be removed may be lost because the clock of the node that has removed it is ahead.
        let is_lost = |sale: &Sale| {
            sale.phase == SalePhase::Open
                && losses.get(&sale.id) == Some(&(incarnation, sale.epoch))
                && !is_past_retention(sale, now.plus(MAX_CLOCK_LEAD))
        };
        if sales.iter().any(is_lost) {
            return rebuild::all(tier, "Redis has lost a part of the gate").await;
        }
        let rebuilt = self.open_stalled(tier, &sales, incarnation).await?;
        retirement::retire(tier, now).await?;
        // The sales may be older or newer than this. Only edits up to the version that is compared with the gate are noted.
        let pending = edits::pending(ledger.as_ref()).await?;
        let is_pending = |sale: &Sale| pending.contains(&sale.id);
        let is_due = |sale: &Sale| self.rounds % IDLE_ROUNDS == 1 || is_near_window(sale, now) || is_pending(sale);
        let open = sales.iter().filter(|sale| sale.phase == SalePhase::Open && is_due(sale));
        let compare = |sale| compare(tier, sale, is_pending(sale));
        futures_util::stream::iter(open).for_each_concurrent(CONCURRENT_SNAPSHOTS, compare).await;
        edits::note_retired(ledger.as_ref(), &pending, &sales, now).await?;
        let is_open = |sale: &Sale| sale.phase == SalePhase::Open || is_new(sale);
        let closed = sales.iter().filter(|sale| !is_open(sale)).count();
        Ok(rebuilt.unwrap_or(if closed == 0 { Opened::All } else { Opened::AllBut(closed) }))
    }

    /// Checks a server that this node is newly connected to, and at intervals every server.
    async fn check_redis(&mut self, tier: &Arc<RedisTier>) -> Result<(), NotReady> {
        let (gate, ledger) = (&tier.gate, &tier.context.ledger);
        let is_due = self.checked_at.is_none_or(|at| at.elapsed() >= CHECK_INTERVAL);
        let is_new = self.checked_connection.is_none() || self.checked_connection != gate.current_connection();
        if is_due || is_new {
            self.checked_at = None;
            let connection = requirements::check(gate, ledger.as_ref(), tier.config.assume_noeviction).await?;
            requirements::check_persistence(gate, &tier.delivery, is_new).await?;
            (self.checked_connection, self.checked_at) = (Some(connection), Some(Instant::now()));
        }
        Ok(())
    }

    /// Whether another node may have begun a rebuild a moment ago, and be about to load the scripts. It is not waited for longer than
    /// [`BEGUN_TIMEOUT`].
    fn is_begun_elsewhere(&mut self, sales: &[Sale], record: &GateRecord) -> bool {
        // A change of the tier or of the queue also replaces the incarnation, on no server.
        if record.replication_id.is_empty() {
            return false;
        }
        // Sales that a rebuild concerns are closing. Without any sale, or with new ones only, nothing tells whether the scripts were lost or
        // are about to be loaded for the first time.
        let is_closing = |sale: &Sale| sale.phase == SalePhase::Closing;
        if !sales.iter().all(is_new) && !sales.iter().any(is_closing) {
            return false;
        }
        let incarnation = record.incarnation;
        let (of, since) = *self.begun.get_or_insert((incarnation, Instant::now()));
        if of != incarnation {
            self.begun = Some((incarnation, Instant::now()));
            return true;
        }
        since.elapsed() < BEGUN_TIMEOUT
    }

    /// Opens sales that were left unopened by a node that died. Returns what is open if the whole gate was rebuilt.
    async fn open_stalled(
        &mut self,
        tier: &Arc<RedisTier>,
        sales: &[Sale],
        incarnation: u64,
    ) -> Result<Option<Opened>, NotReady> {
        let (mut not_open, mut stalled) = (HashMap::new(), Vec::new());
        let waiting: Vec<&Sale> = sales.iter().filter(|sale| sale.phase != SalePhase::Open).collect();
        let (mut all, mut rest) = (0, 0);
        if !waiting.is_empty() {
            all = tier.gate.heartbeat(RebuildStage::All).await?;
            rest = tier.gate.heartbeat(RebuildStage::Rest).await?;
        }
        for sale in waiting {
            // A rebuild may try sales again for minutes, which must not keep those closed that were created and not opened.
            let heartbeats = [all, if is_new(sale) { 0 } else { rest }];
            let at = (incarnation, sale.phase, sale.epoch, heartbeats);
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
                return rebuild::all(tier, "a rebuild of the gate made no progress").await.map(Some);
            }
            // Another node may be opening it, or has done so.
            let Some(sale) = tier.refresh(sale.id).await?.filter(is_new) else { continue };
            tracing::warn!(sale = %sale.id, "opening a sale that was created but not opened");
            match rebuild::one(tier, &sale, incarnation).await {
                // Its row may be locked, which must not hold up the others. It is tried again after the same time.
                Err(NotReady::Ledger(cause)) => {
                    self.not_open.remove(&sale.id);
                    tracing::warn!(sale = %sale.id, cause, "the sale cannot be opened yet");
                }
                done => done?,
            }
        }
        Ok(None)
    }
}

/// Whether Redis still has what this node has found in it.
async fn has_gate(tier: &RedisTier) -> bool {
    tier.gate.verify_server().await.is_ok() && tier.gate.has_scripts().await.is_ok_and(|has_scripts| has_scripts)
}

/// Why the server is not the one on which the incarnation was opened, although it has its scripts; `None` if it is.
async fn other_server(tier: &RedisTier, record: &GateRecord) -> Result<Option<&'static str>, NotReady> {
    if record.replication_id.is_empty() {
        return Ok(Some("it is not known on which Redis the gate was opened"));
    }
    match tier.gate.verify_server().await {
        Ok(()) => Ok(None),
        Err(GateError::Lost) => Ok(Some("Redis has another replication id, so it may hold an older copy of the gate")),
        Err(error) => Err(error.into()),
    }
}

/// Whether the sale can be bought, or could be a moment ago, or soon can be.
fn is_near_window(sale: &Sale, now: Timestamp) -> bool {
    sale.window.begin.minus(NEAR_WINDOW) <= now && now <= sale.window.end.plus(NEAR_WINDOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A check measures the clocks again every second.
    #[test]
    fn case_of_an_alert_does_not_change_with_measured_values() {
        let ahead = |ms: i64| requirements::wrong_clock(ms).alert_case();
        assert_eq!(ahead(3_600_001), ahead(3_600_742));
        assert_eq!(ahead(1).unwrap(), "gate: the clock of Redis is wrong");
        let refusal = |text: &str| NotReady::ReadOnly(text.to_owned()).alert_case();
        assert_ne!(refusal("OOM command not allowed"), refusal("NOREPLICAS not enough replicas"));
        assert_eq!(NotReady::Rebuilding.alert_case(), None);
    }

    #[test]
    fn case_ends_when_the_gate_could_be_used_for_a_while() {
        let (start, mut reported) = (Instant::now(), Reported::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        reported.begin("clock".to_owned());
        assert!(reported.end(at(0)).is_empty());
        assert!(reported.end(at(50)).is_empty());
        reported.begin("clock".to_owned());
        assert!(reported.end(at(70)).is_empty(), "it had not ended");
        assert_eq!(reported.end(at(130)), HashSet::from(["clock".to_owned()]));
        assert!(reported.end(at(300)).is_empty(), "it has ended once");
    }

    #[test]
    fn repeated_rebuilds_are_noticed_and_rare_ones_are_not() {
        let (start, minute) = (Instant::now(), Duration::from_secs(60));
        let mut rebuilds = Rebuilds::default();
        // The first incarnation that a node sees is no rebuild, and neither is one that it has seen.
        assert!((0..20).all(|n| !rebuilds.notice(1, start + minute * n)));
        let quickly: Vec<bool> = (0..5).map(|n| rebuilds.notice(2 + n, start + Duration::from_secs(n))).collect();
        assert_eq!(quickly, [false, false, false, false, true]);
        let mut rebuilds = Rebuilds::default();
        assert!((0..20).all(|n| !rebuilds.notice(u64::from(n), start + minute * 2 * n)));
    }
}

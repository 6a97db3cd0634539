//! Compares gate, outbox and ledger while sales run, and repairs what differs.
//!
//! A difference counts only if it is found twice, a few seconds apart: between reading the gate and reading the ledger, orders are recorded
//! and cancelled. How many are sold or left is never written; each repair is one that any node may make at any time:
//!
//! | found | repair |
//! |---|---|
//! | a mark without a row, an entry of the outbox or a quarantine; with RabbitMQ, after a marker has come through the queue | record its order, under the epoch of the marks |
//! | a dead row with a mark | release the mark |
//! | a live row without a mark | rebuild the gate |
//! | an older version in the gate | edit the gate again |
//! | a newer version in the gate, which takes no edit until the ledger's passes it | rebuild the gate |
//! | the same version with another cap | a lower one is written into the ledger; one that is higher, or below the marks, is replaced by the ledger's |
//!
//! The broker does not tell which messages a consumer has received and not acknowledged. So before such an order is recorded, a marker is
//! sent through every partition: where it has come through, everything that was confirmed before it is recorded or parked. An order that
//! is neither then, and was not in the outbox when the marker was sent, is in no message.
//!
//! - [`orders`]: compares the orders with the marks

mod orders;

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use rand::RngExt as _;
use stampede_core::ports::gate::Release;
use stampede_core::ports::{Admitted, Fenced, Gate as _, GateError, ReconcileRow, ScheduledWork, Snapshot};
use stampede_core::{Epoch, OrderId, Sale, SaleId, SalePhase, UserId};
use stampede_queue::Marker;
use stampede_redis::Backoff;
use tokio::sync::OnceCell;

use super::super::queued::broker::Broker;
use super::super::time_of_mark;
use super::recovery::NotReady;
use super::{Context, RedisTier, rebuild};
use crate::alerts::AlertKind;
use crate::error::{Error, describe};
use crate::reconcile::{ReconcileReport, Reconciled};
use crate::recording::Pending;
use crate::scheduled::{Schedule, WorkPermit};

/// Entries of the outbox that are read at once.
const PAGE: usize = 100;
/// The most differences of one sale that are repaired at once. The others are found again.
const MAX_FINDINGS: usize = 1000;
/// How long an operator's command waits for another node that reconciles.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a marker may take. An operator's command waits for it, and consumers need about five seconds until they park messages.
const MARKER_TIMEOUT: Duration = Duration::from_secs(8);

/// A difference between gate and ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Finding {
    MarkWithoutRow {
        user: UserId,
        order: OrderId,
        epoch: Epoch,
    },
    DeadRowWithMark {
        user: UserId,
        order: OrderId,
        existing: Option<OrderId>,
    },
    LiveRowWithoutMark {
        user: UserId,
        order: OrderId,
    },
    OldVersion {
        gate: i64,
        ledger: i64,
    },
    NewerVersion {
        gate: i64,
        ledger: i64,
    },
    /// `is_possible`: the gate has no more marks than its cap.
    Cap {
        version: i64,
        gate: u32,
        ledger: u32,
        total: u32,
        is_possible: bool,
    },
}

impl Finding {
    const fn kind(&self) -> &'static str {
        match self {
            Self::MarkWithoutRow { .. } => "mark_without_row",
            Self::DeadRowWithMark { .. } => "dead_row_with_mark",
            Self::LiveRowWithoutMark { .. } => "live_row_without_mark",
            Self::OldVersion { .. } => "old_version",
            Self::NewerVersion { .. } => "newer_version",
            Self::Cap { .. } => "cap_differs",
        }
    }

    const fn is_mark_without_row(&self) -> bool {
        matches!(self, Self::MarkWithoutRow { .. })
    }

    const fn order(&self) -> Option<OrderId> {
        match self {
            Self::MarkWithoutRow { order, .. }
            | Self::DeadRowWithMark { order, .. }
            | Self::LiveRowWithoutMark { order, .. } => Some(*order),
            Self::OldVersion { .. } | Self::NewerVersion { .. } | Self::Cap { .. } => None,
        }
    }

    /// Whether only a rebuild of the whole gate repairs it.
    const fn needs_rebuild(&self) -> bool {
        match self {
            Self::LiveRowWithoutMark { .. } | Self::NewerVersion { .. } => true,
            Self::MarkWithoutRow { .. } | Self::DeadRowWithMark { .. } => false,
            Self::OldVersion { .. } | Self::Cap { .. } => false,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MarkWithoutRow { user, .. } => write!(f, "user {user} holds a mark whose order has no row"),
            Self::DeadRowWithMark { user, .. } => write!(f, "user {user} holds a mark whose order is dead"),
            Self::LiveRowWithoutMark { user, .. } => write!(f, "user {user} has a live order and no mark"),
            Self::OldVersion { gate, ledger } | Self::NewerVersion { gate, ledger } => {
                write!(f, "the gate has version {gate}, the ledger {ledger}")
            }
            Self::Cap { gate, ledger, total, .. } => {
                write!(f, "the gate's cap is {gate}, the ledger's {ledger} of a total of {total}")
            }
        }
    }
}

/// Reconciles once per interval of all nodes, whenever it is this node's turn. If a node dies meanwhile, another one does it in the next
/// interval. Runs until the tier is dropped.
pub(super) async fn run(tier: Weak<RedisTier>, schedule: Schedule, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(tier) = tier.upgrade() else { return };
        let Some(permit) = schedule.begin().await else { continue };
        let done = match tier.gate.begin_reconcile(interval).await {
            Ok(true) => all(&tier, Some(&permit), false).await.map(drop),
            // Another node has done it in this interval.
            Ok(false) => Ok(()),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = done {
            tracing::warn!(error = describe(&error), "reconciling failed; trying again later");
        }
        permit.end().await;
    }
}

/// Reconciles once, for an operator.
pub(super) async fn once(tier: &Arc<RedisTier>, dry_run: bool) -> Result<ReconcileReport, Error> {
    if dry_run {
        return all(tier, None, true).await;
    }
    let schedule = Schedule::new(ScheduledWork::Reconcile, tier.context.locks.as_ref());
    let schedule = schedule.map_err(|error| Error::Unready(error.to_string()))?;
    let Some(permit) = schedule.begin_within(PERMIT_TIMEOUT).await else { return Err(Error::Busy) };
    let done = all(tier, Some(&permit), false).await;
    permit.end().await;
    done
}

/// Compares every open sale twice and repairs what both comparisons have found.
async fn all(tier: &Arc<RedisTier>, permit: Option<&WorkPermit>, dry_run: bool) -> Result<ReconcileReport, Error> {
    let started = Instant::now();
    let sales = tier.gate.sales();
    let mut suspected = HashMap::new();
    let mut failed = None;
    for &sale in &sales {
        let found = or_note(find(tier, sale).await, &mut failed, sale);
        if !found.is_empty() {
            suspected.insert(sale, found);
        }
    }
    if !suspected.is_empty() {
        tokio::time::sleep(tier.config.reconcile.confirm_after).await;
    }
    let mut confirmed = Vec::new();
    for (sale, before) in suspected {
        let again = or_note(find(tier, sale).await, &mut failed, sale);
        confirmed.extend(again.intersection(&before).take(MAX_FINDINGS).map(|finding| (sale, *finding)));
    }
    remove_orders_on_their_way(tier, &mut confirmed, &mut failed).await;
    // A rebuild changes every sale, so it comes last, and there is one for all of them.
    confirmed.sort_by_key(|(_, finding)| finding.needs_rebuild());
    let (mut report, rebuilt) = (ReconcileReport { sales: sales.len(), findings: Vec::new() }, OnceCell::new());
    let mut unrecordable = HashSet::new();
    for (sale, finding) in confirmed {
        if finding.is_mark_without_row() && unrecordable.contains(&sale) {
            // Each would take the same time in vain, and the other sales wait. They are found again.
            continue;
        }
        counter!("stampede_reconcile_findings_total", "finding" => finding.kind()).increment(1);
        let outcome = if dry_run {
            "reported"
        } else {
            let repaired = repair(tier, sale, finding, &rebuilt).await;
            if repaired.is_err() && finding.is_mark_without_row() {
                unrecordable.insert(sale);
            }
            log(tier, permit, sale, finding, repaired).await?
        };
        let (kind, order, detail) = (finding.kind(), finding.order(), finding.to_string());
        report.findings.push(Reconciled { sale, order, finding: kind, detail, outcome });
    }
    histogram!("stampede_reconcile_seconds").record(started.elapsed());
    failed.map_or(Ok(report), Err)
}

/// What was found in a sale, or nothing if it cannot be compared now: it does not hold up the repair of others. Notes the error.
fn or_note(found: Result<HashSet<Finding>, Error>, failed: &mut Option<Error>, sale: SaleId) -> HashSet<Finding> {
    found.unwrap_or_else(|error| {
        tracing::warn!(%sale, error = describe(&error), "cannot compare a sale with the gate");
        *failed = Some(error);
        HashSet::new()
    })
}

/// Removes the marks without a row whose orders may be in a message that a consumer has received, or of which that is not known.
async fn remove_orders_on_their_way(tier: &RedisTier, found: &mut Vec<(SaleId, Finding)>, failed: &mut Option<Error>) {
    let Some(broker) = &tier.broker else { return };
    let sales: HashSet<SaleId> =
        found.iter().filter(|(_, finding)| finding.is_mark_without_row()).map(|(sale, _)| *sale).collect();
    if sales.is_empty() {
        return;
    }
    let mut without_row = HashSet::new();
    if is_marker_passed(tier, broker).await {
        // Read first: a message leaves the parked ones after its orders have rows.
        match tier.context.ledger.parked_sales().await {
            Ok(parked) => {
                let parked: HashSet<SaleId> = parked.into_iter().map(|(sale, _)| sale).collect();
                for &sale in sales.difference(&parked) {
                    let still = or_note(compare(tier, sale).await, failed, sale);
                    without_row.extend(still.into_iter().map(|finding| (sale, finding)));
                }
            }
            Err(error) => *failed = Some(error.into()),
        }
    } else {
        tracing::info!(
            sales = sales.len(),
            "orders without a row are not recorded: they may be on their way in RabbitMQ"
        );
    }
    found.retain(|finding| !finding.1.is_mark_without_row() || without_row.contains(finding));
}

/// Sends a marker through the queue. Returns whether it has come through in time.
async fn is_marker_passed(tier: &RedisTier, broker: &Broker) -> bool {
    let id = rand::rng().random::<u64>();
    let passing = async {
        if let Err(error) = broker.publish_marker(Marker::Reconcile { id }).await {
            tracing::debug!(%error, "cannot send a marker through RabbitMQ");
            return false;
        }
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        while !tier.gate.is_marker_passed(id, broker.partitions()).await.unwrap_or(false) {
            backoff.sleep().await;
        }
        true
    };
    tokio::time::timeout(MARKER_TIMEOUT, passing).await.unwrap_or(false)
}

/// The differences of one sale. While messages wait in RabbitMQ, marks may have no row because of that, and do not count. Parked messages
/// hold up only their own sales (see [`remove_orders_on_their_way`]).
async fn find(tier: &RedisTier, sale: SaleId) -> Result<HashSet<Finding>, Error> {
    let mut found = compare(tier, sale).await?;
    if found.iter().any(Finding::is_mark_without_row) && !broker_is_empty(tier).await {
        found.retain(|finding| !finding.is_mark_without_row());
    }
    Ok(found)
}

/// Compares gate, outbox and ledger of one sale.
async fn compare(tier: &RedisTier, sale: SaleId) -> Result<HashSet<Finding>, Error> {
    let gate = &tier.gate;
    let Some((incarnation, epoch)) = gate.opened_as(sale) else { return Ok(HashSet::new()) };
    // The gate is read before the ledger: an order that is recorded meanwhile has its row by then.
    let (snapshot, marks) = match (gate.snapshot(sale).await, gate.marks(sale).await) {
        (Ok(Some(snapshot)), Ok(Some(marks))) => (snapshot, marks),
        (Err(error), _) | (_, Err(error)) if error.is_loss() => {
            tier.losses.report(sale, incarnation, epoch);
            return Ok(HashSet::new());
        }
        (Err(error), _) | (_, Err(error)) => return Err(error.into()),
        (Ok(None), _) | (_, Ok(None)) => return Ok(HashSet::new()),
    };
    let mut on_their_way = HashSet::new();
    let mut after = None;
    loop {
        let entries = gate.entries(sale, after, PAGE).await?;
        let Some(last) = entries.last() else { break };
        after = Some(last.id);
        on_their_way.extend(entries.iter().flat_map(|entry| &entry.orders).map(|admitted| admitted.order));
    }
    let ledger = &tier.context.ledger;
    on_their_way.extend(orders::quarantined(ledger.as_ref(), sale).await?);
    let mut found = orders::compare(ledger.as_ref(), sale, epoch, marks, &on_their_way).await?;
    // Read last: an epoch does not come back, so the sale was open under it all the time.
    let Some(sold) = ledger.sale(sale).await? else { return Ok(HashSet::new()) };
    if (sold.phase, sold.epoch) != (SalePhase::Open, epoch) {
        // It is being rebuilt.
        return Ok(HashSet::new());
    }
    found.extend(compare_settings(&snapshot, &sold));
    Ok(found)
}

/// The difference between the settings of a sale in the gate and in the ledger, which was read after the gate.
fn compare_settings(snapshot: &Snapshot, sale: &Sale) -> Option<Finding> {
    let (gate, ledger) = (snapshot.version, sale.version);
    match gate.cmp(&ledger) {
        Ordering::Less => Some(Finding::OldVersion { gate, ledger }),
        // Every edit is committed in the ledger before it is sent to the gate, so this is no edit on its way.
        Ordering::Greater => Some(Finding::NewerVersion { gate, ledger }),
        Ordering::Equal if snapshot.cap == sale.cap => None,
        Ordering::Equal => {
            let is_possible = snapshot.marks <= snapshot.cap;
            let (gate, ledger, total) = (snapshot.cap, sale.cap, sale.total);
            Some(Finding::Cap { version: sale.version, gate, ledger, total, is_possible })
        }
    }
}

/// Whether nothing waits in RabbitMQ, as far as that can be read. What consumers have received is not counted.
async fn broker_is_empty(tier: &RedisTier) -> bool {
    match &tier.broker {
        None => true,
        Some(broker) => matches!(broker.waiting().await, Ok(0)),
    }
}

/// Writes what was done into the log. An alert is raised if it failed.
async fn log(
    tier: &RedisTier,
    permit: Option<&WorkPermit>,
    sale: SaleId,
    finding: Finding,
    repaired: Result<&'static str, Error>,
) -> Result<&'static str, Error> {
    let outcome = if repaired.is_ok() { "repaired" } else { "failed" };
    let detail = match &repaired {
        Ok(done) => format!("{finding}: {done}"),
        Err(error) => format!("{finding}: {}", describe(error)),
    };
    tracing::warn!(%sale, finding = finding.kind(), outcome, detail, "gate and ledger differed");
    let Context { alerts, ledger, .. } = &tier.context;
    if repaired.is_err() {
        let about = format!("sale {sale} {}", finding.kind());
        alerts.raise(AlertKind::RepairFailed, about, detail.clone()).await;
    }
    let row = ReconcileRow {
        id: 0,
        at: ledger.now().await?,
        sale,
        order: finding.order(),
        finding: finding.kind().to_owned(),
        detail,
        outcome: outcome.to_owned(),
    };
    match ledger.append_reconciled(permit.and_then(WorkPermit::fence), &[row]).await? {
        Fenced::Done(()) => Ok(outcome),
        Fenced::Superseded => {
            if let Some(permit) = permit {
                permit.warn_superseded();
            }
            Err(Error::Busy)
        }
    }
}

/// Rebuilds the gate, or lets another node finish that has begun to. The error says why neither was possible.
async fn rebuild_gate(tier: &Arc<RedisTier>, reason: &str) -> Result<(), String> {
    match rebuild::all(tier, reason).await {
        Ok(_) | Err(NotReady::Rebuilding) => Ok(()),
        Err(reason) => Err(reason.to_string()),
    }
}

/// Rebuilds the gate, once for all differences that need it.
async fn rebuild_once(
    tier: &Arc<RedisTier>,
    rebuilt: &OnceCell<Result<(), String>>,
    reason: &str,
) -> Result<&'static str, Error> {
    let rebuilt = rebuilt.get_or_init(|| rebuild_gate(tier, reason)).await;
    rebuilt.clone().map(|()| "the gate was rebuilt").map_err(Error::Unready)
}

/// Repairs one difference, and says what was done. `rebuilt` is the outcome of the one rebuild, once there was one.
async fn repair(
    tier: &Arc<RedisTier>,
    sale: SaleId,
    finding: Finding,
    rebuilt: &OnceCell<Result<(), String>>,
) -> Result<&'static str, Error> {
    let (gate, ledger) = (&tier.gate, &tier.context.ledger);
    match finding {
        Finding::MarkWithoutRow { user, order, epoch } => {
            let now = tier.context.clock.now();
            let at = time_of_mark(tier.context.sale_index.get(sale).as_deref(), now);
            let admitted = Admitted { order, user, seq: 0, at };
            let seller = tier.seller(sale)?;
            // It is repeated while the database cannot take it, for example because another client has locked the sale's row.
            let pending = [Pending { epoch, admitted }];
            let recording = tokio::time::timeout(rebuild::RECORD_TIMEOUT, seller.record_and_release(&pending));
            if !recording.await.unwrap_or(false) {
                return Err(Error::OutcomeUnknown);
            }
            Ok("the order was recorded, or rejected and its mark released")
        }
        Finding::DeadRowWithMark { user, order, existing } => {
            gate.release(sale, &[Release { user, order, existing, ended: false }]).await?;
            Ok("the mark was released")
        }
        Finding::OldVersion { .. } => edit_again(tier, sale).await.map(|()| "the edit was repeated"),
        Finding::Cap { version, gate: cap, total, is_possible: true, .. } if cap <= total => {
            match ledger.adopt_cap(sale, version, cap, tier.context.clock.now()).await? {
                None => Err(Error::OutcomeUnknown),
                Some(adopted) if adopted == cap => Ok("the gate's cap was written into the ledger"),
                // The gate's cap is below what is sold.
                Some(_) => replace_cap(tier, sale, version).await,
            }
        }
        Finding::Cap { version, .. } => replace_cap(tier, sale, version).await,
        // Marks cannot be added one by one: only a rebuild loads them.
        Finding::LiveRowWithoutMark { .. } => rebuild_once(tier, rebuilt, "a live order has no mark").await,
        // No edit of the gate reached this version, so the rest of what the gate holds may be wrong as well. An edit cannot lower it.
        Finding::NewerVersion { .. } => {
            rebuild_once(tier, rebuilt, "the gate has a newer version of a sale than the ledger").await
        }
    }
}

/// Writes the ledger's settings of the sale into the gate.
async fn edit_again(tier: &RedisTier, sale: SaleId) -> Result<(), Error> {
    let current = tier.context.ledger.sale(sale).await?.ok_or(GateError::NotOpen)?;
    let cap = tier.gate.edit(&current).await?;
    tier.complete_reduction(&current, cap).await?;
    tier.note_applied_edits(&current).await?;
    Ok(())
}

/// Writes the ledger's cap into the gate, which takes an edit only with a higher version.
async fn replace_cap(tier: &RedisTier, sale: SaleId, version: i64) -> Result<&'static str, Error> {
    if !tier.context.ledger.raise_version(sale, version).await? {
        return Err(Error::OutcomeUnknown);
    }
    edit_again(tier, sale).await.map(|()| "the ledger's cap was written into the gate")
}

//! Compares gate, outbox and ledger while sales run, and repairs what differs.
//!
//! A difference counts only if it is found twice, a few seconds apart: between reading the gate and reading the ledger, orders are recorded
//! and cancelled. How many are sold or left is never written; each repair is one that any node may make at any time:
//!
//! | found | repair |
//! |---|---|
//! | a mark without a row, an entry of the outbox or a quarantine, while nothing waits in RabbitMQ | record its order, under the epoch of the marks |
//! | a dead row with a mark | release the mark |
//! | a live row without a mark | rebuild the gate |
//! | an older version in the gate | edit the gate again |
//! | the same version with another cap | a lower one is written into the ledger; one that is higher, or below the marks, is replaced by the ledger's |

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use stampede_core::ports::gate::Release;
use stampede_core::ports::{Admitted, Fenced, Gate as _, GateError, ReconcileRow, ScheduledWork};
use stampede_core::{Epoch, OrderId, SaleId, SalePhase, UserId};
use tokio::sync::OnceCell;

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
            Self::Cap { .. } => "cap_differs",
        }
    }

    const fn order(&self) -> Option<OrderId> {
        match self {
            Self::MarkWithoutRow { order, .. }
            | Self::DeadRowWithMark { order, .. }
            | Self::LiveRowWithoutMark { order, .. } => Some(*order),
            Self::OldVersion { .. } | Self::Cap { .. } => None,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MarkWithoutRow { user, .. } => write!(f, "user {user} holds a mark whose order has no row"),
            Self::DeadRowWithMark { user, .. } => write!(f, "user {user} holds a mark whose order is dead"),
            Self::LiveRowWithoutMark { user, .. } => write!(f, "user {user} has a live order and no mark"),
            Self::OldVersion { gate, ledger } => write!(f, "the gate has version {gate}, the ledger {ledger}"),
            Self::Cap { gate, ledger, total, .. } => {
                write!(f, "the gate's cap is {gate}, the ledger's {ledger} of a total of {total}")
            }
        }
    }
}

/// Reconciles at intervals, whenever it is this node's turn. Runs until the tier is dropped.
pub(super) async fn run(tier: Weak<RedisTier>, schedule: Schedule, interval: Duration) {
    loop {
        tokio::time::sleep(interval).await;
        let Some(tier) = tier.upgrade() else { return };
        let Some(permit) = schedule.begin().await else { continue };
        if let Err(error) = all(&tier, Some(&permit), false).await {
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
        match find(tier, sale).await {
            Ok(found) if found.is_empty() => {}
            Ok(found) => _ = suspected.insert(sale, found),
            // A sale that cannot be compared does not hold up the repair of others.
            Err(error) => {
                tracing::warn!(%sale, error = describe(&error), "cannot compare a sale with the gate");
                failed = Some(error);
            }
        }
    }
    if !suspected.is_empty() {
        tokio::time::sleep(tier.config.reconcile.confirm_after).await;
    }
    let mut confirmed = Vec::new();
    for (sale, before) in suspected {
        let again = find(tier, sale).await?;
        confirmed.extend(again.intersection(&before).take(MAX_FINDINGS).map(|finding| (sale, *finding)));
    }
    // A rebuild changes every sale, so it comes last, and there is one for all of them.
    confirmed.sort_by_key(|(_, finding)| matches!(finding, Finding::LiveRowWithoutMark { .. }));
    let (mut report, rebuilt) = (ReconcileReport { sales: sales.len(), findings: Vec::new() }, OnceCell::new());
    for (sale, finding) in confirmed {
        counter!("stampede_reconcile_findings_total", "finding" => finding.kind()).increment(1);
        let outcome = if dry_run {
            "reported"
        } else {
            let repaired = repair(tier, sale, finding, &rebuilt).await;
            log(tier, permit, sale, finding, repaired).await?
        };
        let (kind, order, detail) = (finding.kind(), finding.order(), finding.to_string());
        report.findings.push(Reconciled { sale, order, finding: kind, detail, outcome });
    }
    histogram!("stampede_reconcile_seconds").record(started.elapsed());
    failed.map_or(Ok(report), Err)
}

/// The differences of one sale.
async fn find(tier: &RedisTier, sale: SaleId) -> Result<HashSet<Finding>, Error> {
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
    let Some(records) = tier.context.ledger.inspect(sale).await? else { return Ok(HashSet::new()) };
    if (records.sale.phase, records.sale.epoch) != (SalePhase::Open, epoch) {
        // It is being rebuilt.
        return Ok(HashSet::new());
    }

    let mut found = HashSet::new();
    let (sold, quarantined) = (&records.sale, records.quarantine.iter().map(|(_, order)| *order));
    on_their_way.extend(quarantined);
    let rows: HashMap<OrderId, bool> =
        records.orders.iter().map(|row| (row.order.id, row.order.status.is_live())).collect();
    let live = records.orders.iter().filter(|row| row.order.status.is_live());
    let live: HashMap<UserId, OrderId> = live.map(|row| (row.order.user, row.order.id)).collect();
    for &(user, order) in &marks {
        match rows.get(&order) {
            Some(true) => {}
            Some(false) => {
                let existing = live.get(&user).copied();
                found.insert(Finding::DeadRowWithMark { user, order, existing });
            }
            None if on_their_way.contains(&order) => {}
            None => {
                found.insert(Finding::MarkWithoutRow { user, order, epoch });
            }
        }
    }
    if found.iter().any(|finding| matches!(finding, Finding::MarkWithoutRow { .. })) && !queue_is_empty(tier).await {
        // The orders may be on their way.
        found.retain(|finding| !matches!(finding, Finding::MarkWithoutRow { .. }));
    }
    let marked: HashMap<UserId, OrderId> = marks.into_iter().collect();
    for (&user, &order) in &live {
        // A mark of another order of the same user is one of the findings above.
        if !marked.contains_key(&user) {
            found.insert(Finding::LiveRowWithoutMark { user, order });
        }
    }
    if snapshot.version < sold.version {
        found.insert(Finding::OldVersion { gate: snapshot.version, ledger: sold.version });
    } else if snapshot.version == sold.version && snapshot.cap != sold.cap {
        let (version, gate, ledger, total) = (sold.version, snapshot.cap, sold.cap, sold.total);
        let is_possible = snapshot.marks <= gate;
        found.insert(Finding::Cap { version, gate, ledger, total, is_possible });
    }
    Ok(found)
}

/// Whether nothing waits in RabbitMQ, as far as that can be read.
async fn queue_is_empty(tier: &RedisTier) -> bool {
    match &tier.broker {
        None => true,
        Some(broker) => broker.waiting().await == Ok(0),
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
    let Context { alerts, ledger, clock, .. } = &tier.context;
    if repaired.is_err() {
        let about = format!("sale {sale} {}", finding.kind());
        alerts.raise(AlertKind::RepairFailed, about, detail.clone()).await;
    }
    let row = ReconcileRow {
        id: 0,
        at: clock.now(),
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
async fn rebuild_gate(tier: &Arc<RedisTier>) -> Result<(), String> {
    match rebuild::all(tier, "a live order has no mark").await {
        Ok(()) | Err(NotReady::Rebuilding) => Ok(()),
        Err(reason) => Err(reason.to_string()),
    }
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
            let admitted = Admitted { order, user, seq: 0, at: tier.context.clock.now() };
            let seller = tier.seller(sale)?;
            if !seller.record_and_release(&[Pending { epoch, admitted }]).await {
                return Err(Error::OutcomeUnknown);
            }
            Ok("the order was recorded, or rejected and its mark released")
        }
        Finding::DeadRowWithMark { user, order, existing } => {
            gate.release(sale, &[Release { user, order, existing }]).await?;
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
        Finding::LiveRowWithoutMark { .. } => {
            let rebuilt = rebuilt.get_or_init(|| rebuild_gate(tier)).await;
            rebuilt.clone().map(|()| "the gate was rebuilt").map_err(Error::Unready)
        }
    }
}

/// Writes the ledger's settings of the sale into the gate.
async fn edit_again(tier: &RedisTier, sale: SaleId) -> Result<(), Error> {
    let current = tier.context.ledger.sale(sale).await?.ok_or(GateError::NotOpen)?;
    let cap = tier.gate.edit(&current).await?;
    tier.complete_reduction(&current, cap).await?;
    Ok(())
}

/// Writes the ledger's cap into the gate, which takes an edit only with a higher version.
async fn replace_cap(tier: &RedisTier, sale: SaleId, version: i64) -> Result<&'static str, Error> {
    if !tier.context.ledger.raise_version(sale, version).await? {
        return Err(Error::OutcomeUnknown);
    }
    edit_again(tier, sale).await.map(|()| "the ledger's cap was written into the gate")
}

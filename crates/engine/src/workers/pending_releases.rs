//! Releases the marks of orders that died in the ledger, from the ledger's list of pending releases.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_core::ports::gate::Release;
use stampede_core::ports::{Gate, GateError, Ledger, LedgerError, PendingRelease, ReconcileRow};
use stampede_core::{Clock, OrderId, SaleId};
use stampede_redis::{Backoff, jitter};
use tokio::sync::Notify;

use super::doubled;
use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;
use crate::retention::is_past_retention;
use crate::sale_index::SaleIndex;
use crate::tier::Tier;

const BATCH: u32 = 1000;
/// How often the list is read although nothing was added here: another process may have died before it released a mark.
const INTERVAL: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// While something fails, rounds are as far apart as the last one took, between [`FIRST_PAUSE`] and this.
const LONGEST_GAP: Duration = Duration::from_secs(1);
/// After this many failures in a row, which takes about a minute, an alert is raised.
const MAX_FAILURES: u32 = 10;

/// Sales with failures of their own. Further ones are tried in every round.
const MAX_FAILING: usize = 10_000;

/// A sale whose marks could not be released.
#[derive(Debug, Clone, Copy)]
struct Failing {
    /// How often in a row.
    failures: u32,
    /// It is left out until then.
    retry_at: Instant,
}

/// Each sale has pauses of its own, so that one whose marks cannot be released holds up no other.
#[derive(Debug, Default)]
struct FailingSales(HashMap<SaleId, Failing>);

impl FailingSales {
    fn is_left_out(&self, sale: SaleId, now: Instant) -> bool {
        self.0.get(&sale).is_some_and(|failing| now < failing.retry_at)
    }

    /// Counts a failure.
    fn add(&mut self, sale: SaleId, now: Instant) {
        if self.0.len() >= MAX_FAILING && !self.0.contains_key(&sale) {
            return;
        }
        let failing = self.0.entry(sale).or_insert(Failing { failures: 0, retry_at: now });
        failing.failures = failing.failures.saturating_add(1);
        failing.retry_at = now + jitter(doubled(FIRST_PAUSE, failing.failures).min(LONGEST_PAUSE));
    }

    /// How long the worker may wait for the next retry.
    fn pause(&self, now: Instant) -> Duration {
        let next = self.0.values().map(|failing| failing.retry_at).min();
        next.map_or(INTERVAL, |at| at.saturating_duration_since(now).min(INTERVAL))
    }

    /// The sales that have failed so often that an operator is needed.
    fn reported(&self) -> impl Iterator<Item = SaleId> {
        self.0.iter().filter(|(_, failing)| failing.failures >= MAX_FAILURES).map(|(sale, _)| *sale)
    }
}

/// Runs at the start, when `added` is notified, and at intervals. What fails is retried after growing pauses.
pub(crate) async fn run(
    ledger: Arc<dyn Ledger>,
    tier: Arc<dyn Tier>,
    sale_index: Arc<SaleIndex>,
    clock: Arc<dyn Clock>,
    added: Arc<Notify>,
    alerts: Arc<Alerts>,
) {
    let is_retired = |sale| sale_index.get(sale).is_some_and(|sale| is_past_retention(&sale, clock.now()));
    run_on(ledger.as_ref(), tier.gate(), &is_retired, &added, &alerts).await;
}

async fn run_on(
    ledger: &dyn Ledger,
    gate: &dyn Gate,
    is_retired: &(dyn Fn(SaleId) -> bool + Sync),
    added: &Notify,
    alerts: &Alerts,
) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let (mut failing, mut reported) = (FailingSales::default(), HashMap::new());
    loop {
        let started = Instant::now();
        let released = release_all(ledger, gate, is_retired, &mut failing).await;
        report(ledger, alerts, &failing, &mut reported).await;
        if let Err(error) = &released {
            tracing::warn!(error = describe(error), "cannot read the releases of dead orders; trying again");
        }
        if released.is_err() || !failing.0.is_empty() {
            // A round also reads what is left out, so that it must not follow the last one at once.
            tokio::time::sleep(started.elapsed().clamp(FIRST_PAUSE, LONGEST_GAP)).await;
        }
        let pause = match released {
            Ok(()) => {
                backoff.reset();
                failing.pause(Instant::now())
            }
            Err(_) => jitter(backoff.advance()),
        };
        // Both a notification and the timeout start the next round.
        let _ = tokio::time::timeout(pause, added.notified()).await;
    }
}

/// Raises alerts about the sales whose marks could not be released so often, in every round: an alert is repeated if its problem persists.
/// The worker goes on trying. The node that has sent the first alert also writes the reconcile log. `reported`: the sales that this node has
/// raised alerts about, and whether it has yet to write their row.
async fn report(ledger: &dyn Ledger, alerts: &Alerts, failing: &FailingSales, reported: &mut HashMap<SaleId, bool>) {
    for (sale, _) in reported.extract_if(|sale, _| !failing.0.contains_key(sale)) {
        alerts.clear(AlertKind::ReleaseFailed, &format!("sale {sale}")).await;
    }
    for sale in failing.reported() {
        let detail =
            format!("marks of dead orders could not be released {MAX_FAILURES} times; their stock is not sold");
        let is_sent = alerts.raise(AlertKind::ReleaseFailed, format!("sale {sale}"), detail.clone()).await;
        let is_row_due = reported.entry(sale).or_insert(is_sent);
        if *is_row_due {
            match log(ledger, sale, detail).await {
                Ok(()) => *is_row_due = false,
                Err(error) => tracing::warn!(%sale, error = describe(&error), "cannot write the reconcile log"),
            }
        }
    }
}

async fn log(ledger: &dyn Ledger, sale: SaleId, detail: String) -> Result<(), LedgerError> {
    let (finding, outcome) = ("release_failed".to_owned(), "failed".to_owned());
    let row = ReconcileRow { id: 0, at: ledger.now().await?, sale, order: None, finding, detail, outcome };
    ledger.append_reconciled(None, &[row]).await.map(drop)
}

/// Releases what is not left out. An error is one of the ledger; those of the gate are counted in `failing`.
async fn release_all(
    ledger: &dyn Ledger,
    gate: &dyn Gate,
    is_retired: &(dyn Fn(SaleId) -> bool + Sync),
    failing: &mut FailingSales,
) -> Result<(), LedgerError> {
    // Releases that fail do not hold up those after them.
    let (mut failed_now, mut left_out) = (HashSet::new(), HashSet::new());
    let (mut after, mut first_error): (Option<OrderId>, Option<(SaleId, GateError)>) = (None, None);
    loop {
        let pending = ledger.pending_releases(after, BATCH).await?;
        after = pending.last().map(|last| last.order);
        let mut by_sale: HashMap<SaleId, Vec<Release>> = HashMap::new();
        for release in &pending {
            let &PendingRelease { user, order, ended, .. } = release;
            by_sale.entry(release.sale).or_default().push(Release { user, order, existing: None, ended });
        }
        let mut released: Vec<OrderId> = Vec::new();
        for (sale, releases) in by_sale {
            // A sale whose pause ends during this round waits for the next one, so that it is tried once in a round.
            if failed_now.contains(&sale) || left_out.contains(&sale) {
                continue;
            }
            if failing.is_left_out(sale, Instant::now()) {
                left_out.insert(sale);
                continue;
            }
            // A sale that is long over has no marks any more.
            let done = if is_retired(sale) { Ok(Vec::new()) } else { gate.release(sale, &releases).await };
            match done {
                Ok(_) => {
                    released.extend(releases.iter().map(|release| release.order));
                }
                Err(error) => {
                    failed_now.insert(sale);
                    failing.add(sale, Instant::now());
                    first_error = first_error.or(Some((sale, error)));
                }
            }
        }
        ledger.delete_pending_releases(&released).await?;
        // What is added meanwhile may have a lower id, so the next round begins at the lowest again.
        if pending.len() < BATCH as usize {
            break;
        }
    }
    // Those of the others were released, by this process or by another one.
    failing.0.retain(|sale, _| failed_now.contains(sale) || left_out.contains(sale));
    if let Some((sale, error)) = first_error {
        let sales = failed_now.len();
        tracing::warn!(%sale, error = describe(&error), sales, "cannot release the marks of dead orders; trying again");
    }
    Ok(())
}

#[cfg(test)]
mod tests;

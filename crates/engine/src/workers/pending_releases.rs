//! Releases the marks of orders that died in the ledger, from the ledger's list of pending releases.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::gate::Release;
use stampede_core::ports::{GateError, Ledger, ReconcileRow};
use stampede_core::{Clock, OrderId, SaleId};
use stampede_redis::Backoff;
use tokio::sync::Notify;

use crate::alerts::{AlertKind, Alerts};
use crate::error::{Error, describe};
use crate::retention::is_past_retention;
use crate::sale_index::SaleIndex;
use crate::tier::Tier;

const BATCH: u32 = 1000;
/// How often the list is read although nothing was added here: another process may have died before it released a mark.
const INTERVAL: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// After this many failures in a row, which takes about a minute, an alert is raised.
const MAX_FAILURES: u32 = 10;

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
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut failures = HashMap::new();
    loop {
        let released = release_all(ledger.as_ref(), tier.as_ref(), &is_retired, &mut failures).await;
        for sale in failures.iter().filter(|(_, times)| **times == MAX_FAILURES).map(|(sale, _)| *sale) {
            report(ledger.as_ref(), clock.as_ref(), &alerts, sale).await;
        }
        match released {
            Ok(()) => {
                backoff.reset();
                // Both a notification and the timeout start the next round.
                let _ = tokio::time::timeout(INTERVAL, added.notified()).await;
            }
            Err(error) => {
                tracing::warn!(error = describe(&error), "cannot release the marks of dead orders; trying again");
                backoff.sleep().await;
            }
        }
    }
}

/// Raises an alert: the marks of a sale could not be released so often. The worker goes on trying.
async fn report(ledger: &dyn Ledger, clock: &dyn Clock, alerts: &Alerts, sale: SaleId) {
    let detail = format!("marks of dead orders could not be released {MAX_FAILURES} times; their stock is not sold");
    let row = ReconcileRow {
        id: 0,
        at: clock.now(),
        sale,
        order: None,
        finding: "release_failed".to_owned(),
        detail: detail.clone(),
        outcome: "failed".to_owned(),
    };
    if let Err(error) = ledger.append_reconciled(None, &[row]).await {
        tracing::warn!(%sale, error = describe(&error), "cannot write the reconcile log");
    }
    alerts.raise(AlertKind::ReleaseFailed, format!("sale {sale}"), detail).await;
}

/// `failures` counts for each sale how often its releases have failed in a row.
async fn release_all(
    ledger: &dyn Ledger,
    tier: &dyn Tier,
    is_retired: &(dyn Fn(SaleId) -> bool + Sync),
    failures: &mut HashMap<SaleId, u32>,
) -> Result<(), Error> {
    // Releases that fail do not hold up those after them.
    let mut failed_now = HashSet::new();
    let (mut after, mut first_error): (Option<OrderId>, Option<GateError>) = (None, None);
    loop {
        let pending = ledger.pending_releases(after, BATCH).await?;
        after = pending.last().map(|last| last.order);
        let mut by_sale: HashMap<SaleId, Vec<Release>> = HashMap::new();
        for release in &pending {
            let (user, order) = (release.user, release.order);
            by_sale.entry(release.sale).or_default().push(Release { user, order, existing: None });
        }
        let mut released: Vec<OrderId> = Vec::new();
        for (sale, releases) in by_sale {
            if failed_now.contains(&sale) {
                continue;
            }
            // A sale that is long over has no marks any more.
            let done = if is_retired(sale) { Ok(Vec::new()) } else { tier.gate().release(sale, &releases).await };
            match done {
                Ok(_) => {
                    failures.remove(&sale);
                    released.extend(releases.iter().map(|release| release.order));
                }
                Err(error) => {
                    failed_now.insert(sale);
                    *failures.entry(sale).or_default() += 1;
                    first_error = first_error.or(Some(error));
                }
            }
        }
        ledger.delete_pending_releases(&released).await?;
        // What is added meanwhile may have a lower id, so the next round begins at the lowest again.
        if pending.len() < BATCH as usize {
            break;
        }
    }
    if first_error.is_none() {
        failures.clear();
    }
    first_error.map_or(Ok(()), |error| Err(error.into()))
}

//! Releases the marks of orders that died in the ledger, from the ledger's list of pending releases.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::gate::Release;
use stampede_core::ports::{GateError, Ledger};
use stampede_core::{Clock, OrderId, SaleId};
use stampede_redis::Backoff;
use tokio::sync::Notify;

use crate::error::{Error, describe};
use crate::retention::is_past_retention;
use crate::sale_index::SaleIndex;
use crate::tier::Tier;

const BATCH: u32 = 1000;
/// How often the list is read although nothing was added here: another process may have died before it released a mark.
const INTERVAL: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Runs at the start, when `added` is notified, and at intervals. What fails is retried after growing pauses.
pub(crate) async fn run(
    ledger: Arc<dyn Ledger>,
    tier: Arc<dyn Tier>,
    sale_index: Arc<SaleIndex>,
    clock: Arc<dyn Clock>,
    added: Arc<Notify>,
) {
    let is_retired = |sale| sale_index.get(sale).is_some_and(|sale| is_past_retention(&sale, clock.now()));
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    loop {
        match release_all(ledger.as_ref(), tier.as_ref(), &is_retired).await {
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

async fn release_all(
    ledger: &dyn Ledger,
    tier: &dyn Tier,
    is_retired: &(dyn Fn(SaleId) -> bool + Sync),
) -> Result<(), Error> {
    loop {
        let pending = ledger.pending_releases(BATCH).await?;
        if pending.is_empty() {
            return Ok(());
        }
        let mut by_sale: HashMap<SaleId, Vec<Release>> = HashMap::new();
        for release in &pending {
            let (user, order) = (release.user, release.order);
            by_sale.entry(release.sale).or_default().push(Release { user, order, existing: None });
        }
        let (mut released, mut failed): (Vec<OrderId>, Option<GateError>) = (Vec::new(), None);
        for (sale, releases) in by_sale {
            // A sale that is long over has no marks any more.
            let done = if is_retired(sale) { Ok(Vec::new()) } else { tier.gate().release(sale, &releases).await };
            match done {
                Ok(_) => released.extend(releases.iter().map(|release| release.order)),
                Err(error) => failed = Some(error),
            }
        }
        ledger.delete_pending_releases(&released).await?;
        if let Some(error) = failed {
            return Err(error.into());
        }
    }
}

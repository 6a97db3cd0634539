//! Releases the marks of orders that died in the ledger, from the ledger's list of pending releases.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use stampede_core::SaleId;
use stampede_core::ports::gate::Release;
use stampede_core::ports::{Gate, OrderLedger};
use tokio::sync::Notify;

use crate::error::{Error, describe};
use crate::tier::Tier;

const BATCH: u32 = 1000;
const INTERVAL: Duration = Duration::from_secs(5);

/// Runs when `added` is notified, and at intervals for releases that were added by a process that died.
pub(crate) async fn run(ledger: Arc<dyn OrderLedger>, tier: Arc<dyn Tier>, added: Arc<Notify>) {
    loop {
        // Both a notification and the timeout start the next round.
        let _ = tokio::time::timeout(INTERVAL, added.notified()).await;
        if let Err(error) = release_all(ledger.as_ref(), tier.gate()).await {
            tracing::warn!(error = describe(&error), "cannot release the marks of dead orders; trying again");
        }
    }
}

pub(crate) async fn release_all(ledger: &dyn OrderLedger, gate: &dyn Gate) -> Result<(), Error> {
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
        for (sale, releases) in by_sale {
            gate.release(sale, &releases).await?;
        }
        let orders: Vec<_> = pending.iter().map(|release| release.order).collect();
        ledger.delete_pending_releases(&orders).await?;
    }
}

//! Settles what the gate is owed: marks of orders that died in the ledger.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{Ledger, Result};
use stampede_gate::MemoryGate;
use tokio::sync::Notify;

use crate::commit::describe;

const AT_ONCE: u32 = 1000;
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Looks when told, and every few seconds in case nobody could tell.
pub(crate) async fn run(ledger: Arc<dyn Ledger>, gate: Arc<MemoryGate>, told: Arc<Notify>) {
    loop {
        // A timeout is as good as a call.
        let _ = tokio::time::timeout(LOOK_EVERY, told.notified()).await;
        if let Err(error) = settle(ledger.as_ref(), &gate).await {
            tracing::warn!(error = describe(&error), "cannot settle what the gate is pending_releases; trying again");
        }
    }
}

pub(crate) async fn settle(ledger: &dyn Ledger, gate: &MemoryGate) -> Result<()> {
    loop {
        let pending_releases = ledger.pending_releases(AT_ONCE).await?;
        if pending_releases.is_empty() {
            return Ok(());
        }
        for pending_releases in &pending_releases {
            gate.release(pending_releases.sale, pending_releases.user, pending_releases.order, None);
        }
        let orders: Vec<_> = pending_releases.iter().map(|pending_releases| pending_releases.order).collect();
        ledger.delete_pending_releases(&orders).await?;
    }
}

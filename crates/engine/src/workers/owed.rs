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
pub(crate) async fn keep(ledger: Arc<dyn Ledger>, gate: Arc<MemoryGate>, told: Arc<Notify>) {
    loop {
        // A timeout is as good as a call.
        let _ = tokio::time::timeout(LOOK_EVERY, told.notified()).await;
        if let Err(error) = settle(ledger.as_ref(), &gate).await {
            tracing::warn!(error = describe(&error), "cannot settle what the gate is owed; trying again");
        }
    }
}

pub(crate) async fn settle(ledger: &dyn Ledger, gate: &MemoryGate) -> Result<()> {
    loop {
        let owed = ledger.owed(AT_ONCE).await?;
        if owed.is_empty() {
            return Ok(());
        }
        for owed in &owed {
            gate.release(owed.sale, owed.user, owed.order, None);
        }
        let orders: Vec<_> = owed.iter().map(|owed| owed.order).collect();
        ledger.settle_owed(&orders).await?;
    }
}

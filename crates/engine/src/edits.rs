//! What follows an edit of a sale's status or window: once the gate has it, the ledger notes when that was, so that it is known until when
//! the settings before it may have been in effect. An edit that is not noted is pending: any process sees to it that the gate has it, so
//! that a crash in between leaves nothing behind.

use std::collections::HashSet;

use stampede_core::ports::{Ledger, Result};
use stampede_core::{Sale, SaleId, Timestamp};

use crate::retention::is_past_retention;

/// The most sales whose edits are completed in one round. The others follow in the next.
const MAX_PENDING: u32 = 1000;

/// The sales with edits that the gate may not have.
pub(crate) async fn pending(ledger: &dyn Ledger) -> Result<HashSet<SaleId>> {
    Ok(ledger.sales_with_pending_edits(MAX_PENDING).await?.into_iter().collect())
}

/// Notes the pending edits of sales that have left the gate and need not reach it. `in_gate` are all others.
pub(crate) async fn note_retired(
    ledger: &dyn Ledger,
    pending: &HashSet<SaleId>,
    in_gate: &[Sale],
    now: Timestamp,
) -> Result<()> {
    if pending.is_empty() {
        return Ok(());
    }
    let in_gate: HashSet<SaleId> = in_gate.iter().map(|sale| sale.id).collect();
    for &id in pending.difference(&in_gate) {
        if let Some(sale) = ledger.sale(id).await?.filter(|sale| is_past_retention(sale, now)) {
            ledger.note_applied_edits(id, sale.version, now).await?;
        }
    }
    Ok(())
}

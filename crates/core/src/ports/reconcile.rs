//! What reconciling has found and done, and which alerts were sent.

use std::time::Duration;

use async_trait::async_trait;

use super::{Fence, Fenced, Result};
use crate::clock::Timestamp;
use crate::ids::{OrderId, SaleId};

/// One line of the reconcile log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReconcileRow {
    /// Rises with every line. Set by the ledger.
    pub id: i64,
    pub at: Timestamp,
    pub sale: SaleId,
    pub order: Option<OrderId>,
    /// What was found: a word.
    pub finding: String,
    /// What was done, and why.
    pub detail: String,
    /// `repaired`, `failed` or `reported`.
    pub outcome: String,
}

/// Stores what reconciling has found, and which alerts were sent.
#[async_trait]
pub trait ReconcileLog: Send + Sync {
    /// Appends lines; their ids are ignored.
    async fn append_reconciled(&self, fence: Option<Fence>, rows: &[ReconcileRow]) -> Result<Fenced<()>>;

    /// The lines below `before`, newest first.
    async fn reconciled(&self, before: Option<i64>, limit: u32) -> Result<Vec<ReconcileRow>>;

    /// Sets cap and total of a sale to the cap of the gate, but not below what is sold, if the version is still this one and the total
    /// does not rise. This completes reductions. Returns the resulting cap, or `None` if nothing was changed;
    /// [`LedgerError::Conflict`](super::LedgerError::Conflict) if the row stays locked.
    async fn adopt_cap(&self, sale: SaleId, version: i64, cap: u32, now: Timestamp) -> Result<Option<u32>>;

    /// Raises the version of a sale if it is still this one, so that an edit with the ledger's values replaces those of the gate. Returns
    /// whether it did.
    async fn raise_version(&self, sale: SaleId, version: i64) -> Result<bool>;

    /// Records that an alert is sent. `false` if it was sent less than `repeat_after` ago: then it must not be sent again. `now` is the time
    /// of the ledger, so that nodes with different clocks agree.
    async fn claim_alert(&self, alert: &str, now: Timestamp, repeat_after: Duration) -> Result<bool>;

    /// Forgets that an alert was sent, because its case has ended: if it begins again, the alert is sent again.
    async fn clear_alert(&self, alert: &str) -> Result<()>;
}

//! Comparing and repairing gate and ledger, for an operator.

use stampede_core::ports::ReconcileRow;
use stampede_core::{OrderId, SaleId};

use crate::engine::Engine;
use crate::error::Error;

/// What reconciling has found and done.
#[derive(Debug, Clone, Default)]
pub struct ReconcileReport {
    /// How many sales were compared.
    pub sales: usize,
    pub findings: Vec<Reconciled>,
}

/// One difference between gate and ledger.
#[derive(Debug, Clone)]
pub struct Reconciled {
    pub sale: SaleId,
    pub order: Option<OrderId>,
    /// What was found: a word.
    pub finding: &'static str,
    pub detail: String,
    /// `repaired`, `failed`, or `reported` by a dry run.
    pub outcome: &'static str,
}

impl Engine {
    /// Compares the gate with the ledger and repairs what differs; a dry run repairs nothing.
    pub async fn reconcile(&self, dry_run: bool) -> Result<ReconcileReport, Error> {
        self.tier.clone().reconcile(dry_run).await
    }

    /// Rebuilds the gate from the ledger. Sales are closed meanwhile. Returns how many stay closed, because their orders cannot be recorded
    /// or read now; they are tried again.
    pub async fn rebuild_gate(&self) -> Result<usize, Error> {
        self.tier.clone().rebuild().await
    }

    /// What was found and done, newest first, below the id `before`.
    pub async fn reconcile_log(&self, before: Option<i64>, limit: u32) -> Result<Vec<ReconcileRow>, Error> {
        Ok(self.stores.ledger.reconciled(before, limit).await?)
    }
}

//! Leases of worker numbers: each process that makes ids holds one.

use std::time::Duration;

use async_trait::async_trait;

use super::Result;
use crate::clock::Timestamp;
use crate::ids::{IdKind, Lease, WorkerId};

#[async_trait]
pub trait WorkerLeases: Send + Sync {
    /// Renews the lease of `worker` if `holder` still has it; otherwise leases a free worker number. The range granted begins
    /// at or after `not_before` and overlaps no other lease of that number.
    async fn lease_worker(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        not_before: Timestamp,
        span: Duration,
    ) -> Result<Lease>;

    /// Returns the rest of a lease: nothing from `unused_from` on was used.
    async fn return_worker(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()>;

    /// Whether another process holds a worker number now, and so may sell from this ledger.
    async fn has_other_workers(&self, holder: &str) -> Result<bool>;

    /// Records that ids are made in this way. `false` for [`IdKind::Snowflake`] if ids of [`IdKind::Counter`] were made before: those are
    /// higher than the snowflakes of the same time, so later snowflakes could repeat them.
    async fn claim_id_kind(&self, kind: IdKind) -> Result<bool>;
}

//! The audit log: what administrators did.

use async_trait::async_trait;

use super::Result;
use crate::clock::Timestamp;

/// One row of the audit log. An administrator's action has two: one before it is carried out, one with its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditRow {
    pub id: i64,
    /// The id of the action's first row; in that row its own id.
    pub action_id: i64,
    pub at: Timestamp,
    pub actor: String,
    /// Where the request came from.
    pub address: String,
    pub request_id: String,
    pub action: String,
    /// What it is about, such as `sale 12`. The first row of a creation names the parent; the second names what was created.
    pub target: String,
    /// `asked` in the first row; in the second `done`, `unchanged`, or the code of the refusal.
    pub outcome: String,
    /// JSON: what was asked for; in the second row what was changed, or why nothing was.
    pub detail: String,
}

/// Which actions of the audit log, the newest first.
#[derive(Debug, Clone, Copy, Default)]
pub struct AuditFilter<'a> {
    /// Only what is about this, such as `sale 12`.
    pub target: Option<&'a str>,
    /// Only actions with an id below this.
    pub before: Option<i64>,
    pub limit: u32,
}

#[async_trait]
pub trait AuditLog: Send + Sync {
    /// Appends a row. Rows are never changed. Idempotent by the row's id.
    async fn audit(&self, row: &AuditRow) -> Result<()>;

    /// The rows of the newest actions, those of one action together, `asked` first.
    async fn audit_log(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRow>>;
}

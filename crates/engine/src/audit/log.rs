//! The audit log as it is read: each action with its outcome.

use serde_json::Value;
use stampede_core::Timestamp;
use stampede_core::ports::{AuditFilter, AuditRow};

use super::{Change, OutcomeDetail};
use crate::engine::Engine;
use crate::error::Error;

/// An action and what came of it.
#[derive(Debug, Clone)]
pub struct AuditRecord {
    pub id: i64,
    pub asked_at: Timestamp,
    pub actor: String,
    pub address: String,
    pub request_id: String,
    pub action: String,
    pub target: String,
    pub request: Value,
    /// `None` while it is under way, or if the process or the ledger failed before the outcome was written.
    pub outcome: Option<AuditOutcome>,
}

#[derive(Debug, Clone)]
pub struct AuditOutcome {
    pub at: Timestamp,
    /// `done`, `unchanged`, or the code of the refusal.
    pub word: String,
    /// What was created, such as `sale 12`.
    pub created: Option<String>,
    pub changes: Vec<Change>,
    /// Why it was refused or failed.
    pub error: Option<String>,
}

impl AuditRecord {
    fn new(asked: AuditRow) -> Self {
        let AuditRow { id, at, actor, address, request_id, action, target, detail, .. } = asked;
        // A text that is not JSON is shown as it is, so that one row never hides the others.
        let request = serde_json::from_str(&detail).unwrap_or(Value::String(detail));
        Self { id, asked_at: at, actor, address, request_id, action, target, request, outcome: None }
    }

    fn end(&mut self, row: AuditRow) {
        let detail = serde_json::from_str(&row.detail)
            .unwrap_or(OutcomeDetail { error: Some(row.detail), ..OutcomeDetail::default() });
        let created = (row.target != self.target).then_some(row.target);
        let OutcomeDetail { changes, error } = detail;
        self.outcome = Some(AuditOutcome { at: row.at, word: row.outcome, created, changes, error });
    }
}

impl Engine {
    /// The audit log, the newest action first.
    pub async fn audit_log(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRecord>, Error> {
        let mut records: Vec<AuditRecord> = Vec::new();
        for row in self.stores.ledger.audit_log(filter).await? {
            match records.last_mut() {
                Some(record) if record.id == row.action_id => record.end(row),
                _ => records.push(AuditRecord::new(row)),
            }
        }
        Ok(records)
    }
}

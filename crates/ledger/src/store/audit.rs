//! What administrators did. Rows are only ever added.

use stampede_core::Timestamp;
use stampede_core::ports::{AuditEntry, Result};

use super::Store;
use crate::db::{Row, args};

impl Store {
    pub(super) async fn append_audit(&self, entry: &AuditEntry) -> Result<()> {
        let AuditEntry { id, at, actor, action, target, outcome } = entry;
        let insert = "INSERT INTO audit (id, at, actor, action, target, outcome) VALUES (?, ?, ?, ?, ?, ?)";
        // The same entry again changes nothing: an insert that was not answered may be made again.
        let sql = format!("{insert}{}", self.db.dialect().or_leave("id"));
        let texts = [actor.as_str(), action.as_str(), target.as_str(), outcome.as_str()];
        self.db.execute(&sql, args![*id, at.ms(), texts[0], texts[1], texts[2], texts[3]]).await
    }

    pub(super) async fn read_audit(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>> {
        let sql = "SELECT id, at, actor, action, target, outcome FROM audit WHERE id < ? ORDER BY id DESC LIMIT ?";
        let read = |row: &Row| {
            Ok(AuditEntry {
                id: row.int(0)?,
                at: Timestamp::from_ms(row.int(1)?),
                actor: row.text(2)?,
                action: row.text(3)?,
                target: row.text(4)?,
                outcome: row.text(5)?,
            })
        };
        self.db.rows(sql, args![before.unwrap_or(i64::MAX), limit]).await?.iter().map(read).collect()
    }
}

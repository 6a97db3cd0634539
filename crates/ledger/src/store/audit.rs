//! The audit log. Rows are only inserted; triggers reject everything else.

use stampede_core::Timestamp;
use stampede_core::ports::{AuditFilter, AuditRow, Result};

use super::{Store, list};
use crate::db::{Row, args};

const COLUMNS: &str = "id, action_id, at, actor, address, request_id, action, target, outcome, detail";

fn read(row: &Row) -> Result<AuditRow> {
    Ok(AuditRow {
        id: row.int(0)?,
        action_id: row.int(1)?,
        at: Timestamp::from_ms(row.int(2)?),
        actor: row.text(3)?,
        address: row.text(4)?,
        request_id: row.text(5)?,
        action: row.text(6)?,
        target: row.text(7)?,
        outcome: row.text(8)?,
        detail: row.text(9)?,
    })
}

impl Store {
    pub(super) async fn append_audit(&self, row: &AuditRow) -> Result<()> {
        let AuditRow { id, action_id, at, actor, address, request_id, action, target, outcome, detail } = row;
        let insert = format!("INSERT INTO audit ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)");
        let [actor, address, request_id] = [actor.as_str(), address.as_str(), request_id.as_str()];
        let [action, target, outcome, detail] = [action.as_str(), target.as_str(), outcome.as_str(), detail.as_str()];
        let values = args![*id, *action_id, at.ms(), actor, address, request_id, action, target, outcome, detail];
        let mut tx = self.db.begin().await?;
        // An insert without a reply may be repeated: an existing row stays. ON DUPLICATE KEY UPDATE is not used, because on MySQL it
        // counts as an UPDATE, which a trigger rejects.
        if tx.insert_new(&insert, values).await? { tx.commit().await } else { tx.roll_back().await }
    }

    pub(super) async fn read_audit(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRow>> {
        let AuditFilter { target, before, limit } = filter;
        let before = before.unwrap_or(i64::MAX);
        let newest = |condition: &str| {
            format!(
                "SELECT DISTINCT action_id FROM audit WHERE action_id < ?{condition} ORDER BY action_id DESC LIMIT ?"
            )
        };
        let actions = match target {
            None => self.db.rows(&newest(""), args![before, limit]).await?,
            Some(target) => self.db.rows(&newest(" AND target = ?"), args![before, target, limit]).await?,
        };
        let actions = actions.iter().map(|row| row.int(0)).collect::<Result<Vec<_>>>()?;
        if actions.is_empty() {
            return Ok(Vec::new());
        }
        let actions = list(actions.into_iter());
        let rows = format!("SELECT {COLUMNS} FROM audit WHERE action_id IN ({actions}) ORDER BY action_id DESC, id");
        self.db.rows(&rows, &[]).await?.iter().map(read).collect()
    }
}

//! The reconcile log, what reconciling changes in the ledger, and which alerts were sent.

use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ports::{Fence, Fenced, LedgerError, ReconcileLog, ReconcileRow, Result};
use stampede_core::{OrderId, SaleId, Timestamp};

use super::{LONG_WAIT, Store, retry_conflicts, unreadable};
use crate::db::{Row, args};

/// The longest text of a detail.
const MAX_DETAIL: usize = 1000;
/// Lines and alerts that are older are deleted when new ones are written.
const RETENTION: Duration = Duration::from_secs(90 * 24 * 3600);

fn read(row: &Row) -> Result<ReconcileRow> {
    let bad = || unreadable("a line of the reconcile log");
    // 0 stands for no order: the rows of this interface have no NULL.
    let order = row.int(3)?;
    Ok(ReconcileRow {
        id: row.int(0)?,
        at: Timestamp::from_ms(row.int(1)?),
        sale: SaleId::new(row.int(2)?).map_err(|_| bad())?,
        order: if order == 0 { None } else { Some(OrderId::new(order).map_err(|_| bad())?) },
        finding: row.text(4)?,
        detail: row.text(5)?,
        outcome: row.text(6)?,
    })
}

impl Store {
    async fn insert_reconciled(&self, fence: Option<Fence>, rows: &[ReconcileRow]) -> Result<Fenced<()>> {
        let mut tx = self.db.begin().await?;
        if !self.check_fence(&mut tx, fence).await? {
            tx.roll_back().await?;
            return Ok(Fenced::Superseded);
        }
        for ReconcileRow { at, sale, order, finding, detail, outcome, .. } in rows {
            let detail: String = detail.chars().take(MAX_DETAIL).collect();
            let (finding, detail, outcome) = (finding.as_str(), detail.as_str(), outcome.as_str());
            // An order's id is never 0.
            let insert = "INSERT INTO reconcile_log (at, sale_id, order_id, finding, detail, outcome)
                VALUES (?, ?, NULLIF(?, 0), ?, ?, ?)";
            let order = order.map_or(0, OrderId::get);
            tx.execute(insert, args![at.ms(), sale.get(), order, finding, detail, outcome]).await?;
        }
        if let Some(newest) = rows.iter().map(|row| row.at).max() {
            tx.execute("DELETE FROM reconcile_log WHERE at < ?", args![newest.minus(RETENTION).ms()]).await?;
        }
        tx.commit().await?;
        Ok(Fenced::Done(()))
    }

    async fn increment_version(&self, id: SaleId, version: i64) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let sale = self.locked(&mut tx, id).await?;
        if sale.is_none_or(|sale| sale.version != version) {
            tx.roll_back().await?;
            return Ok(false);
        }
        tx.execute("UPDATE sale SET ver = ver + 1 WHERE id = ?", args![id.get()]).await?;
        tx.commit().await?;
        Ok(true)
    }

    async fn note_alert(&self, case: &str, now: Timestamp, repeat_after: Duration) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let lock = self.db.dialect().for_update();
        let sent = tx.row(&format!("SELECT sent_at FROM alert WHERE alert_case = ?{lock}"), args![case]).await?;
        let is_new = match sent {
            None => {
                tx.insert_new("INSERT INTO alert (alert_case, sent_at) VALUES (?, ?)", args![case, now.ms()]).await?
            }
            Some(row) if Timestamp::from_ms(row.int(0)?).plus(repeat_after) <= now => {
                tx.execute("UPDATE alert SET sent_at = ? WHERE alert_case = ?", args![now.ms(), case]).await?;
                true
            }
            Some(_) => false,
        };
        if !is_new {
            tx.roll_back().await?;
            return Ok(false);
        }
        tx.execute("DELETE FROM alert WHERE sent_at < ?", args![now.minus(RETENTION).ms()]).await?;
        tx.commit().await?;
        Ok(true)
    }

    async fn delete_alert(&self, case: &str) -> Result<()> {
        let mut tx = self.db.begin().await?;
        tx.execute("DELETE FROM alert WHERE alert_case = ?", args![case]).await?;
        tx.commit().await
    }
}

#[async_trait]
impl ReconcileLog for Store {
    async fn append_reconciled(&self, fence: Option<Fence>, rows: &[ReconcileRow]) -> Result<Fenced<()>> {
        retry_conflicts!(self.insert_reconciled(fence, rows))
    }

    async fn reconciled(&self, before: Option<i64>, limit: u32) -> Result<Vec<ReconcileRow>> {
        let sql = "SELECT id, at, sale_id, COALESCE(order_id, 0), finding, detail, outcome FROM reconcile_log
            WHERE id < ? ORDER BY id DESC LIMIT ?";
        self.db.rows(sql, args![before.unwrap_or(i64::MAX), limit]).await?.iter().map(read).collect()
    }

    async fn adopt_cap(&self, sale: SaleId, version: i64, cap: u32, now: Timestamp) -> Result<Option<u32>> {
        retry_conflicts!(self.set_cap(sale, version, cap, now), except_after: LONG_WAIT)
    }

    async fn raise_version(&self, sale: SaleId, version: i64) -> Result<bool> {
        retry_conflicts!(self.increment_version(sale, version))
    }

    async fn claim_alert(&self, case: &str, now: Timestamp, repeat_after: Duration) -> Result<bool> {
        retry_conflicts!(self.note_alert(case, now, repeat_after))
    }

    async fn clear_alert(&self, case: &str) -> Result<()> {
        retry_conflicts!(self.delete_alert(case))
    }
}

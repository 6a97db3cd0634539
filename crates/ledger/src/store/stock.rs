//! Changes of a sale's stock: top-ups, and reductions in two steps.
//!
//! A reduction first lowers the cap; the total follows once the gate has taken the cap, because until then it may admit orders above it.
//! While a reduction is not completed, the cap is lower than the total.

use stampede_core::ports::{EditOutcome, Result, StockChange};
use stampede_core::{Sale, SaleId, SaleStatus, Timestamp, shop};

use super::sale_edits::is_used_by_edit;
use super::{Store, unreadable};
use crate::db::{Row, Tx, args};

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    TopUp(u32),
    Reduction(u32),
}

impl Change {
    /// The columns `added` and `reduce_by` of the request.
    fn columns(self) -> (i64, i64) {
        match self {
            Self::TopUp(add) => (i64::from(add), 0),
            Self::Reduction(remove) => (0, i64::from(remove)),
        }
    }

    /// The sale after the first step; `None` if it is not legal.
    fn apply(self, before: &Sale) -> Option<Sale> {
        let (total, cap) = match self {
            // A reduction that is not completed stays so: its part of the cap is still missing.
            Self::TopUp(add) if add <= shop::MAX_STOCK - before.total => (before.total + add, before.cap + add),
            Self::Reduction(remove) => (before.total, before.cap.checked_sub(remove)?),
            Self::TopUp(_) => return None,
        };
        let version = before.version + 1;
        (before.status != SaleStatus::Ended).then(|| Sale { total, cap, version, ..before.clone() })
    }
}

/// Every change of a sale's stock.
pub(super) async fn read_stock_changes(tx: &mut Tx, id: SaleId) -> Result<Vec<StockChange>> {
    let sql = "SELECT at, added, reduce_by, completed_at FROM stock_change WHERE sale_id = ?";
    let rows = tx.rows(sql, args![id.get()]).await?;
    let read = |row: &Row| {
        let (asked_at, added, reduce_by, completed_at) = (row.int(0)?, row.int(1)?, row.int(2)?, row.int(3)?);
        let done_at = if completed_at == 0 { asked_at } else { completed_at };
        let is_edit = added > 0 || reduce_by > 0;
        Ok(StockChange { asked_at: Timestamp::from_ms(asked_at), done_at: Timestamp::from_ms(done_at), added, is_edit })
    };
    rows.iter().map(read).collect()
}

impl Store {
    pub(super) async fn add_stock(
        &self,
        id: SaleId,
        add: u32,
        request_id: &str,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        self.change_stock(id, Change::TopUp(add), request_id, now).await
    }

    pub(super) async fn lower_cap(
        &self,
        id: SaleId,
        remove: u32,
        request_id: &str,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        self.change_stock(id, Change::Reduction(remove), request_id, now).await
    }

    async fn change_stock(&self, id: SaleId, change: Change, request_id: &str, now: Timestamp) -> Result<EditOutcome> {
        let mut tx = self.db.begin().await?;
        let sale = self.locked(&mut tx, id).await?;
        let earlier = "SELECT sale_id, added, reduce_by FROM stock_change WHERE request_id = ?";
        let earlier = match tx.row(earlier, args![request_id]).await? {
            // By how much a reduction has reduced the total is no part of its request.
            Some(row) if row.int(2)? > 0 => Some((row.int(0)?, 0, row.int(2)?)),
            Some(row) => Some((row.int(0)?, row.int(1)?, 0)),
            None => None,
        };
        let is_used = earlier.is_none() && is_used_by_edit(&mut tx, request_id).await?;
        let (added, reduce_by) = change.columns();
        let refused = match (sale, earlier) {
            (None, _) => EditOutcome::NoSuchSale,
            (Some(sale), Some(earlier)) if earlier == (id.get(), added, reduce_by) => EditOutcome::Repeated(sale),
            (Some(_), Some(_)) => EditOutcome::RequestIdReused,
            (Some(_), None) if is_used => EditOutcome::RequestIdReused,
            (Some(before), None) => match change.apply(&before) {
                None => EditOutcome::Illegal(before.status),
                Some(after) => {
                    let insert =
                        "INSERT INTO stock_change (request_id, sale_id, added, at, reduce_by) VALUES (?, ?, ?, ?, ?)";
                    let values = args![request_id, id.get(), added, now.ms(), reduce_by];
                    if !tx.insert_new(insert, values).await? {
                        // Another sale has used the same request id concurrently.
                        tx.roll_back().await?;
                        return Ok(EditOutcome::RequestIdReused);
                    }
                    let update = "UPDATE sale SET total = ?, cap = ?, ver = ? WHERE id = ?";
                    tx.execute(update, args![after.total, after.cap, after.version, id.get()]).await?;
                    tx.commit().await?;
                    return Ok(EditOutcome::Done { before, after });
                }
            },
        };
        tx.roll_back().await?;
        Ok(refused)
    }

    pub(super) async fn set_cap(&self, id: SaleId, version: i64, cap: u32, now: Timestamp) -> Result<Option<u32>> {
        let mut tx = self.db.begin().await?;
        let sale = self.locked(&mut tx, id).await?;
        let Some(sale) = sale.filter(|sale| sale.version == version && cap <= sale.total) else {
            tx.roll_back().await?;
            return Ok(None);
        };
        let cap = cap.max(sale.sold);
        if (sale.cap, sale.total) == (cap, cap) {
            tx.roll_back().await?;
            return Ok(Some(cap));
        }
        tx.execute("UPDATE sale SET cap = ?, total = ? WHERE id = ?", args![cap, cap, id.get()]).await?;
        complete_reductions(&mut tx, &sale, cap, now).await?;
        tx.commit().await?;
        Ok(Some(cap))
    }
}

/// Notes by how much the total has been reduced: with the first reduction that was not completed, or with a row of its own if there was
/// none and the gate had a lower cap all the same.
async fn complete_reductions(tx: &mut Tx, sale: &Sale, cap: u32, now: Timestamp) -> Result<()> {
    let removed = i64::from(sale.total - cap);
    let pending = "SELECT request_id FROM stock_change WHERE sale_id = ? AND reduce_by > 0 AND completed_at = 0
        ORDER BY at, request_id";
    let pending = tx.rows(pending, args![sale.id.get()]).await?;
    if pending.is_empty() && removed > 0 {
        // No request id of an operator has a space.
        let request_id = format!("gate {} {} {cap} {}", sale.id, sale.version, now.ms());
        let insert = "INSERT INTO stock_change (request_id, sale_id, added, at, completed_at) VALUES (?, ?, ?, ?, ?)";
        let values = args![request_id.as_str(), sale.id.get(), -removed, now.ms(), now.ms()];
        if !tx.insert_new(insert, values).await? {
            return Err(unreadable("a change of stock"));
        }
    }
    for (n, row) in pending.iter().enumerate() {
        let (added, request_id) = (if n == 0 { -removed } else { 0 }, row.text(0)?);
        let update = "UPDATE stock_change SET added = ?, completed_at = ? WHERE request_id = ?";
        tx.execute(update, args![added, now.ms(), request_id.as_str()]).await?;
    }
    Ok(())
}

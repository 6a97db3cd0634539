//! Orders whose data the database rejects, until an operator retries or discards them.
//!
//! Every change locks the sale's row first, so that it is serialized with a recording of the same order.

use stampede_core::ports::{Admitted, DiscardOutcome, QuarantinedOrder, RecordOutcome, Result};
use stampede_core::{Epoch, OrderId, RejectReason, SaleId, Timestamp, UserId};

use super::orders::insert_pending_release;
use super::record::{find, insert_outcomes};
use super::resolve::resolve;
use super::{Store, unreadable};
use crate::db::{Row, Tx, args, expect_rows};

const QUARANTINED: &str =
    "SELECT order_id, sale_id, user_id, epoch, seq, admitted_at, error, quarantined_at FROM quarantine WHERE";

/// Entries whose order was recorded later are ignored.
pub(super) const WITHOUT_ROW: &str = "NOT EXISTS (SELECT 1 FROM orders WHERE orders.id = quarantine.order_id)";

fn read(row: &Row) -> Result<QuarantinedOrder> {
    let bad = |_| unreadable("a quarantined order");
    Ok(QuarantinedOrder {
        sale: SaleId::new(row.int(1)?).map_err(bad)?,
        epoch: Epoch(row.int(3)?),
        admitted: Admitted {
            order: OrderId::new(row.int(0)?).map_err(bad)?,
            user: UserId::new(row.int(2)?).map_err(bad)?,
            seq: row.int(4)?,
            at: Timestamp::from_ms(row.int(5)?),
        },
        error: row.text(6)?,
        quarantined_at: Timestamp::from_ms(row.int(7)?),
    })
}

async fn delete(tx: &mut Tx, id: OrderId) -> Result<()> {
    tx.execute_on(1, "DELETE FROM quarantine WHERE order_id = ?", args![id.get()]).await
}

impl Store {
    pub(super) async fn read_quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>> {
        let sql = format!("{QUARANTINED} order_id < ? AND {WITHOUT_ROW} ORDER BY order_id DESC LIMIT ?");
        let before = before.map_or(i64::MAX, OrderId::get);
        self.db.rows(&sql, args![before, limit]).await?.iter().map(read).collect()
    }

    pub(super) async fn read_quarantined_order(&self, id: OrderId) -> Result<Option<QuarantinedOrder>> {
        let row = self.db.row(&format!("{QUARANTINED} order_id = ? AND {WITHOUT_ROW}"), args![id.get()]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn put_in_quarantine(&self, item: &QuarantinedOrder) -> Result<RecordOutcome> {
        let QuarantinedOrder { sale, epoch, admitted, error, quarantined_at } = item;
        let (batch, dialect) = ([*admitted], self.db.dialect());
        let mut tx = self.db.begin().await?;
        let (found, price_cents) = find(&mut tx, dialect, *sale, &batch).await?;
        let outcome = match found.by_row(*sale, admitted) {
            Some(outcome) => outcome,
            None if found.epoch != *epoch => {
                let refused = RecordOutcome::Rejected { reason: RejectReason::Epoch, existing: None };
                insert_outcomes(&mut tx, &found, *sale, *epoch, price_cents, &[(*admitted, refused)]).await?;
                refused
            }
            None => {
                let insert = "INSERT INTO quarantine
                    (order_id, sale_id, user_id, epoch, seq, admitted_at, error, quarantined_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
                let sql = format!("{insert}{}", dialect.on_conflict_update("order_id", &["error"]));
                let (order, user, at) = (admitted.order.get(), admitted.user.get(), admitted.at.ms());
                let (seq, now) = (admitted.seq, quarantined_at.ms());
                let args = args![order, sale.get(), user, epoch.0, seq, at, error.as_str(), now];
                // MySQL counts a replaced row twice.
                expect_rows(1, tx.execute(&sql, args).await?.min(1))?;
                RecordOutcome::Quarantined
            }
        };
        tx.commit().await?;
        Ok(outcome)
    }

    pub(super) async fn record_quarantined(&self, id: OrderId) -> Result<Option<RecordOutcome>> {
        let Some(QuarantinedOrder { sale, epoch, admitted, .. }) = self.read_quarantined_order(id).await? else {
            return Ok(None);
        };
        let mut tx = self.db.begin().await?;
        let (mut found, price_cents) = find(&mut tx, self.db.dialect(), sale, &[admitted]).await?;
        if found.quarantined.remove(&id).is_none() {
            // Another operator was faster.
            tx.roll_back().await?;
            return Ok(None);
        }
        delete(&mut tx, id).await?;
        // A retry is a write under the current epoch. The row has the epoch of its admission, like its time and its sequence number.
        let current = found.epoch;
        let outcome = resolve(sale, current, &[admitted], &mut found)[0];
        insert_outcomes(&mut tx, &found, sale, epoch, price_cents, &[(admitted, outcome)]).await?;
        if matches!(outcome, RecordOutcome::Rejected { .. }) {
            insert_pending_release(&mut tx, id, sale, admitted.user).await?;
        }
        tx.commit().await?;
        Ok(Some(outcome))
    }

    pub(super) async fn reject_quarantined(&self, id: OrderId) -> Result<DiscardOutcome> {
        // If the order has a row by now, only its entry is deleted.
        let row = self.db.row(&format!("{QUARANTINED} order_id = ?"), args![id.get()]).await?;
        let Some(QuarantinedOrder { sale, epoch, admitted, .. }) = row.as_ref().map(read).transpose()? else {
            return Ok(DiscardOutcome::NoSuchOrder);
        };
        let mut tx = self.db.begin().await?;
        let (mut found, price_cents) = find(&mut tx, self.db.dialect(), sale, &[admitted]).await?;
        if found.quarantined.remove(&id).is_none() {
            tx.roll_back().await?;
            return Ok(DiscardOutcome::NoSuchOrder);
        }
        delete(&mut tx, id).await?;
        let discarded = if found.rows.contains_key(&id) {
            DiscardOutcome::AlreadyRecorded
        } else {
            let refused = RecordOutcome::Rejected { reason: RejectReason::Discarded, existing: None };
            insert_outcomes(&mut tx, &found, sale, epoch, price_cents, &[(admitted, refused)]).await?;
            insert_pending_release(&mut tx, id, sale, admitted.user).await?;
            DiscardOutcome::Done
        };
        tx.commit().await?;
        Ok(discarded)
    }
}

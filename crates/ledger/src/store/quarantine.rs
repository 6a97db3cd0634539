//! Orders whose data the database rejects, until an operator retries or discards them, or their buyer cancels them.
//!
//! Every change locks the sale's row first, so that it is serialized with a recording of the same order.

use stampede_core::ports::{Admitted, DiscardOutcome, QuarantinedOrder, RecordOutcome, Result, TransitionOutcome};
use stampede_core::{
    Actor, Epoch, OrderEvent, OrderId, OrderStatus, RejectReason, SaleId, StepReason, Timestamp, UserId,
};

use super::event_outbox::insert_batch;
use super::orders::{insert_pending_release, read_in};
use super::record::find;
use super::resolve::resolve;
use super::{Store, unreadable};
use crate::db::{Row, Tx, args};
use crate::errors::after_lookup;

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

    pub(super) async fn count_quarantined(&self) -> Result<Vec<(SaleId, u64)>> {
        let sql =
            format!("SELECT sale_id, COUNT(*) FROM quarantine WHERE {WITHOUT_ROW} GROUP BY sale_id ORDER BY sale_id");
        let bad = || unreadable("a quarantined order");
        let of_sale = |row: &Row| -> Result<(SaleId, u64)> {
            let sale = SaleId::new(row.int(0)?).map_err(|_| bad())?;
            Ok((sale, u64::try_from(row.int(1)?).map_err(|_| bad())?))
        };
        self.db.rows(&sql, &[]).await?.iter().map(of_sale).collect()
    }

    pub(super) async fn put_in_quarantine(&self, item: &QuarantinedOrder) -> Result<RecordOutcome> {
        let QuarantinedOrder { sale, epoch, admitted, error, quarantined_at } = item;
        let (batch, dialect) = ([*admitted], self.db.dialect());
        let mut tx = self.db.begin().await?;
        let (found, terms) = find(&mut tx, dialect, *sale, &batch).await?;
        let outcome = match found.by_row(*sale, admitted).or_else(|| found.by_quarantine(*sale, admitted)) {
            Some(RecordOutcome::Quarantined) => {
                // Whatever the epoch is by now: until an operator decides, the order has no row and keeps its mark.
                let update = "UPDATE quarantine SET error = ? WHERE order_id = ?";
                tx.execute_on(1, update, args![error.as_str(), admitted.order.get()]).await?;
                RecordOutcome::Quarantined
            }
            Some(outcome) => outcome,
            None if found.epoch != *epoch => {
                let refused = RecordOutcome::Rejected { reason: RejectReason::Epoch, existing: None };
                self.insert_outcomes(&mut tx, &found, *sale, *epoch, terms, &[(*admitted, refused)]).await?;
                refused
            }
            None => {
                let insert = "INSERT INTO quarantine
                    (order_id, sale_id, user_id, epoch, seq, admitted_at, error, quarantined_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
                let (order, user, at) = (admitted.order.get(), admitted.user.get(), admitted.at.ms());
                let (seq, now) = (admitted.seq, quarantined_at.ms());
                tx.execute_on(1, insert, args![order, sale.get(), user, epoch.0, seq, at, error.as_str(), now]).await?;
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
        let (mut found, terms) = find(&mut tx, self.db.dialect(), sale, &[admitted]).await?;
        if found.quarantined.remove(&id).is_none() {
            // Another operator was faster.
            tx.roll_back().await?;
            return Ok(None);
        }
        delete(&mut tx, id).await?;
        // A retry is a write under the current epoch. The row has the epoch of its admission, like its time and its sequence number.
        let current = found.epoch;
        let outcome = resolve(sale, current, &[admitted], &mut found)[0];
        self.insert_outcomes(&mut tx, &found, sale, epoch, terms, &[(admitted, outcome)]).await?;
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
        let (mut found, terms) = find(&mut tx, self.db.dialect(), sale, &[admitted]).await?;
        if found.quarantined.remove(&id).is_none() {
            tx.roll_back().await?;
            return Ok(DiscardOutcome::NoSuchOrder);
        }
        delete(&mut tx, id).await?;
        let discarded = if found.rows.contains_key(&id) {
            DiscardOutcome::AlreadyRecorded
        } else {
            let refused = RecordOutcome::Rejected { reason: RejectReason::Discarded, existing: None };
            self.insert_outcomes(&mut tx, &found, sale, epoch, terms, &[(admitted, refused)]).await?;
            insert_pending_release(&mut tx, id, sale, admitted.user).await?;
            DiscardOutcome::Done
        };
        tx.commit().await?;
        Ok(discarded)
    }

    /// Cancels a quarantined order of this user. Its row is inserted with the cancellation, so that a late copy of the order stays dead, and is
    /// never live, because the database rejects the live one.
    pub(super) async fn cancel_quarantined(
        &self,
        id: OrderId,
        user: UserId,
        now: Timestamp,
    ) -> Result<TransitionOutcome> {
        let item = self.read_quarantined_order(id).await?.filter(|item| item.admitted.user == user);
        let Some(QuarantinedOrder { sale, epoch, admitted, .. }) = item else {
            return Ok(TransitionOutcome::NoSuchOrder);
        };
        let mut tx = self.db.begin().await?;
        let (found, terms) = find(&mut tx, self.db.dialect(), sale, &[admitted]).await?;
        if !found.quarantined.contains_key(&id) || found.rows.contains_key(&id) {
            // An operator has just retried or discarded it.
            tx.roll_back().await?;
            return Ok(TransitionOutcome::NoSuchOrder);
        }
        delete(&mut tx, id).await?;
        // The clock of this process may be behind that of the process that admitted the order.
        let (Admitted { seq, at: created_at, .. }, at) = (admitted, now.max(admitted.at));
        let insert = "INSERT INTO orders
            (id, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at, pay_by)
            VALUES (?, ?, ?, NULL, ?, ?, ?, ?, ?, ?, ?, NULL)";
        let (status, reason, price) = (OrderStatus::Cancelled, StepReason::Requested, terms.price_cents);
        let (order, of, by, status_text, reason_text) =
            (id.get(), sale.get(), user.get(), status.as_str(), reason.as_str());
        let row = args![order, of, by, status_text, reason_text, epoch.0, seq, price, created_at.ms(), at.ms()];
        tx.execute_on(1, insert, row).await.map_err(after_lookup)?;
        if found.indexed {
            let insert = "INSERT INTO orders_by_user (user_id, order_id) VALUES (?, ?)";
            tx.execute_on(1, insert, args![user.get(), id.get()]).await?;
        }
        tx.add_steps(OrderStatus::Unpaid, Actor::System, 1);
        if self.config.writes_events {
            insert_batch(&mut tx, sale, &[id]).await?;
        }
        let (from, reason) = (OrderStatus::Unpaid, Some(reason));
        let step = OrderEvent { from, to: status, at, reason, by: Actor::Buyer };
        self.insert_events(&mut tx, sale, &[(id, at)], step).await?;
        tx.execute_on(1, "UPDATE sale SET released = released + 1 WHERE id = ?", args![sale.get()]).await?;
        insert_pending_release(&mut tx, id, sale, user).await?;
        let cancelled = read_in(&mut tx, id).await?.ok_or_else(|| unreadable("an order"))?;
        tx.commit().await?;
        Ok(TransitionOutcome::Done(cancelled))
    }
}

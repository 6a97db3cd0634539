//! Payments that arrive after their orders were cancelled. Such a payment is held for a while (`payment.held`), in which it may be moved to a
//! new order of the same buyer. The new order is made as any other is; the old one stays cancelled.
//!
//! A payment is moved or returned, and never both: moving it is one update of its row, which requires `held = 1` and clears it. Ending the
//! hold is another one, and no attempt to return the payment begins before that (`refunds`). So whoever is first decides, on every database:
//!
//! - PostgreSQL, READ COMMITTED: the second update waits for the row, reads it again once the first has committed, and finds `held = 0`
//! - MySQL and MariaDB, READ COMMITTED: an update waits for the row, and always reads the last committed version of it
//! - SQLite: one transaction writes at a time (`BEGIN IMMEDIATE`)
//!
//! Nothing sets `held` again. A process that was paused for long before it moves a payment changes nothing, whatever its clock says. One that
//! dies leaves a payment whose return is due when its hold is over.
//!
//! Every transaction locks an order before a payment, and one order only, so that none waits for another in a circle.

use stampede_core::ports::Result;
use stampede_core::{Order, OrderId, OrderStatus, ReportedPayment, Timestamp};

use super::Store;
use super::orders::{read_in, read_locked};
use crate::db::{Tx, args};

/// Whether a payment for the order that has ended can pay the new one.
fn fits(reported: &ReportedPayment, ended: &Order, new: &Order) -> bool {
    new.status == OrderStatus::Unpaid
        && (new.sale, new.user) == (ended.sale, ended.user)
        && new.price.cents() == reported.amount_cents
}

impl Store {
    pub(super) async fn move_to_order(&self, reported: &ReportedPayment, to: OrderId, now: Timestamp) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let new = read_locked(&mut tx, self.db.dialect(), to).await?;
        // What is compared of the order that has ended never changes, so it is not locked.
        let ended = read_in(&mut tx, reported.order).await?;
        if let (Some(mut new), Some(ended)) = (new, ended)
            && fits(reported, &ended, &new)
            && self.pay_with_held(&mut tx, reported, to).await?
        {
            self.pay_order(&mut tx, &mut new, now).await?;
            tx.commit().await?;
            return Ok(true);
        }
        tx.roll_back().await?;
        // An earlier call may have moved it whose commit was not answered.
        let known = self.read_payment(&reported.provider, &reported.transaction).await?;
        Ok(known.is_some_and(|known| known.reported == *reported && known.was_moved() && known.order == to))
    }

    /// Moves the payment if it is held.
    async fn pay_with_held(&self, tx: &mut Tx, reported: &ReportedPayment, to: OrderId) -> Result<bool> {
        let ReportedPayment { provider, transaction, order, amount_cents } = reported;
        let update = "UPDATE payment
            SET status = 'paid', reason = NULL, order_id = ?, reported_order = ?, held = 0, refund_at = NULL
            WHERE provider = ? AND transaction_id = ? AND order_id = ? AND amount_cents = ? AND status = 'refund_due'
            AND held = 1";
        let (provider, transaction) = (provider.as_str(), transaction.as_str());
        let values = args![to.get(), order.get(), provider, transaction, order.get(), *amount_cents];
        Ok(tx.execute(update, values).await? == 1)
    }

    pub(super) async fn end_payment_hold(&self, reported: &ReportedPayment, now: Timestamp) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let mut order = read_locked(&mut tx, self.db.dialect(), reported.order).await?;
        let was_held = self.clear_hold(&mut tx, reported, order.as_mut(), now).await?;
        tx.commit().await?;
        Ok(was_held)
    }

    /// Ends the hold of a payment, if it is held. The row of its order is locked.
    pub(super) async fn clear_hold(
        &self,
        tx: &mut Tx,
        reported: &ReportedPayment,
        order: Option<&mut Order>,
        now: Timestamp,
    ) -> Result<bool> {
        let (provider, transaction) = (reported.provider.as_str(), reported.transaction.as_str());
        let update = "UPDATE payment SET held = 0, refund_at = ?
            WHERE provider = ? AND transaction_id = ? AND status = 'refund_due' AND held = 1";
        if tx.execute(update, args![now.ms(), provider, transaction]).await? == 0 {
            return Ok(false);
        }
        // Another payment for it may be returned, or was.
        if let Some(order) = order.filter(|order| order.status == OrderStatus::Cancelled) {
            self.begin_refunding(tx, order, now).await?;
        }
        Ok(true)
    }
}

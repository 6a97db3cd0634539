//! Redeeming paid orders with a code that only the owner sees.

use stampede_core::ports::{MAX_REDEEM_TRIES, Result, TransitionOutcome};
use stampede_core::{Actor, OrderEvent, OrderId, OrderStatus, Timestamp};

use super::Store;
use super::orders::read_locked;
use crate::db::args;

impl Store {
    pub(super) async fn code_of(&self, id: OrderId, new: &str) -> Result<Option<String>> {
        let mut tx = self.db.begin().await?;
        let order = read_locked(&mut tx, self.db.dialect(), id).await?;
        if order.is_none_or(|order| order.status != OrderStatus::Paid) {
            tx.roll_back().await?;
            return Ok(None);
        }
        // The order is locked, so its code does not change until the end of the transaction.
        let known = tx.row("SELECT code, tries FROM redeem_code WHERE order_id = ?", args![id.get()]).await?;
        let code = match known {
            Some(row) if row.int(1)? < i64::from(MAX_REDEEM_TRIES) => row.text(0)?,
            Some(_) => {
                let update = "UPDATE redeem_code SET code = ?, tries = 0 WHERE order_id = ?";
                tx.execute_on(1, update, args![new, id.get()]).await?;
                new.to_owned()
            }
            None => {
                let insert = "INSERT INTO redeem_code (order_id, code) VALUES (?, ?)";
                tx.execute_on(1, insert, args![id.get(), new]).await?;
                new.to_owned()
            }
        };
        tx.commit().await?;
        Ok(Some(code))
    }

    pub(super) async fn count_redeem_try(&self, id: OrderId) -> Result<Option<String>> {
        let mut tx = self.db.begin().await?;
        let update = "UPDATE redeem_code SET tries = tries + 1 WHERE order_id = ? AND tries < ?";
        if tx.execute(update, args![id.get(), MAX_REDEEM_TRIES]).await? == 0 {
            tx.roll_back().await?;
            return Ok(None);
        }
        let row = tx.row("SELECT code FROM redeem_code WHERE order_id = ?", args![id.get()]).await?;
        let code = row.map(|row| row.text(0)).transpose()?;
        tx.commit().await?;
        Ok(code)
    }

    pub(super) async fn redeem_order(&self, id: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        let mut tx = self.db.begin().await?;
        let Some(mut order) = read_locked(&mut tx, self.db.dialect(), id).await? else {
            tx.roll_back().await?;
            return Ok(TransitionOutcome::NoSuchOrder);
        };
        if order.status != OrderStatus::Paid {
            tx.roll_back().await?;
            return Ok(TransitionOutcome::Illegal(order.status));
        }
        let (from, to, at) = (order.status, OrderStatus::Redeemed, now.max(order.updated_at));
        (order.status, order.updated_at) = (to, at);
        let update = "UPDATE orders SET status = ?, updated_at = ? WHERE id = ? AND status = ?";
        tx.execute_on(1, update, args![to.as_str(), at.ms(), id.get(), from.as_str()]).await?;
        let step = OrderEvent { from, to, at, reason: None, by: Actor::Operator };
        self.insert_events(&mut tx, order.sale, &[(id, at)], step).await?;
        tx.execute("DELETE FROM redeem_code WHERE order_id = ?", args![id.get()]).await?;
        tx.commit().await?;
        Ok(TransitionOutcome::Done(order))
    }
}

//! Returning payments. A payment that cannot pay its order, or whose order an operator refunds, is `refund_due` until it is returned. An attempt
//! is counted, and the time of the next one set, before the provider is called: a process that dies meanwhile delays it, and no more. No
//! attempt begins while a payment is held (`late_payments`).

use stampede_core::ports::{Result, TransitionOutcome};
use stampede_core::{Actor, OrderId, OrderStatus, RefundAttempt, RefundReason, ReportedPayment, Timestamp};

use super::Store;
use super::orders::read_locked;
use super::payments::{COLUMNS, read};
use crate::db::{Row, Tx, args};

/// The columns of [`COLUMNS`], then those of the attempts.
const ATTEMPTS: &str = "refund_at, refund_tries, refund_error, held";

/// The longest error that is kept.
const MAX_ERROR_CHARS: usize = 500;

fn read_attempt(row: &Row) -> Result<RefundAttempt> {
    Ok(RefundAttempt {
        payment: read(row)?,
        due_at: row.maybe_int(8)?.map(Timestamp::from_ms),
        tries: u32::try_from(row.int(9)?).unwrap_or(u32::MAX),
        error: row.maybe_text(10)?,
        held: row.int(11)? != 0,
    })
}

impl Store {
    pub(super) async fn refund_order(&self, id: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        let Some(seen) = self.read_order(id).await? else { return Ok(TransitionOutcome::NoSuchOrder) };
        if matches!(seen.status, OrderStatus::Refunding | OrderStatus::Refunded) {
            return Ok(TransitionOutcome::Repeated(seen));
        }
        let (_changing, mut tx, mut order) = self.begin_with(&seen).await?;
        if order.status != OrderStatus::Paid {
            tx.roll_back().await?;
            return Ok(match order.status {
                OrderStatus::Refunding | OrderStatus::Refunded => TransitionOutcome::Repeated(order),
                status => TransitionOutcome::Illegal(status),
            });
        }
        self.end_order(&mut tx, &mut order, OrderStatus::Refunding, Actor::Operator, now).await?;
        let due_ms = self.due_at_once(&mut tx, now).await?;
        let update = "UPDATE payment SET status = 'refund_due', reason = ?, refund_at = ?
            WHERE order_id = ? AND status = 'paid'";
        tx.execute_on(1, update, args![RefundReason::Requested.as_str(), due_ms, id.get()]).await?;
        tx.commit().await?;
        Ok(TransitionOutcome::Done(order))
    }

    /// The time from which a payment is returned at once: this one, or that of the database if the node's clock is ahead of it. Otherwise the
    /// payment would not be returned before the database has that time.
    pub(super) async fn due_at_once(&self, tx: &mut Tx, now: Timestamp) -> Result<i64> {
        Ok(now.ms().min(self.now_ms(tx).await?))
    }

    pub(super) async fn read_due_refunds(&self, now: Timestamp, limit: u32) -> Result<Vec<RefundAttempt>> {
        let sql = format!(
            "SELECT {COLUMNS}, {ATTEMPTS} FROM payment
            WHERE status = 'refund_due' AND refund_at <= ? ORDER BY refund_at LIMIT ?"
        );
        self.db.rows(&sql, args![now.ms(), limit]).await?.iter().map(read_attempt).collect()
    }

    pub(super) async fn read_open_refunds(&self, limit: u32) -> Result<Vec<RefundAttempt>> {
        let sql = format!(
            "SELECT {COLUMNS}, {ATTEMPTS} FROM payment
            WHERE status = 'refund_due' ORDER BY received_at LIMIT ?"
        );
        self.db.rows(&sql, args![limit]).await?.iter().map(read_attempt).collect()
    }

    pub(super) async fn count_refund(&self, attempt: &RefundAttempt, next_at: Timestamp) -> Result<bool> {
        let reported = &attempt.payment.reported;
        let update = "UPDATE payment SET refund_tries = refund_tries + 1, refund_at = ?
            WHERE provider = ? AND transaction_id = ? AND status = 'refund_due' AND held = 0 AND refund_tries = ?";
        let values = args![next_at.ms(), reported.provider.as_str(), reported.transaction.as_str(), attempt.tries];
        let mut tx = self.db.begin().await?;
        let begun = tx.execute(update, values).await? == 1;
        tx.commit().await?;
        Ok(begun)
    }

    pub(super) async fn set_refund_error(
        &self,
        attempt: &RefundAttempt,
        error: &str,
        next_at: Option<Timestamp>,
    ) -> Result<()> {
        let (reported, tries) = (&attempt.payment.reported, attempt.tries);
        let error: String = error.chars().take(MAX_ERROR_CHARS).collect();
        let (provider, transaction) = (reported.provider.as_str(), reported.transaction.as_str());
        let mut tx = self.db.begin().await?;
        match next_at {
            Some(at) => {
                let update = "UPDATE payment SET refund_error = ?, refund_at = ?
                    WHERE provider = ? AND transaction_id = ? AND status = 'refund_due' AND refund_tries = ?";
                tx.execute(update, args![error.as_str(), at.ms(), provider, transaction, tries]).await?;
            }
            None => {
                let update = "UPDATE payment SET refund_error = ?, refund_at = NULL
                    WHERE provider = ? AND transaction_id = ? AND status = 'refund_due' AND refund_tries = ?";
                tx.execute(update, args![error.as_str(), provider, transaction, tries]).await?;
            }
        }
        tx.commit().await
    }

    pub(super) async fn set_refund_due(&self, provider: &str, transaction: &str, now: Timestamp) -> Result<bool> {
        let Some(known) = self.read_payment(provider, transaction).await? else { return Ok(false) };
        let mut tx = self.db.begin().await?;
        let mut order = read_locked(&mut tx, self.db.dialect(), known.order).await?;
        self.clear_hold(&mut tx, &known.reported, order.as_mut(), now).await?;
        let due_ms = self.due_at_once(&mut tx, now).await?;
        let update = "UPDATE payment SET refund_tries = 0, refund_at = ?
            WHERE provider = ? AND transaction_id = ? AND status = 'refund_due'";
        let is_due = tx.execute(update, args![due_ms, provider, transaction]).await? == 1;
        tx.commit().await?;
        Ok(is_due)
    }

    pub(super) async fn set_refunded(&self, reported: &ReportedPayment, now: Timestamp) -> Result<bool> {
        let (provider, transaction) = (reported.provider.as_str(), reported.transaction.as_str());
        let known = self.read_payment(provider, transaction).await?.filter(|known| known.reported == *reported);
        // An operator may refund the order to which a payment was moved.
        let Some(id) = known.map(|known| known.order) else { return Ok(false) };
        let mut tx = self.db.begin().await?;
        let mut order = read_locked(&mut tx, self.db.dialect(), id).await?;
        self.clear_hold(&mut tx, reported, order.as_mut(), now).await?;
        let update = "UPDATE payment SET status = 'refunded', refund_at = NULL
            WHERE provider = ? AND transaction_id = ? AND order_id = ? AND status = 'refund_due'";
        if tx.execute(update, args![provider, transaction, id.get()]).await? == 0 {
            tx.roll_back().await?;
            return Ok(false);
        }
        // What is held may still be moved. It does not keep the order from ending.
        let left =
            "SELECT transaction_id FROM payment WHERE order_id = ? AND status = 'refund_due' AND held = 0 LIMIT 1";
        let left = tx.row(left, args![id.get()]).await?;
        if let Some(order) = order.as_mut().filter(|order| order.status == OrderStatus::Refunding && left.is_none()) {
            self.end_refunding(&mut tx, order, now).await?;
        }
        tx.commit().await?;
        Ok(true)
    }
}

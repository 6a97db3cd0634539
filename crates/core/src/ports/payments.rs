//! Payments in the ledger.

use async_trait::async_trait;

use super::Result;
use super::TransitionOutcome;
use crate::clock::Timestamp;
use crate::ids::OrderId;
use crate::order::Order;
use crate::payment::{Payment, RefundAttempt, ReportedPayment};

/// The result of a reported payment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PaymentOutcome {
    /// It is in the ledger now, and has paid its order or must be returned.
    Received(Payment),
    /// It is in the ledger now, and held: its order, which is the second value, was cancelled, and it may be moved to a new one.
    Held(Payment, Order),
    /// It was reported before. Nothing was changed.
    Repeated(Payment),
    /// It was reported before, and is held: what becomes of it is not decided. Nothing was changed.
    StillHeld,
    /// Another payment has its transaction id. Nothing was changed, and an operator should investigate.
    TransactionReused(Payment),
}

/// How often a code of an order may be tried.
pub const MAX_REDEEM_TRIES: u32 = 5;

/// Records payments. A payment locks its order and not the sale: paying does not slow down buying.
#[async_trait]
pub trait PaymentLedger: Send + Sync {
    /// Records a payment, once per transaction id, and pays its order if that is unpaid and has this price. Otherwise the payment must be
    /// returned; an order that was cancelled becomes `refunding`.
    ///
    /// With `held_until`, the price of an order that was cancelled is held until then, and the order stays as it is: the payment is moved
    /// ([`move_payment`](Self::move_payment)), or its hold ends ([`end_hold`](Self::end_hold)).
    async fn receive_payment(
        &self,
        payment: &ReportedPayment,
        now: Timestamp,
        held_until: Option<Timestamp>,
    ) -> Result<PaymentOutcome>;

    /// Pays `to` with a payment that is held: an unpaid order of the same buyer in the same sale, with the same price. `false` if it is not,
    /// or if the payment is not held any more; nothing was changed then. A repeated call gets the same result.
    async fn move_payment(&self, payment: &ReportedPayment, to: OrderId, now: Timestamp) -> Result<bool>;

    /// Ends the hold of a payment: it is due to be returned now, and its order becomes `refunding`. `false` if it was not held.
    async fn end_hold(&self, payment: &ReportedPayment, now: Timestamp) -> Result<bool>;

    /// Cancels an unpaid order that was made for a late payment, because the payment is returned instead.
    async fn cancel_readmitted(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome>;

    /// Begins to return the payment of a paid order, for an operator: its stock is returned, and a [`PendingRelease`](super::PendingRelease)
    /// is stored.
    async fn refund(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome>;

    /// The payments to be returned whose next attempt is due, the earliest first.
    async fn due_refunds(&self, now: Timestamp, limit: u32) -> Result<Vec<RefundAttempt>>;

    /// The payments to be returned, also those that only an operator can return, the oldest first.
    async fn open_refunds(&self, limit: u32) -> Result<Vec<RefundAttempt>>;

    /// Begins an attempt: counts it, and sets when the next one is due if this one has no end. `false` if another process has begun one since
    /// `attempt` was read, or the payment is returned, or held.
    async fn begin_refund(&self, attempt: &RefundAttempt, next_at: Timestamp) -> Result<bool>;

    /// Records why an attempt failed. Without `next_at`, only an operator can return the payment. Nothing is written if another attempt has
    /// begun since, or an operator has asked for one: `attempt.tries` counts the one that failed.
    async fn fail_refund(&self, attempt: &RefundAttempt, error: &str, next_at: Option<Timestamp>) -> Result<()>;

    /// Makes an attempt due now, counts from the first again, and ends a hold. `false` if the payment is not to be returned.
    async fn retry_refund(&self, provider: &str, transaction: &str, now: Timestamp) -> Result<bool>;

    /// A payment with what has become of it.
    async fn payment(&self, provider: &str, transaction: &str) -> Result<Option<Payment>>;

    /// Records that a payment was returned, also one that is held. An order that waited for this becomes `refunded`. `false` if the payment
    /// was not to be returned, or was returned before.
    async fn complete_refund(&self, payment: &ReportedPayment, now: Timestamp) -> Result<bool>;

    /// The payments that were reported for an order, or moved to it, in no particular order.
    async fn payments_of(&self, order: OrderId) -> Result<Vec<Payment>>;

    /// The payments for orders that the ledger does not have, and so of no sale, in no particular order.
    async fn stray_payments(&self) -> Result<Vec<Payment>>;

    /// The code with which a paid order is redeemed: the one that it has, or else `new`, which replaces one that was tried
    /// [`MAX_REDEEM_TRIES`] times. `None` if the order is not paid.
    async fn redeem_code(&self, order: OrderId, new: &str) -> Result<Option<String>>;

    /// Counts an attempt to redeem an order, and returns its code to compare with. `None` if it has no code that may be tried.
    async fn try_redeem_code(&self, order: OrderId) -> Result<Option<String>>;

    /// Redeems a paid order. A second call is not legal, so that what was bought is handed out once.
    async fn redeem(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome>;
}

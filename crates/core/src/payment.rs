//! Payments that a provider has reported.

use crate::clock::Timestamp;
use crate::ids::OrderId;
use crate::words::words;

words! {
    /// What became of a payment. Each ends as paid or refunded.
    PaymentStatus {
        /// It has paid its order.
        Paid = "paid",
        /// It cannot pay its order, and must be returned.
        RefundDue = "refund_due",
        Refunded = "refunded",
    }
}

words! {
    /// Why a payment must be returned.
    RefundReason {
        /// There is no such order.
        UnknownOrder = "unknown_order",
        /// It is not the price of the order.
        WrongAmount = "wrong_amount",
        /// The order was cancelled, has expired, or was rejected.
        OrderEnded = "order_ended",
        /// Another payment has paid the order.
        AlreadyPaid = "already_paid",
        /// An operator has asked for it.
        Requested = "requested",
    }
}

/// A payment as a provider reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedPayment {
    /// Which provider; its transaction ids are unique.
    pub provider: String,
    pub transaction: String,
    /// The order for which it was made.
    pub order: OrderId,
    pub amount_cents: i64,
}

/// A payment in the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Payment {
    pub reported: ReportedPayment,
    /// The order that it has paid, or was to pay: the reported one, or a new one of the same buyer to which it was moved.
    pub order: OrderId,
    pub status: PaymentStatus,
    /// Why it must be returned, or was.
    pub reason: Option<RefundReason>,
    pub received_at: Timestamp,
}

impl Payment {
    /// Whether it came after its order had ended, and has paid a new one.
    pub fn was_moved(&self) -> bool {
        self.order != self.reported.order
    }

    /// What it was when it was recorded: whether it paid an order, or why it could not. Later changes, such as its return, do not show in this, so
    /// a repeated callback gets the same answer.
    pub fn answer(&self) -> (PaymentStatus, Option<RefundReason>) {
        match self.reason.filter(|reason| *reason != RefundReason::Requested) {
            Some(reason) => (PaymentStatus::RefundDue, Some(reason)),
            // It has paid its order, also if that was refunded since.
            None => (PaymentStatus::Paid, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_a_callback_does_not_change() {
        let answer = |status, reason| {
            let order = OrderId::new(1).unwrap();
            let reported = ReportedPayment { provider: "p".into(), transaction: "t".into(), order, amount_cents: 1 };
            Payment { reported, order, status, reason, received_at: Timestamp::from_ms(1) }.answer()
        };
        for (status, reason) in [
            (PaymentStatus::Paid, None),
            (PaymentStatus::RefundDue, Some(RefundReason::Requested)),
            (PaymentStatus::Refunded, Some(RefundReason::Requested)),
        ] {
            assert_eq!(answer(status, reason), (PaymentStatus::Paid, None), "{status:?}");
        }
        for reason in
            [RefundReason::UnknownOrder, RefundReason::WrongAmount, RefundReason::OrderEnded, RefundReason::AlreadyPaid]
        {
            for status in [PaymentStatus::RefundDue, PaymentStatus::Refunded] {
                assert_eq!(answer(status, Some(reason)), (PaymentStatus::RefundDue, Some(reason)), "{status:?}");
            }
        }
    }
}

/// An attempt to return a payment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefundAttempt {
    pub payment: Payment,
    /// When it is due; `None` if an operator must return the payment.
    pub due_at: Option<Timestamp>,
    /// Whether the payment may still be moved to a new order. Its hold must be ended before it is returned.
    pub held: bool,
    /// How many attempts have begun.
    pub tries: u32,
    /// Why the last one failed.
    pub error: Option<String>,
}

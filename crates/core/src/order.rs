//! An order and its legal transitions.
//!
//! ```text
//! pending ──▶ unpaid ──▶ paid ──▶ redeemed
//!    │  │        │         │
//!    │  └──────▶ cancelled │
//!    ▼              │      ▼
//! rejected          └─▶ refunding ──▶ refunded
//! ```
//!
//! A payment may arrive after its order was cancelled. It is refunded, or moved to a new order of the same buyer; the order is never revived.

use crate::clock::Timestamp;
use crate::ids::{OrderId, SaleId, UserId};
use crate::money::Money;
use crate::words::words;

words! {
    /// Where an order is in its life.
    OrderStatus {
        /// Admitted by the gate, not in the ledger yet.
        Pending = "pending",
        Unpaid = "unpaid",
        Paid = "paid",
        Redeemed = "redeemed",
        Cancelled = "cancelled",
        Refunding = "refunding",
        Refunded = "refunded",
        /// Admitted by the gate and refused by the ledger.
        Rejected = "rejected",
    }
}

impl OrderStatus {
    /// A live order holds one of the stock and is the buyer's only one.
    pub const fn is_live(self) -> bool {
        matches!(self, Self::Pending | Self::Unpaid | Self::Paid | Self::Redeemed)
    }

    /// Rises along the path of every order: none reaches a status before one with a lower number. Clients see it: a new status comes last, or
    /// the numbers of those after it change.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Whether no further step is expected. (The payment of a cancelled order can arrive late.)
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Redeemed | Self::Cancelled | Self::Refunded | Self::Rejected)
    }

    pub const fn may_become(self, next: Self) -> bool {
        use OrderStatus::{Cancelled, Paid, Pending, Redeemed, Refunded, Refunding, Rejected, Unpaid};
        matches!(
            (self, next),
            (Pending, Unpaid | Cancelled | Rejected)
                | (Unpaid, Paid | Cancelled)
                | (Paid, Redeemed | Refunding)
                | (Cancelled, Refunding)
                | (Refunding, Refunded)
        )
    }
}

words! {
    /// Why an admitted order was rejected by the ledger.
    RejectReason {
        /// The buyer has another live order.
        AlreadyHas = "already_has",
        SoldOut = "sold_out",
        /// The sale was rebuilt since the admission.
        Epoch = "epoch",
        /// An operator discarded it from quarantine.
        Discarded = "discarded",
        /// The buyer's earlier order has ended, and nobody may buy again in this sale.
        BoughtBefore = "bought_before",
    }
}

words! {
    /// Why an order took a step.
    StepReason {
        /// Its buyer asked for it.
        Requested = "requested",
        /// An operator asked for it.
        Operator = "operator",
        /// It was not paid in time.
        Expired = "expired",
        /// A payment arrived.
        Payment = "payment",
        /// A payment arrived after the order had ended.
        LatePayment = "late_payment",
        /// It was made for a payment that had arrived late, and that is returned.
        PaymentReturned = "payment_returned",
        AlreadyHas = "already_has",
        SoldOut = "sold_out",
        Epoch = "epoch",
        Discarded = "discarded",
        BoughtBefore = "bought_before",
    }
}

words! {
    /// Who made an order take a step.
    Actor {
        Buyer = "buyer",
        /// Stampede itself.
        System = "system",
        Operator = "operator",
        /// The provider of payments.
        Provider = "provider",
    }
}

/// One step of an order. An order reaches every status at most once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderEvent {
    pub from: OrderStatus,
    pub to: OrderStatus,
    pub at: Timestamp,
    pub reason: Option<StepReason>,
    pub by: Actor,
}

impl OrderEvent {
    /// The step with which the ledger recorded an order. It is not stored: the order's row shows it.
    pub fn recorded(order: &Order, reason: Option<StepReason>) -> Self {
        let rejected = order.status == OrderStatus::Rejected;
        let (to, reason) = if rejected { (OrderStatus::Rejected, reason) } else { (OrderStatus::Unpaid, None) };
        let by = if reason == Some(StepReason::Discarded) { Actor::Operator } else { Actor::System };
        Self { from: OrderStatus::Pending, to, at: order.created_at, reason, by }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    pub id: OrderId,
    pub sale: SaleId,
    pub user: UserId,
    pub status: OrderStatus,
    pub price: Money,
    /// Until when it must be paid; `None` without a limit, or if it was not read.
    pub pay_by: Option<Timestamp>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;
    use OrderStatus::*;
    use proptest::prelude::*;

    fn status() -> impl Strategy<Value = OrderStatus> {
        proptest::sample::select(OrderStatus::ALL.to_vec())
    }

    #[test]
    fn final_statuses_have_no_transitions() {
        for &next in OrderStatus::ALL {
            for end in [Redeemed, Refunded, Rejected] {
                assert!(!end.may_become(next), "{end:?} → {next:?}");
            }
        }
    }

    #[test]
    fn every_status_can_be_reached_and_has_one_spelling() {
        for &to in OrderStatus::ALL {
            assert_eq!(OrderStatus::parse(to.as_str()), Some(to));
            assert!(to == Pending || OrderStatus::ALL.iter().any(|from| from.may_become(to)), "{to:?}");
            for from in OrderStatus::ALL.iter().filter(|from| from.may_become(to)) {
                assert!(from.number() < to.number(), "{from:?} → {to:?}");
            }
        }
        for &reason in RejectReason::ALL {
            assert_eq!(RejectReason::parse(reason.as_str()), Some(reason));
            assert!(StepReason::parse(reason.as_str()).is_some(), "{reason:?} is the reason of a step, too");
        }
    }

    proptest! {
        /// However the steps come, an order that is dead stays dead: stock goes back at most once.
        #[test]
        fn dead_orders_are_never_revived(wanted in proptest::collection::vec(status(), 1..60)) {
            let (mut at, mut deaths) = (Pending, 0);
            for next in wanted {
                if at.may_become(next) {
                    prop_assert!(at.is_live() || !next.is_live(), "{:?} → {:?}", at, next);
                    deaths += usize::from(at.is_live() && !next.is_live());
                    at = next;
                }
            }
            prop_assert!(deaths <= 1);
        }

        /// What was paid ends as redeemed or refunded, or is on its way.
        #[test]
        fn paid_order_is_never_cancelled(wanted in proptest::collection::vec(status(), 1..60)) {
            let (mut at, mut paid) = (Pending, false);
            for next in wanted {
                if at.may_become(next) {
                    at = next;
                    paid |= at == Paid;
                }
            }
            prop_assert!(!paid || matches!(at, Paid | Redeemed | Refunding | Refunded));
        }
    }
}

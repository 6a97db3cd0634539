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
//! A payment may arrive after its order was cancelled. It is refunded; the order is never revived.

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
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    pub id: OrderId,
    pub sale: SaleId,
    pub user: UserId,
    pub status: OrderStatus,
    pub price: Money,
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
        }
        for &reason in RejectReason::ALL {
            assert_eq!(RejectReason::parse(reason.as_str()), Some(reason));
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

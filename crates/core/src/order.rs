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

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::clock::Timestamp;
use crate::ids::{OrderId, SaleId, UserId};
use crate::money::Money;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OrderStatus {
    /// Admitted by the gate, not in the ledger yet.
    Pending,
    Unpaid,
    Paid,
    Redeemed,
    Cancelled,
    Refunding,
    Refunded,
    /// Admitted by the gate and refused by the ledger.
    Rejected,
}

impl OrderStatus {
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::Unpaid,
        Self::Paid,
        Self::Redeemed,
        Self::Cancelled,
        Self::Refunding,
        Self::Refunded,
        Self::Rejected,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Unpaid => "unpaid",
            Self::Paid => "paid",
            Self::Redeemed => "redeemed",
            Self::Cancelled => "cancelled",
            Self::Refunding => "refunding",
            Self::Refunded => "refunded",
            Self::Rejected => "rejected",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }

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

/// Why an admitted order was rejected by the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RejectReason {
    /// The buyer has another live order.
    AlreadyHas,
    SoldOut,
    /// The sale was rebuilt since the admission.
    Epoch,
    /// An operator discarded it from quarantine.
    Discarded,
}

impl RejectReason {
    pub const ALL: [Self; 4] = [Self::AlreadyHas, Self::SoldOut, Self::Epoch, Self::Discarded];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AlreadyHas => "already_has",
            Self::SoldOut => "sold_out",
            Self::Epoch => "epoch",
            Self::Discarded => "discarded",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text)
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
        for next in OrderStatus::ALL {
            for end in [Redeemed, Refunded, Rejected] {
                assert!(!end.may_become(next), "{end:?} → {next:?}");
            }
        }
    }

    #[test]
    fn every_status_can_be_reached_and_has_one_spelling() {
        for to in OrderStatus::ALL {
            assert_eq!(OrderStatus::parse(to.as_str()), Some(to));
            assert!(to == Pending || OrderStatus::ALL.iter().any(|from| from.may_become(to)), "{to:?}");
        }
        for reason in RejectReason::ALL {
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

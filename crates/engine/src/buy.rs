//! Buying: one attempt of a user at a time, through the tier's gate to the ledger, within a deadline.

use std::time::Instant;

use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Decision, RecordOutcome};
use stampede_core::{Code, Order, OrderId, OrderStatus, Refusal, RejectReason, SaleId, UserId, failpoint};

use crate::engine::Engine;
use crate::error::Error;
use crate::recording::CommitOutcome;
use crate::retention::is_past_retention;
use crate::tier::{AdmitOutcome, RollForwardOutcome};

/// How a request to buy was granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bought {
    /// A new order, committed in the ledger.
    Created(Order),
    /// An order that is safe in a queue on its way to the ledger. `already`: from an earlier request.
    Accepted { id: OrderId, already: bool },
    /// The order that the buyer has from an earlier request.
    Already(Order),
}

impl Bought {
    pub const fn id(&self) -> OrderId {
        match self {
            Self::Created(order) | Self::Already(order) => order.id,
            Self::Accepted { id, .. } => *id,
        }
    }

    /// The order, once the ledger has it.
    pub const fn order(&self) -> Option<&Order> {
        match self {
            Self::Created(order) | Self::Already(order) => Some(order),
            Self::Accepted { .. } => None,
        }
    }

    /// Whether the buyer had the order before this request.
    pub const fn is_already(&self) -> bool {
        matches!(self, Self::Already(_) | Self::Accepted { already: true, .. })
    }
}

/// An attempt is repeated after a dead mark was released, or after a sale was found in the ledger. A buyer for whom more
/// attempts than this fail gets `outcome_unknown`.
const MAX_ATTEMPTS: u32 = 3;

enum Attempt {
    Bought(Bought),
    /// The obstacle has been removed.
    Again,
}

impl Engine {
    /// An error if every request to buy would be refused now, so that nothing else is done for it.
    pub fn can_buy(&self) -> Result<(), Error> {
        self.tier.can_admit()
    }

    /// Why this node may refuse the user without asking the gate; `None` if the gate must be asked. Neither Redis nor the ledger is asked,
    /// so this can be decided before the session is checked.
    pub fn local_refusal(&self, sale: SaleId, user: UserId) -> Option<Refusal> {
        self.tier.local_refusal(sale, user)
    }

    /// Buys one for this user, or returns the order that the user has.
    pub async fn buy(&self, sale: SaleId, user: UserId) -> Result<Bought, Error> {
        let buying = async {
            let _guard = self.buyers.lock((user, sale)).await;
            for _ in 0..MAX_ATTEMPTS {
                if let Attempt::Bought(bought) = self.attempt(sale, user).await? {
                    return Ok(bought);
                }
            }
            Err(Error::OutcomeUnknown)
        };
        let bought = tokio::time::timeout(self.answer_timeout, buying).await.unwrap_or(Err(Error::OutcomeUnknown))?;
        failpoint::hit("buy.answer");
        Ok(bought)
    }

    async fn attempt(&self, sale: SaleId, user: UserId) -> Result<Attempt, Error> {
        let order = self.next_order_id()?;
        match self.tier.admit(sale, AdmitRequest { user, order }).await? {
            AdmitOutcome::Admitted { decision, outcome } => {
                if outcome == CommitOutcome::Decided(RecordOutcome::Inserted) {
                    let Decision { price, at, .. } = decision;
                    let status = OrderStatus::Unpaid;
                    let order =
                        Order { id: order, sale, user, status, price, pay_by: None, created_at: at, updated_at: at };
                    return Ok(Attempt::Bought(Bought::Created(order)));
                }
                self.resolve(user, order, outcome, Bought::Created).await
            }
            AdmitOutcome::Accepted => Ok(Attempt::Bought(Bought::Accepted { id: order, already: false })),
            AdmitOutcome::Recorded(row) => self.resolve_recorded(user, row, Bought::Created).await,
            AdmitOutcome::AlreadyHas { order, decision, asked_at } => {
                self.resolve_held(sale, user, order, decision, asked_at).await
            }
            AdmitOutcome::Refused(refusal) => self.resolve_refusal(sale, user, refusal).await,
        }
    }

    /// The buyer holds a mark. Only a row in the ledger proves an order, so the row decides.
    async fn resolve_held(
        &self,
        sale: SaleId,
        user: UserId,
        held: OrderId,
        decision: Decision,
        asked_at: Instant,
    ) -> Result<Attempt, Error> {
        self.ledger_breaker.check()?;
        match self.ledger_breaker.watch(self.stores.ledger.order(held)).await? {
            Some(order) if order.status.is_live() => Ok(Attempt::Bought(Bought::Already(order))),
            Some(dead) => {
                let ended = dead.status != OrderStatus::Rejected;
                if ended && self.sale_index.get(sale).is_some_and(|sale| !sale.buy_again) {
                    return Err(Error::Plain(Code::BoughtBefore));
                }
                self.tier.gate().release(sale, &[Release { user, order: held, existing: None, ended }]).await?;
                Ok(Attempt::Again)
            }
            None => match self.tier.roll_forward(sale, AdmitRequest { user, order: held }, decision, asked_at).await? {
                RollForwardOutcome::Submitted(outcome) => self.resolve(user, held, outcome, Bought::Already).await,
                RollForwardOutcome::Accepted => Ok(Attempt::Bought(Bought::Accepted { id: held, already: true })),
                RollForwardOutcome::Recorded(row) => self.resolve_recorded(user, row, Bought::Already).await,
            },
        }
    }

    /// A consumer has recorded the order: live, or rejected because the ledger knew of an order or a sale that the gate did not.
    async fn resolve_recorded(&self, user: UserId, row: Order, bought: fn(Order) -> Bought) -> Result<Attempt, Error> {
        if row.user == user && row.status.is_live() {
            return Ok(Attempt::Bought(bought(row)));
        }
        match self.stores.ledger.live_order(row.sale, user).await? {
            Some(order) => Ok(Attempt::Bought(Bought::Already(order))),
            // The consumer releases the mark, after which the gate decides.
            None => Ok(Attempt::Again),
        }
    }

    /// The result for an order that this attempt did not simply insert.
    async fn resolve(
        &self,
        user: UserId,
        id: OrderId,
        outcome: CommitOutcome,
        bought: fn(Order) -> Bought,
    ) -> Result<Attempt, Error> {
        let CommitOutcome::Decided(outcome) = outcome else { return Err(Error::OutcomeUnknown) };
        match outcome {
            // Inserted by an earlier call that was not answered, or by an attempt that rolled it forward: the row decides.
            RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded => self.read_order(id, user, bought).await,
            RecordOutcome::Rejected { reason: RejectReason::AlreadyHas, existing: Some(existing) } => {
                self.read_order(existing, user, Bought::Already).await
            }
            RecordOutcome::Rejected { reason: RejectReason::BoughtBefore, .. } => Err(Error::Plain(Code::BoughtBefore)),
            RecordOutcome::Rejected { reason: RejectReason::SoldOut, .. } => Err(Error::Refused(Refusal::SoldOut)),
            RecordOutcome::Rejected { .. } => Err(Error::Busy),
            RecordOutcome::Dead | RecordOutcome::IdCollision => Ok(Attempt::Again),
            RecordOutcome::Quarantined => Err(Error::OutcomeUnknown),
        }
    }

    async fn read_order(&self, id: OrderId, user: UserId, bought: fn(Order) -> Bought) -> Result<Attempt, Error> {
        // The order is in the ledger. If it cannot be read, the outcome is not known.
        let read = self.ledger_breaker.watch(self.stores.ledger.order(id));
        match read.await.map_err(|_| Error::OutcomeUnknown)? {
            Some(order) if order.user == user && order.status.is_live() => Ok(Attempt::Bought(bought(order))),
            _ => Ok(Attempt::Again),
        }
    }

    /// The gate refused. The refusal stands unless the ledger has a sale or an order that the gate does not know of.
    async fn resolve_refusal(&self, sale: SaleId, user: UserId, refusal: Refusal) -> Result<Attempt, Error> {
        let mut has_left_gate = false;
        let refusal = match refusal {
            Refusal::NoSuchSale => match self.any_sale(sale) {
                Ok(view) if view.state.is_some() && is_past_retention(&view.sale, self.clock.now()) => {
                    if self.without_order.contains(sale, user) {
                        return Err(Error::Refused(Refusal::Ended));
                    }
                    has_left_gate = true;
                    Refusal::Ended
                }
                Ok(_) => return Err(Error::Refused(refusal)),
                // Another process may have created it a moment ago.
                Err(_) if self.find_in_ledger(sale).await?.is_some() => return Ok(Attempt::Again),
                Err(error) => return Err(error),
            },
            Refusal::SoldOut | Refusal::Ended | Refusal::Paused if !self.tier.is_authoritative() => refusal,
            Refusal::SoldOut | Refusal::Ended | Refusal::Paused | Refusal::NotStarted => {
                return Err(Error::Refused(refusal));
            }
        };
        // A buyer who has an order gets it back, whatever state the sale is in.
        match self.stores.ledger.live_order(sale, user).await? {
            Some(order) => Ok(Attempt::Bought(Bought::Already(order))),
            None => {
                if has_left_gate {
                    self.without_order.insert(sale, user);
                }
                Err(Error::Refused(refusal))
            }
        }
    }
}

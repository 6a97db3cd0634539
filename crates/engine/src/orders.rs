//! A buyer's own orders.

use stampede_core::ports::gate::Release;
use stampede_core::ports::{LedgerError, TransitionOutcome};
use stampede_core::{Code, Order, OrderEvent, OrderId, OrderStatus, Payment, SaleId, UserId};

use crate::audit::{Change, Outcome};
use crate::engine::Engine;
use crate::error::{Error, describe};
use crate::order_changes::OrderFollower;
use crate::tier::OrderWait;

/// An order as its owner sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderView {
    /// On its way to the ledger.
    Pending {
        id: OrderId,
        sale: SaleId,
    },
    Recorded(Order),
}

/// An order with everything that has become of it.
#[derive(Debug, Clone)]
pub struct OrderRecord {
    pub order: Order,
    /// From the first step on.
    pub history: Vec<OrderEvent>,
    /// In no particular order.
    pub payments: Vec<Payment>,
}

/// The present state of an order, and how to wait for the next one.
#[derive(Debug)]
pub struct OrderWatch {
    pub view: OrderView,
    wait: Option<OrderWait>,
}

impl OrderWatch {
    /// Waits until a pending order is recorded. `None` if the node stops.
    pub async fn recorded(self) -> Option<Order> {
        match (self.view, self.wait) {
            (OrderView::Recorded(order), _) => Some(order),
            (OrderView::Pending { .. }, wait) => wait?.recorded().await,
        }
    }

    /// Whether there is something to wait for.
    pub const fn is_pending(&self) -> bool {
        matches!(self.view, OrderView::Pending { .. })
    }
}

impl Engine {
    /// The user's own order. Another user's order is reported as missing. With a queue, an order that is on its way to the ledger is
    /// found only if its sale is named.
    pub async fn order(&self, id: OrderId, user: UserId, sale: Option<SaleId>) -> Result<OrderView, Error> {
        self.ledger_breaker.check()?;
        if let Some(order) = owned_by(user, self.ledger_breaker.watch(self.stores.ledger.order(id)).await?)? {
            return Ok(OrderView::Recorded(order));
        }
        let sale = sale.ok_or(Error::Plain(Code::NoSuchOrder))?;
        if self.pending_order(sale, user).await? == Some(id) {
            return Ok(OrderView::Pending { id, sale });
        }
        // It may have been recorded, and its mark released, in between.
        let order = self.own_order(id, user).await?;
        order.map(OrderView::Recorded).ok_or(Error::Plain(Code::NoSuchOrder))
    }

    /// The order for which the user holds a mark, in tiers with a queue.
    async fn pending_order(&self, sale: SaleId, user: UserId) -> Result<Option<OrderId>, Error> {
        // Another node may have created the sale a moment ago.
        if self.sale_index.get(sale).is_none() && self.find_in_ledger(sale).await?.is_none() {
            return Ok(None);
        }
        self.tier.pending_order(sale, user).await
    }

    pub(crate) async fn own_order(&self, id: OrderId, user: UserId) -> Result<Option<Order>, Error> {
        owned_by(user, self.stores.ledger.order(id).await?)
    }

    /// As [`order`](Self::order), to be watched while it is pending. Those who watch share the queries that this takes.
    pub async fn watch_order(&self, id: OrderId, user: UserId, sale: Option<SaleId>) -> Result<OrderWatch, Error> {
        let wait = sale.map(|sale| self.tier.wait_for_order(sale, id)).transpose()?.flatten();
        let (Some(sale), Some(wait)) = (sale, wait) else {
            return Ok(OrderWatch { view: self.order(id, user, sale).await?, wait: None });
        };
        if let Some(order) = owned_by(user, wait.row().await?)? {
            return Ok(OrderWatch { view: OrderView::Recorded(order), wait: None });
        }
        if self.pending_order(sale, user).await? == Some(id) {
            return Ok(OrderWatch { view: OrderView::Pending { id, sale }, wait: Some(wait) });
        }
        // It may have been recorded, and its mark released, in between.
        let order = owned_by(user, wait.row().await?)?.ok_or(Error::Plain(Code::NoSuchOrder))?;
        Ok(OrderWatch { view: OrderView::Recorded(order), wait: None })
    }

    /// The steps of the user's own order that the ledger has, from the first on.
    pub async fn order_history(&self, id: OrderId, user: UserId) -> Result<Vec<OrderEvent>, Error> {
        self.own_order(id, user).await?.ok_or(Error::Plain(Code::NoSuchOrder))?;
        Ok(self.stores.ledger.order_history(id).await?)
    }

    /// The right to wait for the steps of an order; `Busy` if too many wait.
    pub fn follow_order(&self) -> Result<OrderFollower, Error> {
        self.order_changes.follow()
    }

    /// The user's orders, newest first, those below `before`.
    pub async fn orders(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>, Error> {
        Ok(self.stores.ledger.orders_of(user, before, limit).await?)
    }

    /// Cancels the user's own unpaid order. With a queue, one that is on its way to the ledger is found only if its sale is named, and
    /// is cancelled once it is recorded or in quarantine.
    pub async fn cancel(&self, id: OrderId, user: UserId, sale: Option<SaleId>) -> Result<Order, Error> {
        match self.cancel_recorded(id, user).await {
            Err(Error::Plain(Code::NoSuchOrder)) if sale.is_some() => {}
            done => return done,
        }
        let recorded = async { self.watch_order(id, user, sale).await?.recorded().await.ok_or(Error::OutcomeUnknown) };
        let timeout = tokio::time::timeout(self.answer_timeout, recorded).await;
        timeout.unwrap_or(Err(Error::OutcomeUnknown))?;
        self.cancel_recorded(id, user).await
    }

    /// An order with its steps and payments, whoever owns it.
    pub async fn order_record(&self, id: OrderId) -> Result<OrderRecord, Error> {
        let ledger = &self.stores.ledger;
        let order = ledger.order(id).await?.ok_or(Error::Plain(Code::NoSuchOrder))?;
        let (history, payments) = (ledger.order_history(id).await?, ledger.payments_of(id).await?);
        Ok(OrderRecord { order, history, payments })
    }

    /// Cancels an unpaid order, whoever owns it.
    pub async fn cancel_for_operator(&self, id: OrderId) -> Result<Outcome<Order>, Error> {
        let taken = self.stores.ledger.cancel_for_operator(id, self.clock.now()).await?;
        self.end_for_operator(taken, OrderStatus::Unpaid).await
    }

    /// Begins to return the payment of a paid order. Its stock is sold again.
    pub async fn refund(&self, id: OrderId) -> Result<Outcome<Order>, Error> {
        let taken = self.stores.ledger.refund(id, self.clock.now()).await?;
        self.end_for_operator(taken, OrderStatus::Paid).await
    }

    /// Releases the mark of an order that an operator has ended from this status. Only the step itself counts as a change: another operator
    /// may have taken it a moment ago.
    async fn end_for_operator(&self, taken: TransitionOutcome, from: OrderStatus) -> Result<Outcome<Order>, Error> {
        let is_taken = matches!(taken, TransitionOutcome::Done(_));
        let order = self.release(taken).await?;
        Ok(if is_taken { step_taken(order, from) } else { Outcome::unchanged(order) })
    }

    async fn cancel_recorded(&self, id: OrderId, user: UserId) -> Result<Order, Error> {
        let cancelled = match self.stores.ledger.cancel(id, user, self.clock.now()).await {
            // Of an order in quarantine the database rejects even the cancelled row.
            Err(LedgerError::Poison(error)) => return Err(Error::NotRecordable(describe(&*error))),
            cancelled => cancelled?,
        };
        self.release(cancelled).await
    }

    /// Releases the mark of an order that is not live any more in the ledger, which returns the stock to the gate.
    pub(crate) async fn release(&self, outcome: TransitionOutcome) -> Result<Order, Error> {
        match outcome {
            TransitionOutcome::Done(order) => {
                let (id, user) = (order.id, order.user);
                let release = Release { user, order: id, existing: None, ended: true };
                if let Err(error) = self.tier.gate().release(order.sale, &[release]).await {
                    tracing::warn!(order = %id, %error, "cannot release a mark yet; the worker tries again");
                }
                // The worker deletes the pending release, outside the request.
                self.release_added.notify_one();
                Ok(order)
            }
            TransitionOutcome::Repeated(order) => Ok(order),
            TransitionOutcome::NoSuchOrder => Err(Error::Plain(Code::NoSuchOrder)),
            TransitionOutcome::Illegal(_) => Err(Error::Plain(Code::IllegalStep)),
        }
    }
}

/// An order has taken a step from this status, for the audit log.
pub(crate) fn step_taken(order: Order, from: OrderStatus) -> Outcome<Order> {
    let change = Change::new("status", from.as_str(), order.status.as_str());
    Outcome::done(order, vec![change])
}

/// The order, if it is this user's. Another user's order is reported as missing.
fn owned_by(user: UserId, order: Option<Order>) -> Result<Option<Order>, Error> {
    match order {
        Some(order) if order.user != user => Err(Error::Plain(Code::NoSuchOrder)),
        order => Ok(order),
    }
}

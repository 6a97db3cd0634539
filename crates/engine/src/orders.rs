//! A buyer's own orders.

use stampede_core::ports::TransitionOutcome;
use stampede_core::ports::gate::Release;
use stampede_core::{Code, Order, OrderId, SaleId, UserId};

use crate::engine::Engine;
use crate::error::Error;
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
        if let Some(order) = self.own_order(id, user).await? {
            return Ok(OrderView::Recorded(order));
        }
        let sale = sale.ok_or(Error::Plain(Code::NoSuchOrder))?;
        if self.tier.pending_order(sale, user).await? == Some(id) {
            return Ok(OrderView::Pending { id, sale });
        }
        // It may have been recorded, and its mark released, in between.
        let order = self.own_order(id, user).await?;
        order.map(OrderView::Recorded).ok_or(Error::Plain(Code::NoSuchOrder))
    }

    async fn own_order(&self, id: OrderId, user: UserId) -> Result<Option<Order>, Error> {
        let order = self.stores.ledger.order(id).await?;
        match order {
            Some(order) if order.user != user => Err(Error::Plain(Code::NoSuchOrder)),
            order => Ok(order),
        }
    }

    /// As [`order`](Self::order), to be watched while it is pending.
    pub async fn watch_order(&self, id: OrderId, user: UserId, sale: Option<SaleId>) -> Result<OrderWatch, Error> {
        let view = self.order(id, user, sale).await?;
        let wait = match view {
            OrderView::Pending { id, sale } => self.tier.wait_for_order(sale, id)?,
            OrderView::Recorded(_) => None,
        };
        Ok(OrderWatch { view, wait })
    }

    /// The user's orders, newest first, those below `before`.
    pub async fn orders(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>, Error> {
        Ok(self.stores.ledger.orders_of(user, before, limit).await?)
    }

    /// Cancels the user's own unpaid order. With a queue, one that is on its way to the ledger is found only if its sale is named, and
    /// is cancelled once it is recorded.
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

    /// Cancels the user's own unpaid order in the ledger, then releases its mark, which returns the stock to the gate.
    async fn cancel_recorded(&self, id: OrderId, user: UserId) -> Result<Order, Error> {
        match self.stores.ledger.cancel(id, user, self.clock.now()).await? {
            TransitionOutcome::Done(order) => {
                let release = Release { user, order: id, existing: None };
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

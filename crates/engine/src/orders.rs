//! A buyer's own orders.

use stampede_core::ports::TransitionOutcome;
use stampede_core::{Code, Order, OrderId, UserId};

use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    /// The user's own order; another's is as good as none.
    pub async fn order(&self, id: OrderId, user: UserId) -> Result<Order, Error> {
        let order = self.stores.ledger.order(id).await?;
        order.filter(|order| order.user == user).ok_or(Error::Plain(Code::NoSuchOrder))
    }

    /// The user's orders, newest first, those below `before`.
    pub async fn orders(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>, Error> {
        Ok(self.stores.ledger.orders_of(user, before, limit).await?)
    }

    /// Cancels the user's own unpaid order. The ledger first; the stock is back in the gate once the mark is released.
    pub async fn cancel(&self, id: OrderId, user: UserId) -> Result<Order, Error> {
        match self.stores.ledger.cancel(id, user, self.clock.now()).await? {
            TransitionOutcome::Done(order) => {
                self.gate.release(order.sale, user, id, None);
                // What is owed is settled by the worker, off the request's path; if we die before, the start clears it.
                self.pending_releases.notify_one();
                Ok(order)
            }
            TransitionOutcome::Repeated(order) => Ok(order),
            TransitionOutcome::NoSuchOrder => Err(Error::Plain(Code::NoSuchOrder)),
            TransitionOutcome::Illegal(_) => Err(Error::Plain(Code::IllegalStep)),
        }
    }
}

//! A buyer's own orders.

use stampede_core::ports::TransitionOutcome;
use stampede_core::ports::gate::Release;
use stampede_core::{Code, Order, OrderId, UserId};

use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    /// The user's own order. Another user's order is reported as missing.
    pub async fn order(&self, id: OrderId, user: UserId) -> Result<Order, Error> {
        let order = self.stores.ledger.order(id).await?;
        order.filter(|order| order.user == user).ok_or(Error::Plain(Code::NoSuchOrder))
    }

    /// The user's orders, newest first, those below `before`.
    pub async fn orders(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>, Error> {
        Ok(self.stores.ledger.orders_of(user, before, limit).await?)
    }

    /// Cancels the user's own unpaid order in the ledger, then releases its mark, which returns the stock to the gate.
    pub async fn cancel(&self, id: OrderId, user: UserId) -> Result<Order, Error> {
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

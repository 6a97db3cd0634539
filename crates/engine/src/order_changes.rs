//! Passes on the steps of orders to those who wait for them. The steps of all orders that are waited for are read from the ledger once a
//! second, whichever node has made the orders take them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::gauge;
use parking_lot::Mutex;
use stampede_core::ports::OrderLedger;
use stampede_core::{OrderEvent, OrderId, OrderStatus};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::error::{Error, describe};

/// The most callers that wait at once.
const MAX_WAITING: usize = 10_000;
/// Orders whose steps are read with one query.
const READ: usize = 1000;
const INTERVAL: Duration = Duration::from_secs(1);

/// Waits for an order to leave the status in which it was seen.
#[derive(Debug)]
struct Waiter {
    seen: OrderStatus,
    taken: oneshot::Sender<Vec<OrderEvent>>,
}

/// Those who wait for steps on this node.
#[derive(Debug)]
pub(crate) struct OrderChanges {
    waiting: Mutex<HashMap<OrderId, Vec<Waiter>>>,
    permits: Arc<Semaphore>,
}

impl Default for OrderChanges {
    fn default() -> Self {
        Self { waiting: Mutex::default(), permits: Arc::new(Semaphore::new(MAX_WAITING)) }
    }
}

/// The right to wait for the steps of one order.
#[derive(Debug)]
pub struct OrderFollower {
    changes: Arc<OrderChanges>,
    _permit: OwnedSemaphorePermit,
}

impl OrderFollower {
    /// The steps of an order after the one to this status, in sequence, once there are any; `None` if none is expected, or this node stops.
    pub async fn next_steps(&self, order: OrderId, seen: OrderStatus) -> Option<Vec<OrderEvent>> {
        if seen.has_ended() {
            return None;
        }
        let (taken, next) = oneshot::channel();
        self.changes.waiting.lock().entry(order).or_default().push(Waiter { seen, taken });
        next.await.ok()
    }
}

impl OrderChanges {
    pub(crate) fn follow(self: &Arc<Self>) -> Result<OrderFollower, Error> {
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| Error::Busy)?;
        Ok(OrderFollower { changes: self.clone(), _permit: permit })
    }

    /// Reads what is waited for until the task is aborted.
    pub(crate) async fn run(self: Arc<Self>, ledger: Arc<dyn OrderLedger>) {
        let followed = gauge!("stampede_followed_orders");
        followed.set(0);
        loop {
            tokio::time::sleep(INTERVAL).await;
            let orders = self.waited_for();
            followed.set(u32::try_from(orders.len()).unwrap_or(u32::MAX));
            for orders in orders.chunks(READ) {
                match ledger.steps_of(orders).await {
                    Ok(steps) => self.distribute(&steps),
                    Err(error) => {
                        tracing::warn!(
                            error = describe(&error),
                            "cannot read the steps of orders that are followed; trying again"
                        );
                        break;
                    }
                }
            }
        }
    }

    /// The orders that are waited for. Callers that have gone are forgotten.
    fn waited_for(&self) -> Vec<OrderId> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|_, waiters| {
            waiters.retain(|waiter| !waiter.taken.is_closed());
            !waiters.is_empty()
        });
        waiting.keys().copied().collect()
    }

    /// `steps` has those of one order together.
    fn distribute(&self, steps: &[(OrderId, OrderEvent)]) {
        let mut waiting = self.waiting.lock();
        for steps in steps.chunk_by(|(one, _), (next, _)| one == next) {
            let Some(waiters) = steps.first().and_then(|(order, _)| waiting.get_mut(order)) else { continue };
            let unseen = |seen: OrderStatus| -> Vec<OrderEvent> {
                steps.iter().map(|(_, step)| *step).filter(|step| step.to.number() > seen.number()).collect()
            };
            for waiter in waiters.extract_if(.., |waiter| !unseen(waiter.seen).is_empty()) {
                // A caller that has gone does not need them.
                let _ = waiter.taken.send(unseen(waiter.seen));
            }
        }
    }
}

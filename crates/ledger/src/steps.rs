//! Counts the steps that orders have taken.

use metrics::counter;
use stampede_core::{Actor, OrderStatus};

/// The same kind of step of some orders.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TakenSteps {
    pub to: OrderStatus,
    pub by: Actor,
    pub orders: u64,
}

impl TakenSteps {
    /// Counts them, after they were committed.
    pub(crate) fn count(self) {
        let Self { to, by, orders } = self;
        counter!("stampede_order_steps_total", "to" => to.as_str(), "by" => by.as_str()).increment(orders);
    }
}

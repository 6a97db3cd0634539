//! The outbox of events: the steps of orders that a receiver of the operator has not accepted yet.

use async_trait::async_trait;

use super::Result;
use crate::clock::Timestamp;
use crate::ids::{OrderId, SaleId, UserId};
use crate::order::{OrderEvent, OrderStatus};

/// One step of an order, with what a receiver must know of the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingEvent {
    pub order: OrderId,
    pub sale: SaleId,
    pub user: UserId,
    pub step: OrderEvent,
}

impl OutgoingEvent {
    /// The same whenever the event is sent: an order reaches a status once.
    pub fn id(&self) -> String {
        format!("{}-{}", self.order, self.step.to.as_str())
    }

    /// Higher for every later event of the same order.
    pub const fn number(&self) -> u32 {
        self.step.to.number()
    }
}

/// An entry of the outbox: the orders of a recorded batch, or one later step of an order. An event of a batch that was rejected has an entry
/// of its own as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxEntry {
    /// A later step of an order has a higher one than an earlier step, unless the earlier one was rejected.
    pub id: i64,
    pub is_batch: bool,
    pub events: Vec<OutgoingEvent>,
    /// How often the receiver has rejected it.
    pub tries: u32,
    /// When it is due; `None` if it is set aside until an operator retries it.
    pub next_at: Option<Timestamp>,
    /// Why it was rejected, or waits.
    pub error: Option<String>,
}

/// A single event in the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingStep {
    pub entry: i64,
    pub order: OrderId,
    pub to: OrderStatus,
}

/// An event that the receiver has rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedEvent {
    /// Where it was found. An event of a batch gets an entry of its own.
    pub entry: i64,
    pub from_batch: bool,
    pub event: OutgoingEvent,
    /// How often it was rejected.
    pub tries: u32,
    /// When it is sent again; `None` to set it aside.
    pub next_at: Option<Timestamp>,
    pub error: String,
}

/// An event that waits for an earlier one of its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldEvent {
    pub entry: i64,
    /// The entry of the earlier one: if that is set aside, this one is, too.
    pub earlier: i64,
    /// It waits at least until then.
    pub until: Timestamp,
}

/// What came of sending entries of the outbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventDelivery {
    /// Entries of which nothing is left: accepted, or rejected events of a batch.
    pub done: Vec<i64>,
    /// Batches of which only these orders are left to be sent.
    pub left: Vec<(i64, Vec<OrderId>)>,
    pub rejected: Vec<RejectedEvent>,
    pub held: Vec<HeldEvent>,
}

/// Stores events until they are delivered. An entry is written in the transaction that records a batch or takes a step.
///
/// An event is deleted only after it was accepted, so that each is delivered at least once, whatever several processes do at the same time.
#[async_trait]
pub trait EventOutbox: Send + Sync {
    /// Entries that are due, by rising id, at most `limit`; fewer if they have many orders.
    async fn due_events(&self, now: Timestamp, limit: u32) -> Result<Vec<OutboxEntry>>;

    /// The single events of these orders, also those that are not due or set aside.
    async fn waiting_steps(&self, orders: &[OrderId]) -> Result<Vec<WaitingStep>>;

    /// Records what came of sending entries. What another process has deleted stays deleted.
    async fn finish_events(&self, delivery: &EventDelivery) -> Result<()>;

    /// The events that are set aside, by rising id.
    async fn failed_events(&self, limit: u32) -> Result<Vec<OutboxEntry>>;

    /// Makes the events due that are set aside, of one order or of all. Returns how many.
    async fn retry_events(&self, order: Option<OrderId>) -> Result<u64>;

    /// The number of entries; a batch is one.
    async fn count_events(&self) -> Result<u64>;
}

//! The queue between gate and ledger: batches of admitted orders are published with a confirm, and consumers record them.
//!
//! - [`OrderQueue`], [`Consumer`]: the interface, and the rules that every queue keeps
//! - [`DeadLetter`]: a message that could not be read, as operators see it
//! - [`QueueError`]: why a call failed, and whether the message may be in the queue all the same; [`UnreadyReason`]: why none is published
//! - [`message`]: the format of a message
//! - [`rabbitmq`]: the queue on RabbitMQ
//!
//! A message is a whole batch of one sale, as the gate admitted it, or a [`Marker`]. A queue is divided into a fixed number of partitions;
//! all messages of a sale are in the same one.
//!
//! Rules, tested by `tests/it/conformance.rs`:
//!
//! - A confirmed message survives a crash of the broker. It is delivered at least once, and again until it is acknowledged. So
//!   recording must be idempotent.
//! - A partition delivers to one consumer at a time. When that consumer is gone, another one gets what was not acknowledged.
//! - **In order**: a message is delivered after every message of its partition that was confirmed before it was published, unless that one was
//!   acknowledged. So a consumer that handles the deliveries of a partition one after another knows, when it comes to a marker, that
//!   everything confirmed before the marker is handled. A consumer therefore keeps a delivery that it cannot handle yet, and holds back
//!   later markers of the same partition; it never publishes a delivery again.

#![warn(missing_docs)]

mod backoff;
mod dead_letter;
mod error;
pub mod message;
pub mod rabbitmq;

use std::fmt;

use async_trait::async_trait;
use stampede_core::ports::Admitted;
use stampede_core::{Epoch, SaleId};

pub use dead_letter::{DeadLetter, DeadLetterId, InvalidDeadLetterId};
pub use error::{QueueError, UnreadyReason};
pub use message::DecodeError;

/// Orders of one sale that the gate admitted together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The sale of all orders.
    pub sale: SaleId,
    /// The epoch in which they were admitted. They must be recorded with it.
    pub epoch: Epoch,
    /// At least one, at most [`message::MAX_ORDERS`].
    pub orders: Vec<Admitted>,
}

/// A message without orders. It is sent through each partition: where it has arrived, every message that was confirmed before is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Marker {
    /// From a rebuild of the gate.
    Rebuild {
        /// The incarnation of the gate that the rebuild creates.
        incarnation: u64,
    },
    /// From a comparison of gate and ledger, which has found orders that may be on their way.
    Reconcile {
        /// Names the comparison.
        id: u64,
    },
}

/// The content of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Orders to record.
    Batch(Batch),
    /// A marker to report.
    Marker(Marker),
    /// Bytes that are not a message. They are acknowledged after [`OrderQueue::dead_letter`] has stored them.
    Undecodable {
        /// The bytes as they were delivered.
        bytes: Vec<u8>,
        /// What is wrong with them.
        error: DecodeError,
    },
}

/// Names a delivery of one [`Consumer`]; later deliveries have higher numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// A message on its way to a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// For [`Consumer::ack`].
    pub tag: Tag,
    /// The partition of the queue that the message came from, below [`OrderQueue::partitions`].
    pub partition: u16,
    /// What was published.
    pub payload: Payload,
    /// The message may have been delivered before, to this consumer or to another.
    pub redelivered: bool,
}

/// How many messages wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Depth {
    /// Messages that no consumer has received, in all partitions. Those that were delivered and not acknowledged are not counted.
    pub waiting: u64,
    /// Messages in the dead-letter queue.
    pub dead_letters: u64,
}

/// A queue of admitted orders.
#[async_trait]
pub trait OrderQueue: Send + Sync + fmt::Debug {
    /// Publishes a batch to the partition of its sale. Returns when the broker has confirmed that the message is stored. A message that the
    /// broker returned, because it belongs to no queue, is not confirmed; what is missing is then declared again.
    async fn publish(&self, batch: &Batch) -> Result<(), QueueError>;

    /// Publishes a marker to each partition. After an error it may be in some of them; it can be published again.
    async fn publish_marker(&self, marker: Marker) -> Result<(), QueueError>;

    /// Stores bytes that cannot be decoded in the dead-letter queue. Returns when the broker has confirmed it.
    async fn dead_letter(&self, bytes: &[u8], reason: &str) -> Result<(), QueueError>;

    /// The oldest dead letters, at most `limit`. They stay where they are; meanwhile other calls may not find them.
    async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, QueueError>;

    /// Publishes a dead letter to the queue again and removes it. Returns whether there was one. After an error it may be in both.
    async fn retry_dead_letter(&self, id: DeadLetterId) -> Result<bool, QueueError>;

    /// Removes a dead letter. Returns whether there was one.
    async fn discard_dead_letter(&self, id: DeadLetterId) -> Result<bool, QueueError>;

    /// How many messages wait.
    async fn depth(&self) -> Result<Depth, QueueError>;

    /// Starts to consume all partitions; `prefetch` is how many messages of each partition may be delivered and not acknowledged.
    async fn consume(&self, prefetch: u16) -> Result<Box<dyn Consumer>, QueueError>;

    /// Into how many partitions the queue is divided.
    fn partitions(&self) -> u16;

    /// Why no message can be published now; `None` if one can.
    fn unready_reason(&self) -> Option<UnreadyReason>;

    /// Whether a message can be published now.
    fn is_ready(&self) -> bool {
        self.unready_reason().is_none()
    }

    /// Waits for the confirms of messages under way, then disconnects. Later calls fail with [`QueueError::NotSent`].
    async fn close(&self);
}

/// Receives the messages of a queue. If it is dropped, what it has not acknowledged goes to another consumer.
#[async_trait]
pub trait Consumer: Send + fmt::Debug {
    /// Waits for a delivery and returns it with those that have arrived as well, at most `max` (at least one) together. If the broker is
    /// away it waits for that, too. It can be cancelled at any time; no delivery is lost.
    ///
    /// # Errors
    /// [`QueueError::Disconnected`], once, when the connection was lost. What was not acknowledged is delivered again, here or to another
    /// consumer, so this consumer should forget it. The next call connects again.
    async fn next(&mut self, max: usize) -> Result<Vec<Delivery>, QueueError>;

    /// Acknowledges deliveries: they are removed from the queue. Those of a connection that was lost are ignored. An acknowledgement can
    /// be lost with the connection, and then the message is delivered again.
    async fn ack(&mut self, deliveries: &[Tag]) -> Result<(), QueueError>;

    /// Disconnects. What was not acknowledged goes to another consumer.
    async fn close(self: Box<Self>);
}

//! The tier `queued`: many nodes, one gate in Redis, and a queue between the gate and the ledger. A buyer is answered once the order is
//! safe in the queue; consumers record it. Everything else is the tier [`redis`](super::redis), with these parts in place of its own:
//!
//! - [`admitter`]: admits requests in the gate, and answers without waiting for the ledger
//! - [`outcomes`]: tells those who wait for it what became of an order
//!
//! With Redis Streams the queue is the outbox of the gate: admitting an order and putting it into the queue is one step.
//!
//! - [`consumer`]: reads the outboxes of all sales and records their orders
//!
//! With RabbitMQ the node that admitted a batch publishes it, and settles its entry in the outbox once the broker has confirmed it.
//!
//! - [`broker`]: the connection to RabbitMQ; [`relay`]: publishes what was left in the outbox
//! - [`rabbitmq_consumer`]: records what the broker delivers; [`deliveries`]: in which order, and what may be acknowledged
//! - [`parked`]: keeps messages of a sale whose orders cannot be recorded in the ledger, so that they hold up no other sale
//! - [`drain`]: in a rebuild, waits until everything that was confirmed before is recorded

pub(super) mod admitter;
pub(super) mod broker;
pub(super) mod consumer;
mod deliveries;
pub(super) mod drain;
pub(super) mod outcomes;
pub(super) mod parked;
pub(super) mod rabbitmq_consumer;
pub(super) mod relay;

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{QueueClaim, QueueRecords, QueueSettings};
use stampede_queue::rabbitmq;
use stampede_redis::Client;

use super::{Delivery, RedisTierConfig, ShieldConfig};
use crate::engine::StartError;

/// The settings of the tiers `queued` and `shielded`.
#[derive(Debug, Clone)]
pub struct QueuedConfig {
    pub redis: RedisTierConfig,
    pub queue: QueueConfig,
    pub transport: Transport,
    /// With it, this is the tier `shielded`.
    pub shield: Option<ShieldConfig>,
}

/// What all queues have in common.
#[derive(Debug, Clone)]
pub struct QueueConfig {
    /// An order counts as accepted only if it was safe in the queue within this time after its admission began. A rebuild of the gate
    /// waits as long, so that no order is confirmed that the rebuilt gate does not know.
    pub accept_within: Duration,
    pub answer_after: AnswerAfter,
    /// Whether this process records orders.
    pub consume: bool,
    /// The most batches of one sale that wait in the outbox.
    pub max_batches: u32,
}

/// Which queue it is.
#[derive(Debug, Clone)]
pub enum Transport {
    RedisStream(StreamConfig),
    RabbitMq(Box<RabbitMqConfig>),
}

/// A queue in Redis: the outbox of each sale is a stream that consumers read.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// A connection on which the consumer waits for entries. Its response timeout is longer than the consumer waits (50 ms).
    pub redis: Arc<Client>,
    /// Sell although Redis does not write an append-only file: what was accepted is lost with its process.
    pub allow_without_aof: bool,
}

/// A queue in RabbitMQ.
#[derive(Debug, Clone)]
pub struct RabbitMqConfig {
    /// The id of the ledger is filled in at the start.
    pub broker: rabbitmq::Config,
    /// Messages of one partition that are delivered and not acknowledged.
    pub prefetch: u16,
    /// Messages of all sales that wait in the ledger, because their orders cannot be recorded for now.
    pub max_parked: u32,
}

/// When a buyer is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerAfter {
    /// Once the order is safe in the queue (202).
    Queue,
    /// Once the ledger has committed the order (201).
    Ledger,
}

/// Sees to it that all processes have the same settings of the queue.
pub(super) async fn claim(
    ledger: &(dyn QueueRecords + '_),
    holder: &str,
    delivery: &Delivery,
) -> Result<(), StartError> {
    let (queue, kind, partitions) = match delivery {
        Delivery::Commit => return Ok(()),
        Delivery::Stream(queue, _) => (queue, "redis-stream", 0),
        Delivery::RabbitMq(queue, rabbitmq) => (queue, "rabbitmq", rabbitmq.broker.partitions),
    };
    let accept_within_ms = u64::try_from(queue.accept_within.as_millis()).unwrap_or(u64::MAX);
    let settings = QueueSettings { kind: kind.to_owned(), partitions, accept_within_ms };
    match ledger.claim_queue(holder, &settings).await? {
        QueueClaim::Claimed => Ok(()),
        QueueClaim::InUse(QueueSettings { kind, accept_within_ms, .. }) => Err(StartError::Queue(format!(
            "other processes run on this database, or were killed less than a minute ago, with queue.kind = \"{kind}\" and \
             queue.accept_within_ms = {accept_within_ms}; all processes need the same"
        ))),
        QueueClaim::OtherPartitions(partitions) => Err(StartError::Queue(format!(
            "the queue was made with rabbitmq.partitions = {partitions}, and messages may wait in them"
        ))),
    }
}

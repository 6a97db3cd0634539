//! The tier `queued`: many nodes, one gate in Redis, and a queue between the gate and the ledger. A buyer is answered once the order is
//! safe in the queue; consumers record it.
//!
//! The queue is the outbox of the gate: admitting an order and putting it into the queue is one step. Everything else is the tier
//! [`redis`](super::redis), with these parts in place of its own:
//!
//! - [`admitter`]: admits requests in the gate, and answers without waiting for the ledger
//! - [`consumer`]: reads the outboxes of all sales and records their orders
//! - [`outcomes`]: tells those who wait for it what became of an order

pub(super) mod admitter;
pub(super) mod consumer;
pub(super) mod outcomes;

use std::sync::Arc;
use std::time::Duration;

use stampede_redis::Client;

use super::{RedisTierConfig, ShieldConfig};

/// The settings of the tiers `queued` and `shielded`.
#[derive(Debug, Clone)]
pub struct QueuedConfig {
    pub redis: RedisTierConfig,
    pub queue: StreamConfig,
    /// With it, this is the tier `shielded`.
    pub shield: Option<ShieldConfig>,
}

/// A queue in Redis: the outbox of each sale is a stream that consumers read.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// A connection on which the consumer waits for entries. Its response timeout is longer than the consumer waits (50 ms).
    pub redis: Arc<Client>,
    /// An order counts as accepted only if the gate answered within this time. A rebuild of the gate waits as long, so that no order
    /// is confirmed that the rebuilt gate does not know.
    pub accept_within: Duration,
    pub answer_after: AnswerAfter,
    /// Whether this process records orders.
    pub consume: bool,
    /// Sell although Redis does not write an append-only file: what was accepted is lost with its process.
    pub allow_without_aof: bool,
    /// The most batches of one sale that wait for the ledger.
    pub max_batches: u32,
}

/// When a buyer is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerAfter {
    /// Once the order is safe in the queue (202).
    Queue,
    /// Once the ledger has committed the order (201).
    Ledger,
}

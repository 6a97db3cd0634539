//! The settings of tiers with a gate in Redis.

use std::sync::Arc;
use std::time::Duration;

use stampede_redis::{Client, Servers};

#[derive(Debug, Clone)]
pub struct RedisTierConfig {
    pub redis: Arc<Client>,
    /// Another connection, for rate limits, so that they do not wait behind a rebuild of the gate.
    pub limit_redis: Arc<Client>,
    /// The same server, for caches and locks, which open connections of their own.
    pub servers: Servers,
    pub connect_timeout: Duration,
    pub response_timeout: Duration,
    /// How long a request waits for Redis to count it, before the node's own counts decide.
    pub limit_timeout: Duration,
    /// How long after a fail-over the old master may still accept orders. With a queue, a rebuild waits at least as long.
    pub failover_window: Duration,
    /// Do not ask Redis for its eviction policy: it never evicts.
    pub assume_noeviction: bool,
    /// The most orders in one transaction.
    pub max_batch: usize,
    /// The most requests for one sale that wait for the gate or the ledger.
    pub queue_per_sale: usize,
    /// The most requests for all sales that wait for the gate or the ledger.
    pub queue_total: usize,
    /// The earliest time after which an order that cannot be recorded goes into quarantine.
    pub quarantine_after: Duration,
    pub reconcile: ReconcileConfig,
}

/// When gate and ledger are compared.
#[derive(Debug, Clone, Copy)]
pub struct ReconcileConfig {
    pub interval: Duration,
    /// A difference that is still there after this time is repaired.
    pub confirm_after: Duration,
}

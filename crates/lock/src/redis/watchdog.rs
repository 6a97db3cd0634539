//! Renews the leases of locks that have no TTL of their own, and the queue entries of waiters for fair locks, all together.
//!
//! The holder of a lease that could not be renewed in time learns it from the clock (see [`Lease::lost`]); the holder of a lease that Redis
//! does not have learns it at once. The leases of a Redlock are acquired again, as long as the majority of its servers holds the lock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::lease::{Lease, RenewOutcome};
use super::locks::Config;
use stampede_redis::{Backoff, Client};

const MAX_CONCURRENT_RENEWALS: usize = 256;
/// How soon a renewal that failed is retried; the pause doubles with every further failure.
const FIRST_RETRY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Watchdog {
    /// The age at which a renewal is repeated.
    interval: Duration,
    config: Config,
    wake: Arc<Notify>,
    /// Keyed by address, which is unique while the lease is in the map.
    leases: Mutex<HashMap<usize, Arc<Lease>>>,
}

impl Watchdog {
    /// Leases are renewed every third of their TTL.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            interval: config.watchdog_ttl / 3,
            config: config.clone(),
            wake: Arc::default(),
            leases: Mutex::default(),
        }
    }

    /// Starts renewing the lease.
    pub(crate) fn watch(&self, lease: Arc<Lease>) {
        self.leases.lock().insert(address(&lease), lease);
    }

    /// Stops renewing the lease.
    pub(crate) fn unwatch(&self, lease: &Arc<Lease>) {
        self.leases.lock().remove(&address(lease));
    }

    /// Wakes the watchdog, so that it renews urgent leases now.
    pub(crate) fn waker(&self) -> Arc<Notify> {
        self.wake.clone()
    }

    /// The number of leases and queue entries that are renewed.
    pub(crate) fn watched_count(&self) -> usize {
        self.leases.lock().len()
    }

    /// Renews until the task is aborted.
    pub(crate) async fn run(self: Arc<Self>, client: Arc<Client>) {
        let mut pause = self.interval / 2;
        let longest = self.interval / 8;
        let mut backoff = Backoff::new(FIRST_RETRY.min(longest), longest);
        loop {
            // A wake-up before the timeout means that a lease is urgent.
            let _ = tokio::time::timeout(pause, self.wake.notified()).await;
            // Checking twice per interval renews everything that is due within the next half interval in one batch.
            let due: Vec<Arc<Lease>> =
                self.leases.lock().values().filter(|lease| lease.is_due(self.interval / 2)).cloned().collect();
            let renewals = due.into_iter().map(|lease| self.renew(&client, lease));
            let failed = futures_util::stream::iter(renewals)
                .buffer_unordered(MAX_CONCURRENT_RENEWALS)
                .filter(|done| std::future::ready(!done))
                .count()
                .await;
            if failed == 0 {
                backoff.reset();
                pause = self.interval / 2;
            } else {
                // Retried soon: the leases are about to expire. Often the connection was closed, and the next attempt opens another; or, on
                // a server of a Redlock that restarted empty, another owner held the lock for a moment.
                pause = backoff.advance();
            }
        }
    }

    /// Returns `false` if the renewal should be retried soon.
    async fn renew(&self, client: &Client, lease: Arc<Lease>) -> bool {
        match lease.renew(client, &self.config).await {
            Ok(RenewOutcome::Renewed) => return true,
            Ok(RenewOutcome::Busy) => return false,
            Ok(RenewOutcome::Lost) => {}
            Err(error) => {
                tracing::debug!(%error, "failed to renew a lock");
                if !lease.is_over() {
                    return false;
                }
            }
        }
        lease.end();
        self.unwatch(&lease);
        true
    }
}

fn address(lease: &Arc<Lease>) -> usize {
    Arc::as_ptr(lease).addr()
}

//! Renews the holds of a client that have no lease of their own, and the places of those who wait in line, all together.
//!
//! A hold that could not be renewed in time is told so by the clock (see [`Hold::lost`]); one that Redis knows nothing of, at once. Those of
//! a red lock are acquired again, as long as most of its servers hold it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::sync::Notify;

use crate::client::Config;
use crate::hold::{Hold, Renewal};
use stampede_redis::Client;

/// How many renewals are under way at once.
const TOGETHER: usize = 256;

#[derive(Debug)]
pub(crate) struct Watchdog {
    /// A renewal is this old when it is done again.
    every: Duration,
    config: Config,
    wake: Arc<Notify>,
    /// By their addresses, which are theirs as long as they are here.
    holds: Mutex<HashMap<usize, Arc<Hold>>>,
}

impl Watchdog {
    /// Renews leases every third of their length.
    pub(crate) fn new(config: &Config) -> Self {
        Self { every: config.watchdog_lease / 3, config: config.clone(), wake: Arc::default(), holds: Mutex::default() }
    }

    fn holds(&self) -> MutexGuard<'_, HashMap<usize, Arc<Hold>>> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it is renewed.
    pub(crate) fn watch(&self, hold: Arc<Hold>) {
        self.holds().insert(address(&hold), hold);
    }

    /// It is not renewed any more.
    pub(crate) fn forget(&self, hold: &Arc<Hold>) {
        self.holds().remove(&address(hold));
    }

    /// Wakes it for what is urgent.
    pub(crate) fn waker(&self) -> Arc<Notify> {
        self.wake.clone()
    }

    /// How many are renewed.
    pub(crate) fn watched(&self) -> usize {
        self.holds().len()
    }

    /// Renews for ever.
    pub(crate) async fn run(self: Arc<Self>, link: Arc<Client>) {
        let mut pause = self.every / 2;
        loop {
            // Woken, it renews what is urgent.
            let _ = tokio::time::timeout(pause, self.wake.notified()).await;
            // Looking twice as often as needed, so that all that is due within the next half is done together.
            let due: Vec<Arc<Hold>> =
                self.holds().values().filter(|hold| hold.is_due(self.every / 2)).cloned().collect();
            let renewals = due.into_iter().map(|hold| self.renew(&link, hold));
            let failed = futures_util::stream::iter(renewals)
                .buffer_unordered(TOGETHER)
                .filter(|done| std::future::ready(!done))
                .count()
                .await;
            // What failed is tried again soon: the lease is running out.
            pause = if failed == 0 { self.every / 2 } else { self.every / 8 };
        }
    }

    /// `false` if it should be tried again soon.
    async fn renew(&self, link: &Client, hold: Arc<Hold>) -> bool {
        match hold.renew(link, &self.config).await {
            Ok(Renewal::Renewed) => return true,
            Ok(Renewal::NotYet) => return false,
            Ok(Renewal::Gone) => {}
            Err(failure) => {
                tracing::debug!(?failure, "a lock could not be renewed");
                if !hold.is_over() {
                    return false;
                }
            }
        }
        hold.end();
        self.forget(&hold);
        true
    }
}

fn address(hold: &Arc<Hold>) -> usize {
    Arc::as_ptr(hold).addr()
}

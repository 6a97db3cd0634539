//! Renews the holds of a client that have no lease of their own, and the places of those who wait in line, all together.
//!
//! A hold that could not be renewed in time is told so by the clock (see [`Hold::lost`]); one that Redis knows nothing of, at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;

use crate::hold::Hold;
use stampede_redis::Link;

/// How many renewals are under way at once.
const TOGETHER: usize = 256;

#[derive(Debug)]
pub(crate) struct Watchdog {
    /// A renewal is this old when it is done again.
    every: Duration,
    /// By their addresses, which are theirs as long as they are here.
    holds: Mutex<HashMap<usize, Arc<Hold>>>,
}

impl Watchdog {
    /// Renews leases of this length every third of it.
    pub(crate) fn new(lease: Duration) -> Self {
        Self { every: lease / 3, holds: Mutex::default() }
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

    /// How many are renewed.
    pub(crate) fn watched(&self) -> usize {
        self.holds().len()
    }

    /// Renews for ever.
    pub(crate) async fn run(self: Arc<Self>, link: Arc<Link>) {
        let mut pause = self.every / 2;
        loop {
            tokio::time::sleep(pause).await;
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

    /// `false` if nobody knows.
    async fn renew(&self, link: &Link, hold: Arc<Hold>) -> bool {
        let gone = match hold.renew(link).await {
            Ok(renewed) => !renewed,
            Err(failure) => {
                tracing::debug!(?failure, "a lock could not be renewed");
                if hold.is_sure() {
                    return false;
                }
                true
            }
        };
        if gone {
            hold.end();
            self.forget(&hold);
        }
        true
    }
}

fn address(hold: &Arc<Hold>) -> usize {
    Arc::as_ptr(hold).addr()
}

//! Provokes a race: a barrier that a version passes between its check and its write.
//!
//! The first callers wait for each other there, so that all of them have checked before any of them writes. In a sound version they
//! cannot all get there, because a lock keeps them apart: then the barrier opens after a time limit. Once open, it stays open.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// How long the barrier waits for the missing callers in the first attempt, and by how much longer in each further one.
const LIMIT: Duration = Duration::from_millis(250);
const LIMIT_FACTOR: u32 = 4;

#[derive(Debug, Clone)]
pub struct RacePoint {
    callers: usize,
    limit: Duration,
    /// How many callers are missing; open at zero.
    missing: Arc<watch::Sender<usize>>,
}

impl RacePoint {
    /// A barrier for this many callers. On a busy machine they may not all arrive in time, so each attempt (from zero) waits longer.
    pub fn of(callers: usize, attempt: u32) -> Self {
        Self::within(callers, LIMIT * LIMIT_FACTOR.saturating_pow(attempt))
    }

    /// The same with another time limit.
    pub fn within(callers: usize, limit: Duration) -> Self {
        Self { callers, limit, missing: Arc::new(watch::Sender::new(callers)) }
    }

    /// A barrier that is always open.
    pub fn open() -> Self {
        Self::within(0, LIMIT)
    }

    /// Called by a version between its check and its write.
    pub async fn pass(&self) {
        self.missing.send_modify(|missing| *missing = missing.saturating_sub(1));
        // Either all arrive, or the time is up. The sender lives as long as this borrow.
        let _ = tokio::time::timeout(self.limit, self.missing.subscribe().wait_for(|missing| *missing == 0)).await;
        self.missing.send_replace(0);
    }

    /// Waits until this many callers have arrived, or until the time limit.
    pub async fn arrived(&self, callers: usize) {
        let missing = self.callers.saturating_sub(callers);
        let _ = tokio::time::timeout(self.limit, self.missing.subscribe().wait_for(|now| *now <= missing)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn all_callers_arrive_before_one_passes() {
        let (race, arrived) = (RacePoint::of(8, 2), Arc::new(AtomicUsize::new(0)));
        let caller = || async {
            arrived.fetch_add(1, Ordering::SeqCst);
            race.pass().await;
            arrived.load(Ordering::SeqCst)
        };
        let seen = futures_util::future::join_all((0..8).map(|_| caller())).await;
        assert_eq!(seen, [8; 8]);
    }

    #[tokio::test]
    async fn a_missing_caller_does_not_hold_it_up_for_good() {
        let race = RacePoint::of(2, 0);
        race.pass().await;
        tokio::time::timeout(Duration::from_millis(10), race.pass()).await.expect("it stays open");
    }
}

//! Provokes a race: a barrier that a version passes between its check and its write.
//!
//! The first callers wait for each other there, so that all of them have checked before any of them writes. In a sound version they
//! cannot all get there, because a lock keeps them apart: then the barrier opens after a time limit. Once open, it stays open.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

/// How long the barrier waits for the missing callers.
const LIMIT: Duration = Duration::from_millis(250);

#[derive(Debug, Clone)]
pub struct RacePoint {
    missing: Arc<AtomicUsize>,
    open: Arc<watch::Sender<bool>>,
}

impl RacePoint {
    /// A barrier for this many callers.
    pub fn of(callers: usize) -> Self {
        Self { missing: Arc::new(AtomicUsize::new(callers)), open: Arc::new(watch::Sender::new(callers == 0)) }
    }

    /// A barrier that is always open.
    pub fn open() -> Self {
        Self::of(0)
    }

    /// Called by a version between its check and its write.
    pub async fn pass(&self) {
        let mut opened = self.open.subscribe();
        if *opened.borrow_and_update() {
            return;
        }
        if self.missing.fetch_sub(1, Ordering::AcqRel) > 1 {
            // Either all have arrived, or the time is up. The sender lives as long as this borrow.
            let _ = tokio::time::timeout(LIMIT, opened.wait_for(|open| *open)).await;
        }
        self.open.send_replace(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_callers_arrive_before_one_passes() {
        let (race, arrived) = (RacePoint::of(8), Arc::new(AtomicUsize::new(0)));
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
        let race = RacePoint::of(2);
        race.pass().await;
        tokio::time::timeout(Duration::from_millis(10), race.pass()).await.expect("it stays open");
    }
}

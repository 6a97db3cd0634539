//! Waiting for a condition.

use std::time::{Duration, Instant};

/// How long a condition may take to become true.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Polls a condition until it is true and returns how long that took. Panics if it takes too long.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < TIMEOUT, "timed out: {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    started.elapsed()
}

//! A circuit breaker: while Redis does not answer, only a probe now and then is sent to it.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Leaves Redis alone for a while after it has not answered; then lets one try through.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// Milliseconds after `START`; 0 if all is well.
    closed_until: AtomicU64,
    pause_ms: AtomicU64,
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn since_start() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Breaker {
    pub(crate) fn may_pass(&self) -> bool {
        let until = self.closed_until.load(Ordering::Acquire);
        if until == 0 {
            return true;
        }
        let now = since_start();
        // One is let through; the others wait for what it finds.
        now >= until && {
            let next = now + self.pause_ms.load(Ordering::Relaxed).max(1);
            self.closed_until.compare_exchange(until, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        }
    }

    pub(crate) fn worked(&self) {
        if self.closed_until.swap(0, Ordering::AcqRel) != 0 {
            self.pause_ms.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn failed(&self) {
        let longest = u64::try_from(LONGEST_PAUSE.as_millis()).unwrap_or(u64::MAX);
        let first = u64::try_from(FIRST_PAUSE.as_millis()).unwrap_or(1);
        let pause = (2 * self.pause_ms.load(Ordering::Relaxed)).clamp(first, longest);
        // Many fail at once with one outage: it counts once.
        let now = since_start();
        if now >= self.closed_until.load(Ordering::Acquire) {
            self.pause_ms.store(pause, Ordering::Relaxed);
            self.closed_until.store(now + pause, Ordering::Release);
        }
    }
}

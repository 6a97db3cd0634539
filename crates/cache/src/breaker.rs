//! A circuit breaker: after Redis has failed to respond, calls are skipped for a while, then one call is let through as a probe.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// Open (calls are skipped) until a point in time; closed (calls pass) otherwise.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// Milliseconds after `START`; 0 if the breaker is closed.
    open_until_ms: AtomicU64,
    backoff_ms: AtomicU64,
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn elapsed_ms() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Breaker {
    /// Whether a call may be sent now.
    pub(crate) fn allows_call(&self) -> bool {
        let until = self.open_until_ms.load(Ordering::Acquire);
        if until == 0 {
            return true;
        }
        let now = elapsed_ms();
        // The exchange lets a single caller through; the others keep skipping until that call has succeeded.
        now >= until && {
            let next = now + self.backoff_ms.load(Ordering::Relaxed).max(1);
            self.open_until_ms.compare_exchange(until, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        }
    }

    pub(crate) fn record_success(&self) {
        if self.open_until_ms.swap(0, Ordering::AcqRel) != 0 {
            self.backoff_ms.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn record_failure(&self) {
        let max = u64::try_from(MAX_BACKOFF.as_millis()).unwrap_or(u64::MAX);
        let min = u64::try_from(MIN_BACKOFF.as_millis()).unwrap_or(1);
        let backoff = (2 * self.backoff_ms.load(Ordering::Relaxed)).clamp(min, max);
        // Many concurrent calls fail in one outage: only the first of them doubles the backoff.
        let now = elapsed_ms();
        if now >= self.open_until_ms.load(Ordering::Acquire) {
            self.backoff_ms.store(backoff, Ordering::Relaxed);
            self.open_until_ms.store(now + backoff, Ordering::Release);
        }
    }
}

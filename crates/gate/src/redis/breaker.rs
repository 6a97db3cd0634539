//! Notices that Redis does not answer, so that requests to buy are refused at once instead of each waiting for a timeout.
//!
//! It opens after consecutive calls without an answer and closes with the first answer. While it is open, requests to buy are not sent;
//! the calls that nodes make anyway, at intervals and one after the other, find out whether Redis answers again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, counter, gauge};
use parking_lot::Mutex;

/// After this many failures without an answer in between, Redis counts as not answering.
const MAX_FAILURES: u32 = 2;
/// Calls that fail within this time after a failure that was counted are part of it: the connection that they share broke.
const SAME_FAILURE: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
struct Failures {
    count: u32,
    /// When the last failure was counted.
    counted: Option<Instant>,
    opened: Option<Instant>,
}

pub(super) struct Breaker {
    is_open: AtomicBool,
    /// Whether there are failures, so that an answer usually costs no lock.
    has_failures: AtomicBool,
    failures: Mutex<Failures>,
    open: Gauge,
    opened: Counter,
}

impl Breaker {
    pub(super) fn new() -> Self {
        let (open, opened) = (gauge!("stampede_gate_breaker_open"), counter!("stampede_gate_breaker_opened_total"));
        // Shown from the start.
        open.set(0.0);
        opened.increment(0);
        Self {
            is_open: AtomicBool::new(false),
            has_failures: AtomicBool::new(false),
            failures: Mutex::default(),
            open,
            opened,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }

    /// Redis has answered a call, if only with an error.
    pub(super) fn answered(&self) {
        if !self.has_failures.load(Ordering::Relaxed) {
            return;
        }
        let mut failures = self.failures.lock();
        self.has_failures.store(false, Ordering::Relaxed);
        self.is_open.store(false, Ordering::Relaxed);
        if let Some(opened) = failures.opened {
            self.open.set(0.0);
            tracing::info!(after_ms = opened.elapsed().as_millis(), "Redis answers again");
        }
        *failures = Failures::default();
    }

    /// A call was not sent or not answered in time.
    pub(super) fn unanswered(&self) {
        self.failed_at(Instant::now());
    }

    fn failed_at(&self, now: Instant) {
        let mut failures = self.failures.lock();
        self.has_failures.store(true, Ordering::Relaxed);
        if failures.counted.is_some_and(|counted| now.saturating_duration_since(counted) < SAME_FAILURE) {
            return;
        }
        failures.counted = Some(now);
        failures.count += 1;
        if failures.count >= MAX_FAILURES && failures.opened.is_none() {
            failures.opened = Some(now);
            self.is_open.store(true, Ordering::Relaxed);
            self.open.set(1.0);
            self.opened.increment(1);
            tracing::warn!("Redis does not answer; requests to buy are refused until it does");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_consecutive_failures_and_closes_with_an_answer() {
        let (breaker, start) = (Breaker::new(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for ms in 0..10 {
            breaker.failed_at(at(ms));
        }
        assert!(!breaker.is_open(), "calls that fail together are one failure");
        breaker.answered();
        breaker.failed_at(at(100));
        assert!(!breaker.is_open(), "an answer came between");
        breaker.failed_at(at(200));
        assert!(breaker.is_open());
        breaker.failed_at(at(300));
        assert!(breaker.is_open());
        breaker.answered();
        assert!(!breaker.is_open());
        breaker.failed_at(at(400));
        assert!(!breaker.is_open(), "counted from the beginning");
    }

    /// Under load, calls fail one shortly after the other for as long as Redis is away.
    #[test]
    fn opens_if_calls_fail_without_a_pause() {
        let (breaker, start) = (Breaker::new(), Instant::now());
        for ms in 0..=40 {
            breaker.failed_at(start + Duration::from_millis(ms));
        }
        assert!(breaker.is_open());
    }
}

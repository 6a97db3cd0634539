//! Limits on log lines of one kind, so that an attacker can neither fill the disk nor hide one kind of line behind another, or the lines
//! about other addresses behind those about their own.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stampede_limit::{Limit, SlidingWindow, rate_limit_key};

/// How many addresses are remembered per kind. If there are more, only the limit for all of them holds.
const MAX_ADDRESSES: usize = 10_000;

/// Allows a number of lines per window, and logs how many it suppressed.
#[derive(Debug, Clone)]
pub(crate) struct LogThrottle {
    kind: &'static str,
    max_lines: u32,
    window: Duration,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    window_start: Instant,
    lines: u32,
    suppressed: u64,
}

impl LogThrottle {
    pub(crate) fn new(kind: &'static str, max_lines: u32, window: Duration) -> Self {
        let state = State { window_start: Instant::now(), lines: 0, suppressed: 0 };
        Self { kind, max_lines, window, state: Arc::new(Mutex::new(state)) }
    }

    /// Whether one more line may be logged. The number of those that may not is logged at the end of the window.
    pub(crate) fn allows(&self) -> bool {
        self.count(true)
    }

    /// `wanted`: the line is logged if it is within the limit. Otherwise it counts as suppressed.
    fn count(&self, wanted: bool) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        if now.duration_since(state.window_start) >= self.window {
            (state.window_start, state.lines) = (now, 0);
        }
        if wanted && state.lines < self.max_lines {
            state.lines += 1;
            return true;
        }
        state.suppressed += 1;
        if state.suppressed == 1 {
            let (end, throttle) = (state.window_start + self.window, self.clone());
            tokio::spawn(async move {
                tokio::time::sleep_until(end.into()).await;
                throttle.report();
            });
        }
        false
    }

    fn report(&self) {
        let suppressed = std::mem::take(&mut self.state.lock().suppressed);
        tracing::warn!(kind = self.kind, suppressed, "log lines of this kind were suppressed");
    }
}

/// A limit for each address, and one for all of them together.
#[derive(Debug)]
pub(crate) struct AddressLogThrottle {
    per_address: SlidingWindow<IpAddr>,
    all: LogThrottle,
}

impl AddressLogThrottle {
    pub(crate) fn new(kind: &'static str, max_lines_per_address: u32, max_lines: u32, window: Duration) -> Self {
        let limit = Limit { count: max_lines_per_address, window };
        Self { per_address: SlidingWindow::new(limit, MAX_ADDRESSES), all: LogThrottle::new(kind, max_lines, window) }
    }

    /// Whether one more line about this address may be logged.
    pub(crate) fn allows(&self, address: IpAddr) -> bool {
        let is_within_limit = self.per_address.check(rate_limit_key(address)).is_ok();
        self.all.count(is_within_limit)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test]
    async fn lines_about_one_address_do_not_suppress_those_about_another() {
        let throttle = AddressLogThrottle::new("test", 20, 100, Duration::from_secs(3600));
        let allowed = |address: u32, lines: u32| {
            (0..lines).filter(|_| throttle.allows(IpAddr::V4(Ipv4Addr::from_bits(address)))).count()
        };
        assert_eq!(allowed(1, 200), 20);
        assert_eq!(allowed(2, 1), 1);
        assert_eq!(throttle.all.state.lock().suppressed, 180);
        assert_eq!((3..1000).map(|address| allowed(address, 1)).sum::<usize>(), 79, "of all addresses together");
    }

    #[tokio::test]
    async fn lines_over_the_limit_are_suppressed_and_counted() {
        let throttle = LogThrottle::new("test", 20, Duration::from_millis(500));
        let allowed = (0..1000).filter(|_| throttle.allows()).count();
        let suppressed = || throttle.state.lock().suppressed;
        assert_eq!((allowed, suppressed()), (20, 980));
        let deadline = Instant::now() + throttle.window * 60;
        while suppressed() > 0 {
            assert!(Instant::now() < deadline, "never reported");
            tokio::time::sleep(throttle.window / 20).await;
        }
        assert!(throttle.allows(), "a new window allows lines again");
    }
}

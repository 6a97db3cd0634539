//! A limit on log lines of one kind, so that an attacker can neither fill the disk nor hide one kind of line behind another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

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
        let mut state = self.state.lock();
        let now = Instant::now();
        if now.duration_since(state.window_start) >= self.window {
            (state.window_start, state.lines) = (now, 0);
        }
        if state.lines < self.max_lines {
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

#[cfg(test)]
mod tests {
    use super::*;

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

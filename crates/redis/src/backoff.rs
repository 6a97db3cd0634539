//! Delays between retries.

use std::time::Duration;

/// A delay that doubles with every retry, up to a maximum.
#[derive(Debug, Clone)]
pub struct Backoff {
    initial: Duration,
    current: Duration,
    max: Duration,
}

impl Backoff {
    /// Starts with `initial`; never exceeds `max`.
    pub const fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, current: initial, max }
    }

    /// The next delay, without advancing.
    pub const fn current(&self) -> Duration {
        self.current
    }

    /// Returns the delay and doubles it for the next retry.
    pub fn advance(&mut self) -> Duration {
        let delay = self.current;
        self.current = (delay * 2).min(self.max);
        delay
    }

    /// Sleeps for the delay and doubles it for the next retry.
    pub async fn sleep(&mut self) {
        tokio::time::sleep(self.advance()).await;
    }

    /// Starts again with the initial delay.
    pub fn reset(&mut self) {
        self.current = self.initial;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_doubles_up_to_the_maximum_and_resets() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(10), ms(50));
        assert_eq!(std::array::from_fn(|_| backoff.advance()), [ms(10), ms(20), ms(40), ms(50), ms(50)]);
        backoff.reset();
        assert_eq!(backoff.current(), ms(10));
    }
}

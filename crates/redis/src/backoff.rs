//! Delays between retries.

use std::time::Duration;

use rand::RngExt as _;

/// A random duration of at least half of this one, so that processes that wait for the same event do not act at the same moment.
pub fn jitter(delay: Duration) -> Duration {
    delay.mul_f64(rand::rng().random_range(0.5..=1.0))
}

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

    /// Sleeps for a random part of the delay, at least half of it, and doubles the delay for the next retry.
    pub async fn sleep(&mut self) {
        tokio::time::sleep(jitter(self.advance())).await;
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

    #[test]
    fn jitter_spreads_delays_over_the_upper_half() {
        let delay = Duration::from_secs(1);
        let delays: Vec<_> = (0..200).map(|_| jitter(delay)).collect();
        assert!(delays.iter().all(|spread| (delay / 2..=delay).contains(spread)));
        let (least, most) = (delays.iter().min().unwrap(), delays.iter().max().unwrap());
        assert!(*most - *least > delay / 4, "{least:?} to {most:?}");
    }
}

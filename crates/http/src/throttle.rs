//! A message that is repeated at most once in a while.

use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Throttle {
    every: Duration,
    last: Option<Instant>,
    held_back: u64,
}

impl Throttle {
    pub(crate) const fn new(every: Duration) -> Self {
        Self { every, last: None, held_back: 0 }
    }

    /// Whether it is time for the message again, and then how many were held back since the last one.
    pub(crate) fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < self.every) {
            self.held_back += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_once_in_a_while_and_counts_the_rest() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut throttle = Throttle::new(10 * second);
        let passed: Vec<_> = (0..25u32).filter_map(|n| throttle.pass(start + n * second)).collect();
        assert_eq!(passed, [0, 9, 9]);
    }
}

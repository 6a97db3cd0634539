//! Pauses between attempts to connect.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const MAX: Duration = Duration::from_secs(5);

/// Pauses that double with every attempt, up to a maximum. Each is shortened by up to a half at random, so that the nodes of an
/// installation do not connect at the same moment after the broker was away.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) const fn new() -> Self {
        Self { next: FIRST }
    }

    fn advance(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(MAX);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }

    pub(crate) async fn sleep(&mut self) {
        tokio::time::sleep(self.advance()).await;
    }

    /// Starts again with the first pause if the connection has lasted; one that is closed at once counts as a failure.
    pub(crate) fn connection_lasted(&mut self, span: Duration) {
        if span > MAX {
            self.next = FIRST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_maximum_and_start_again_after_a_connection_that_lasted() {
        let mut backoff = Backoff::new();
        let mut expected = FIRST;
        for _ in 0..10 {
            let pause = backoff.advance();
            assert!(pause >= expected / 2 && pause <= expected, "{pause:?} instead of {expected:?}");
            expected = (expected * 2).min(MAX);
        }
        assert_eq!(expected, MAX);
        backoff.connection_lasted(MAX / 2);
        assert!(backoff.advance() >= MAX / 2);
        backoff.connection_lasted(MAX * 2);
        assert!(backoff.advance() <= FIRST);
    }
}

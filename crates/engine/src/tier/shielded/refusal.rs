//! What can be concluded from an answer of the gate: why users without an order are refused, and for how long.

use std::time::Duration;

use stampede_core::sale::closed_reason;
use stampede_core::{Refusal, SaleStatus, Timestamp};
use stampede_gate::redis::Availability;

use super::super::redis::MAX_CLOCK_DIFFERENCE;

/// How close to the begin and to the end of a sale the gate alone decides. The gate's own time is used, so clocks of nodes do not matter.
/// But Redis may be replaced by a server with another clock, or its clock may be set. Each may be off the ledger's clock by the
/// greatest difference that is allowed, in either direction.
const MARGIN: Duration = MAX_CLOCK_DIFFERENCE.saturating_mul(2);

/// Why users without an order are refused, and for how long at most this holds while the generation is the same; `None` if they are not
/// refused, or not for a reason that a node may give by itself.
pub(super) fn of(answer: &Availability) -> Option<(Refusal, Duration)> {
    let Availability { status, window, now, remaining, .. } = *answer;
    let (refusal, left) = match closed_reason(status, window, now) {
        Some(Refusal::NotStarted) => (Refusal::NotStarted, time_until(window.begin.minus(MARGIN), now)),
        // Ended by an operator, which is final, or long enough ago.
        Some(Refusal::Ended) if status == SaleStatus::Ended || now >= window.end.plus(MARGIN) => {
            (Refusal::Ended, Duration::MAX)
        }
        None if remaining == 0 => (Refusal::SoldOut, time_until(window.end, now)),
        Some(_) | None => return None,
    };
    (!left.is_zero()).then_some((refusal, left))
}

fn time_until(at: Timestamp, now: Timestamp) -> Duration {
    Duration::from_millis(u64::try_from(at.ms() - now.ms()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use stampede_core::{Epoch, Window};

    use super::*;

    const BEGIN_MS: i64 = 100_000;
    const END_MS: i64 = 200_000;

    fn at(status: SaleStatus, now_ms: i64, remaining: u32) -> Option<(Refusal, Duration)> {
        let window = Window { begin: Timestamp::from_ms(BEGIN_MS), end: Timestamp::from_ms(END_MS) };
        let now = Timestamp::from_ms(now_ms);
        of(&Availability { epoch: Epoch(1), generation: 0, marks: 0, remaining, status, window, now })
    }

    #[test]
    fn near_the_edges_of_the_window_the_gate_decides() {
        let on = |now_ms, remaining| at(SaleStatus::OnSale, now_ms, remaining);
        let ms = Duration::from_millis;
        assert_eq!(on(BEGIN_MS - 5000, 1), Some((Refusal::NotStarted, ms(3000))), "until the margin begins");
        assert_eq!(on(BEGIN_MS - 2001, 1), Some((Refusal::NotStarted, ms(1))));
        assert_eq!(on(BEGIN_MS - 2000, 1), None);
        assert_eq!(on(BEGIN_MS - 1, 1), None);
        assert_eq!(on(BEGIN_MS, 1), None, "on sale");
        assert_eq!(on(END_MS - 1, 1), None);
        assert_eq!(on(END_MS, 1), None);
        assert_eq!(on(END_MS + 1999, 1), None);
        assert_eq!(on(END_MS + 2000, 1), Some((Refusal::Ended, Duration::MAX)));
    }

    #[test]
    fn sold_out_holds_until_the_end_of_the_sale() {
        assert_eq!(at(SaleStatus::OnSale, END_MS - 1000, 0), Some((Refusal::SoldOut, Duration::from_secs(1))));
        assert_eq!(at(SaleStatus::OnSale, END_MS, 0), None);
        let early = at(SaleStatus::OnSale, BEGIN_MS - 3000, 0);
        assert_eq!(early, Some((Refusal::NotStarted, Duration::from_secs(1))), "the reason that the gate gives");
    }

    #[test]
    fn status_comes_before_the_window() {
        assert_eq!(at(SaleStatus::Ended, BEGIN_MS - 1, 1), Some((Refusal::Ended, Duration::MAX)));
        for now_ms in [BEGIN_MS - 5000, BEGIN_MS + 5000] {
            assert_eq!(at(SaleStatus::Paused, now_ms, 0), None);
        }
        assert_eq!(at(SaleStatus::Paused, END_MS + 5000, 0), Some((Refusal::Ended, Duration::MAX)));
        for now_ms in [BEGIN_MS - 5000, BEGIN_MS + 5000, END_MS + 5000] {
            assert_eq!(at(SaleStatus::Draft, now_ms, 0), None, "a draft does not exist for buyers");
        }
    }
}

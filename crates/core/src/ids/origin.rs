//! Which generator an id comes from.

use super::counter;
use super::snowflake::{Snowflake, WorkerId};
use crate::clock::Timestamp;

/// A way to make ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdKind {
    /// [`Snowflake`]
    Snowflake,
    /// [`counter`]
    Counter,
}

/// When an id was made, and by whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Snowflake {
        at: Timestamp,
        worker: WorkerId,
    },
    /// The time is that of [`counter::made_at`].
    Counter {
        at: Timestamp,
    },
}

impl Origin {
    /// The origin of an id that was made about this time. An id does not tell its kind, but one of the wrong kind is off by a fortieth of
    /// the time since 2022.
    pub fn of(id: i64, about: Timestamp) -> Self {
        let (snowflake, counter) = (Snowflake::made_at(id), counter::made_at(id));
        let distance = |at: Timestamp| at.ms().abs_diff(about.ms());
        if distance(counter) < distance(snowflake) {
            Self::Counter { at: counter }
        } else {
            Self::Snowflake { at: snowflake, worker: Snowflake::worker_of(id) }
        }
    }

    pub const fn at(self) -> Timestamp {
        match self {
            Self::Snowflake { at, .. } | Self::Counter { at } => at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DAY_MS: i64 = 86_400_000;
    /// The first of January 2022 and 2026.
    const EPOCH_MS: i64 = counter::EPOCH_S * 1000;
    const YEAR_2026_MS: i64 = 1_767_225_600_000;

    proptest! {
        /// From 2026 on, ids of both kinds are recognized, even if the clocks differ by two weeks.
        #[test]
        fn kinds_are_recognized(
            at in YEAR_2026_MS..EPOCH_MS + 60 * 365 * DAY_MS,
            off in -14 * DAY_MS..14 * DAY_MS,
            low in 0..1i64 << 22,
            number in 1..u32::MAX,
        ) {
            let about = Timestamp::from_ms(at + off);
            let snowflake = ((at - EPOCH_MS) << 22) | low;
            let expected = Origin::Snowflake { at: Timestamp::from_ms(at), worker: Snowflake::worker_of(low) };
            prop_assert_eq!(Origin::of(snowflake, about), expected);
            let second = (at - EPOCH_MS) / 1000;
            let expected = Origin::Counter { at: Timestamp::from_ms(second * 1000 + EPOCH_MS) };
            prop_assert_eq!(Origin::of(counter::id(second, number), about), expected);
        }
    }
}

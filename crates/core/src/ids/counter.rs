//! Ids from a counter on a server: 31 bits of seconds since 2022-01-01 UTC, 32 bits of a counter that begins with 1 every UTC day.

use std::time::Duration;

use crate::clock::Timestamp;

/// 2022-01-01T00:00:00Z
pub const EPOCH_S: i64 = 1_640_995_200;
pub const DAY_S: i64 = 86_400;
const NUMBER_BITS: u32 = 32;

/// The second of an id was the present one at most this long before the id was made.
pub const MAX_AGE: Duration = Duration::from_secs(5);

/// The id of a second since 2022 and a number of that day.
pub const fn id(second: i64, number: u32) -> i64 {
    (second << NUMBER_BITS) | number as i64
}

/// The second at which an id was made, or at most [`MAX_AGE`] before.
pub const fn made_at(id: i64) -> Timestamp {
    Timestamp::from_ms(((id >> NUMBER_BITS) + EPOCH_S) * 1000)
}

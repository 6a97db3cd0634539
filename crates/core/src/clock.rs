//! Time is injected, so that tests own it. Milliseconds since 1970 in memory and in SQL, RFC 3339 in JSON.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type};

use crate::failpoint;

/// A moment, to the millisecond.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    pub const fn from_ms(ms: i64) -> Self {
        Self(ms)
    }

    pub const fn ms(self) -> i64 {
        self.0
    }

    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }

    #[must_use]
    pub fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }
}

/// As text: `2026-01-31T12:00:00.000Z`. Written by hand, because every answer to a buyer has two of them.
struct Text([u8; 24]);

impl Text {
    /// `None` outside the years 1970 to 9999.
    fn of(moment: Timestamp) -> Option<Self> {
        let ms = u64::try_from(moment.0).ok()?;
        let (days, ms) = (ms / 86_400_000, ms % 86_400_000);
        // Days since the first of March of the year 0, in eras of 400 years, each beginning in March: leap days come last.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
        let year = era * 400 + year;
        if year > 9999 {
            return None;
        }
        let mut text = *b"0000-00-00T00:00:00.000Z";
        let mut put = |end: usize, digits: usize, mut number: u64| {
            for place in (end - digits..end).rev() {
                text[place] += u8::try_from(number % 10).unwrap_or(0);
                number /= 10;
            }
        };
        put(4, 4, year);
        put(7, 2, month);
        put(10, 2, day);
        put(13, 2, ms / 3_600_000);
        put(16, 2, ms / 60_000 % 60);
        put(19, 2, ms / 1_000 % 60);
        put(23, 3, ms % 1_000);
        Some(Self(text))
    }

    fn as_str(&self) -> &str {
        // Digits and punctuation, as put in above.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(text) = Text::of(*self) {
            return f.write_str(text.as_str());
        }
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(moment) => write!(f, "{moment:.3}"),
            Err(_) => write!(f, "{} ms", self.0),
        }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match Text::of(*self) {
            Some(text) => serializer.serialize_str(text.as_str()),
            None => serializer.collect_str(self),
        }
    }
}

impl utoipa::PartialSchema for Timestamp {
    fn schema() -> RefOr<Schema> {
        let format = SchemaFormat::KnownFormat(KnownFormat::DateTime);
        ObjectBuilder::new().schema_type(Type::String).format(Some(format)).build().into()
    }
}

impl utoipa::ToSchema for Timestamp {}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let moment: jiff::Timestamp = text
            .parse()
            .map_err(|_| serde::de::Error::custom("expected a time with its offset, such as 2026-01-31T12:00:00Z"))?;
        Ok(Self(moment.as_millisecond()))
    }
}

/// A source of the current time.
pub trait Clock: Send + Sync + fmt::Debug {
    fn now(&self) -> Timestamp;
}

/// The clock of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        // A system clock before 1970 reads as 1970: the sale windows then say "not started", which is the safe side.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX).saturating_add(failpoint::clock_offset_ms()))
    }
}

/// A clock that changes only when it is set.
#[derive(Debug)]
pub struct ManualClock(AtomicI64);

impl ManualClock {
    pub const fn at(now: Timestamp) -> Self {
        Self(AtomicI64::new(now.0))
    }

    pub fn set(&self, now: Timestamp) {
        self.0.store(now.0, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn formatting_is_right_at_the_limits() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59.999Z"),
            (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
            (-1, "1969-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(Timestamp::from_ms(ms).to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn formatting_agrees_with_jiff(ms in 0..253_402_207_200_000_i64) {
            let by_jiff = format!("{:.3}", jiff::Timestamp::from_millisecond(ms).unwrap());
            prop_assert_eq!(Timestamp::from_ms(ms).to_string(), by_jiff);
        }
    }
}

//! Money is a whole number of cents, never a fraction.

use serde::{Deserialize, Serialize};

/// An amount of at least zero, in cents (分).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Money(i64);

impl Money {
    /// The most that one voucher may cost: 10 million yuan.
    pub const MAX: Self = Self(1_000_000_000);

    /// An amount between zero and [`Money::MAX`].
    pub const fn from_cents(cents: i64) -> Option<Self> {
        if cents >= 0 && cents <= Self::MAX.0 { Some(Self(cents)) } else { None }
    }

    pub const fn cents(self) -> i64 {
        self.0
    }
}

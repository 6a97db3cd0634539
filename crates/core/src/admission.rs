//! What the gate answers.

use crate::error::Code;
use crate::ids::{OrderId, UserId};

/// May this person have one now?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Yes: this order is marked for the buyer. It is not a promise yet; only the ledger makes it one.
    Admitted(OrderId),
    /// The buyer has one already: this.
    AlreadyHas(OrderId),
    Refused(Refusal),
}

/// Why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    SoldOut,
    NotStarted,
    Ended,
    Paused,
    NoSuchSale,
}

impl Refusal {
    pub const ALL: [Self; 5] = [Self::SoldOut, Self::NotStarted, Self::Ended, Self::Paused, Self::NoSuchSale];

    pub const fn code(self) -> Code {
        match self {
            Self::SoldOut => Code::SoldOut,
            Self::NotStarted => Code::NotStarted,
            Self::Ended => Code::Ended,
            Self::Paused => Code::Paused,
            Self::NoSuchSale => Code::NoSuchSale,
        }
    }
}

/// One number over all marks (who has which order), whatever their sequence: equal sets have equal digests, and others hardly ever.
pub fn mark_digest(marks: impl Iterator<Item = (UserId, OrderId)>) -> u64 {
    let mix = |value: i64| {
        let mut z = value.cast_unsigned().wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    marks.fold(0, |sum, (user, order)| sum.wrapping_add(mix(user.get() ^ mix(order.get()).cast_signed())))
}

//! What the gate answers.

use crate::error::Code;
use crate::ids::OrderId;

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

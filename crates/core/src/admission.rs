//! The gate's answers.

use crate::error::Code;
use crate::ids::{OrderId, UserId};

/// The answer to a request to buy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// This order is marked for the buyer. The buyer has it only once the ledger has recorded it.
    Admitted(OrderId),
    /// The buyer holds a mark for this order.
    AlreadyHas(OrderId),
    Refused(Refusal),
    /// A bound of the gate is reached. Nothing was done.
    Busy,
}

macro_rules! refusals {
    ($($name:ident,)*) => {
        /// Why a gate refuses a request to buy. Each has the [`Code`] of the same name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Refusal { $($name,)* }

        impl Refusal {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub const fn code(self) -> Code {
                match self { $(Self::$name => Code::$name,)* }
            }
        }

        $(const _: () = assert!(Code::$name.refuses_buying(), "the code of a refusal must be marked as one that refuses buying");)*
    };
}

refusals! {
    SoldOut,
    NotStarted,
    Ended,
    Paused,
    NoSuchSale,
}

/// A digest over a set of marks, independent of their sequence: equal sets have equal digests, and different sets almost never.
pub fn mark_digest(marks: impl Iterator<Item = (UserId, OrderId)>) -> u64 {
    let mix = |value: i64| {
        let mut z = value.cast_unsigned().wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    marks.fold(0, |sum, (user, order)| sum.wrapping_add(mix(user.get() ^ mix(order.get()).cast_signed())))
}

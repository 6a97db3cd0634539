//! Typed ids. An id is a positive 63-bit number; in JSON it is a string, because JavaScript cannot hold 63 bits.
//!
//! - [`Snowflake`]: ids from a leased worker number; [`counter`]: the layout of ids from a counter on a server
//! - [`Origin`]: which of the two an id is

pub mod counter;
mod origin;
mod snowflake;

pub use origin::{IdKind, Origin};
pub use snowflake::{IdGenerator, Lease, LeaseEnded, MAX_WORKERS, Snowflake, WorkerId};

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

/// A text that is not an id: not a whole number between 1 and 2^63 − 1, or not in its one spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an id: expected a whole number between 1 and 9223372036854775807")]
pub struct InvalidId;

fn schema() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[1-9][0-9]{0,18}$")).build().into()
}

fn parse(text: &str) -> Result<i64, InvalidId> {
    // One spelling per id: no sign, no leading zero, so that equal ids are equal texts.
    let canonical = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    if !canonical {
        return Err(InvalidId);
    }
    text.parse().map_err(|_| InvalidId)
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(i64);

        impl $name {
            /// The id with this number, which must be positive.
            pub const fn new(number: i64) -> Result<Self, InvalidId> {
                if number > 0 { Ok(Self(number)) } else { Err(InvalidId) }
            }

            pub const fn get(self) -> i64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                schema()
            }
        }

        impl utoipa::ToSchema for $name {}

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                parse(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(itoa::Buffer::new().format(self.0))
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

id!(SaleId);
id!(OrderId);
id!(UserId);
id!(ShopId);
id!(
    /// Shop types are few and numbered by hand.
    ShopTypeId
);
id!(VoucherId);

/// How often a sale was rebuilt. An admission of another epoch is never recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub i64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_id_has_one_spelling() {
        for bad in ["", "0", "01", "+1", "-1", " 1", "1 ", "1.0", "0x1", "１", "9223372036854775808"] {
            assert_eq!(bad.parse::<OrderId>(), Err(InvalidId), "{bad:?}");
        }
        assert_eq!("9223372036854775807".parse::<OrderId>().map(OrderId::get), Ok(i64::MAX));
    }

    proptest! {
        #[test]
        fn text_and_number_agree(n in 1..=i64::MAX) {
            let id = OrderId::new(n).unwrap();
            prop_assert_eq!(id.to_string().parse::<OrderId>(), Ok(id));
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = text.parse::<OrderId>();
        }
    }
}

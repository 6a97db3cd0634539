//! The stable codes that clients see. A code never changes its meaning; texts may.

use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What went wrong, in one stable word.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[$doc])* $name,)* }

        impl Code {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

codes! {
    InvalidRequest = "invalid_request",
    InvalidJson = "invalid_json",
    NotFound = "not_found",
    MethodNotAllowed = "method_not_allowed",
    RequestTimeout = "request_timeout",
    PayloadTooLarge = "payload_too_large",
    UnsupportedMediaType = "unsupported_media_type",
    Unauthorized = "unauthorized",
    /// Known, but not allowed to do this.
    Forbidden = "forbidden",
    WrongCode = "wrong_code",
    /// A puzzle must be solved before a code is sent.
    ProofRequired = "proof_required",
    AccountDisabled = "account_disabled",
    TooManyRequests = "too_many_requests",
    NoSuchSale = "no_such_sale",
    NoSuchOrder = "no_such_order",
    NoSuchSession = "no_such_session",
    NoSuchUser = "no_such_user",
    NoSuchShop = "no_such_shop",
    NoSuchVoucher = "no_such_voucher",
    NoSuchShopType = "no_such_shop_type",
    SoldOut = "sold_out",
    NotStarted = "not_started",
    Ended = "ended",
    Paused = "paused",
    /// The order or sale cannot take this step from where it is.
    IllegalStep = "illegal_step",
    /// The voucher has a sale already.
    SaleExists = "sale_exists",
    /// The same request id came with another content.
    RequestIdReused = "request_id_reused",
    /// The database still rejects a quarantined order.
    NotRecordable = "not_recordable",
    /// A bound is reached: try again soon; nothing was done.
    Busy = "busy",
    /// A part we need does not answer; nothing was done.
    Unavailable = "unavailable",
    /// We could not find out in time. Ask again: if the order was made, the answer is that order.
    OutcomeUnknown = "outcome_unknown",
    Internal = "internal",
}

impl utoipa::PartialSchema for Code {
    fn schema() -> RefOr<Schema> {
        let words = Self::ALL.iter().map(|code| code.as_str());
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words)).build().into()
    }
}

impl ToSchema for Code {}

/// One member of a request that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Invalid {
    pub member: &'static str,
    pub detail: String,
}

impl Invalid {
    pub fn new(member: &'static str, detail: impl Into<String>) -> Self {
        Self { member, detail: detail.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_are_distinct_words() {
        let words: HashSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
        assert!(words.iter().all(|word| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
    }
}

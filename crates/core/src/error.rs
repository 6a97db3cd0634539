//! The refusals that clients see, in one table.
//!
//! To add a refusal, add a row to `codes!`. Its HTTP status, its titles, its `Retry-After` header, its place in the OpenAPI document and
//! its counter among the answers to buying all come from that row. A refusal of the gate is also a name in `refusals!`
//! ([`crate::admission`]).

use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

/// A row of the table below.
struct Row {
    word: &'static str,
    status: u16,
    retry: bool,
    buying: bool,
    english: &'static str,
    chinese: &'static str,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = ($word:literal, $status:literal, $retry:literal, $buying:literal, $english:literal, $chinese:literal),)*) => {
        /// Why a request is refused, as a stable word. A code never changes its meaning; its titles may change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[$doc])* $name,)* }

        impl Code {
            /// All codes, in the order of their discriminants.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            const fn row(self) -> &'static Row {
                match self {
                    $(Self::$name => &Row {
                        word: $word,
                        status: $status,
                        retry: $retry,
                        buying: $buying,
                        english: $english,
                        chinese: $chinese,
                    },)*
                }
            }
        }
    };
}

codes! {
    // Columns: word, HTTP status, whether the client should retry, whether buying can be refused with it, English title, Chinese title.
    InvalidRequest = ("invalid_request", 400, false, true, "The request is not valid", "请求无效"),
    InvalidJson = ("invalid_json", 400, false, false, "The body is not valid JSON", "请求体不是有效的 JSON"),
    NotFound = ("not_found", 404, false, false, "Not found", "资源不存在"),
    MethodNotAllowed = ("method_not_allowed", 405, false, false, "This method is not allowed here", "不支持该请求方法"),
    RequestTimeout = ("request_timeout", 408, false, false, "The request took too long to arrive", "请求接收超时"),
    PayloadTooLarge = ("payload_too_large", 413, false, false, "The body is too large", "请求体过大"),
    UnsupportedMediaType = ("unsupported_media_type", 415, false, false, "The body must be application/json", "请求体必须为 application/json"),
    /// The request has no valid token.
    Unauthorized = ("unauthorized", 401, false, true, "Please log in", "请先登录"),
    /// The token is valid, but its role does not allow this.
    Forbidden = ("forbidden", 403, false, false, "You are not allowed to do this", "没有权限执行此操作"),
    WrongCode = ("wrong_code", 422, false, false, "The code is wrong or has expired", "验证码错误或已过期"),
    /// A puzzle must be solved before a login code is sent.
    ProofRequired = ("proof_required", 422, false, false, "Solve a puzzle from /v1/login/puzzle first", "请先完成 /v1/login/puzzle 的计算验证"),
    AccountDisabled = ("account_disabled", 403, false, false, "This account is disabled", "该账号已停用"),
    TooManyRequests = ("too_many_requests", 429, true, true, "Too many requests; please wait", "请求过于频繁，请稍候"),
    NoSuchSale = ("no_such_sale", 404, false, true, "There is no such sale", "活动不存在"),
    NoSuchOrder = ("no_such_order", 404, false, false, "There is no such order", "订单不存在"),
    NoSuchSession = ("no_such_session", 404, false, false, "There is no such session", "会话不存在"),
    NoSuchUser = ("no_such_user", 404, false, false, "There is no such user", "用户不存在"),
    NoSuchShop = ("no_such_shop", 404, false, false, "There is no such shop", "店铺不存在"),
    NoSuchVoucher = ("no_such_voucher", 404, false, false, "There is no such voucher", "优惠券不存在"),
    NoSuchShopType = ("no_such_shop_type", 404, false, false, "There is no such shop type", "店铺类型不存在"),
    SoldOut = ("sold_out", 409, false, true, "Sold out", "已售罄"),
    NotStarted = ("not_started", 409, false, true, "The sale has not started yet", "活动尚未开始"),
    Ended = ("ended", 409, false, true, "The sale has ended", "活动已结束"),
    Paused = ("paused", 409, false, true, "The sale is paused", "活动已暂停"),
    /// The buyer's order in this sale has ended, and nobody may buy again in it.
    BoughtBefore = ("bought_before", 409, false, true, "You have already bought in this sale", "您已在本次活动中下过单，不能再次购买"),
    /// The order, sale or voucher cannot make this transition from its present state.
    IllegalStep = ("illegal_step", 409, false, false, "This cannot be done in the present state", "当前状态不允许此操作"),
    /// The voucher already has a sale.
    SaleExists = ("sale_exists", 409, false, false, "This voucher already has a sale", "该券已有活动"),
    /// The same request id came with different content.
    RequestIdReused = ("request_id_reused", 409, false, false, "This request id was used for something else", "该请求编号已用于其他操作"),
    /// The database still rejects a quarantined order.
    NotRecordable = ("not_recordable", 409, false, false, "The database still rejects this order; it stays in quarantine", "数据库仍拒绝该订单，订单保留在隔离区"),
    /// A limit on concurrent work is reached. Nothing was done.
    Busy = ("busy", 503, true, true, "Very busy; please try again", "系统繁忙，请重试"),
    /// A dependency does not answer. Nothing was done.
    Unavailable = ("unavailable", 503, true, true, "Not available right now; please try again", "服务暂不可用，请重试"),
    /// The outcome was not known in time. A retry of buying returns the order if it was created.
    OutcomeUnknown = ("outcome_unknown", 503, true, true, "The outcome is not known yet; please ask again", "结果尚未确定，请再次查询"),
    Internal = ("internal", 500, false, true, "Internal server error", "服务器内部错误"),
}

impl Code {
    pub const fn as_str(self) -> &'static str {
        self.row().word
    }

    pub const fn http_status(self) -> u16 {
        self.row().status
    }

    /// Whether the response tells the client when to retry.
    pub const fn is_retryable(self) -> bool {
        self.row().retry
    }

    /// Whether an attempt to buy can be refused with this code.
    pub const fn refuses_buying(self) -> bool {
        self.row().buying
    }

    pub const fn title_en(self) -> &'static str {
        self.row().english
    }

    pub const fn title_zh(self) -> &'static str {
        self.row().chinese
    }
}

impl utoipa::PartialSchema for Code {
    fn schema() -> RefOr<Schema> {
        let words = Self::ALL.iter().map(|code| code.as_str());
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words)).build().into()
    }
}

impl ToSchema for Code {}

/// A member of a request that is not valid.
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
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn codes_are_distinct_words() {
        let words: HashSet<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
        assert!(words.iter().all(|word| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
    }

    #[test]
    fn every_code_has_an_error_status_and_two_titles() {
        for (n, &code) in Code::ALL.iter().enumerate() {
            assert_eq!(code as usize, n);
            assert!((400..600).contains(&code.http_status()), "{code:?}");
            assert!(code.title_en().is_ascii() && !code.title_zh().is_ascii(), "{code:?}");
        }
    }
}

//! Every no, as `application/problem+json` (RFC 9457) with a stable code.
//!
//! A handler returns a [`Problem`]; the text is put in on the way out, where the request's language is known.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{ACCEPT_LANGUAGE, CONTENT_LANGUAGE, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use stampede_core::{Code, Invalid};
use stampede_engine::Error;
use utoipa::ToSchema;

#[derive(Debug, Clone)]
pub struct Problem {
    code: Code,
    /// What in particular is wrong with this request; in English.
    detail: Option<String>,
    errors: Vec<Invalid>,
    retry_after: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    English,
    Chinese,
}

impl Language {
    /// The first of our languages that the client names.
    pub fn of(headers: &HeaderMap) -> Self {
        let wanted = headers.get(ACCEPT_LANGUAGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let first = wanted.split(',').map(str::trim).find(|tag| tag.starts_with("zh") || tag.starts_with("en"));
        if first.is_some_and(|tag| tag.starts_with("zh")) { Self::Chinese } else { Self::English }
    }
}

/// Status, English title, Chinese title.
const fn texts(code: Code) -> (StatusCode, &'static str, &'static str) {
    use StatusCode as S;
    match code {
        Code::InvalidRequest => (S::BAD_REQUEST, "The request is not valid", "请求无效"),
        Code::InvalidJson => (S::BAD_REQUEST, "The body is not valid JSON", "请求体不是有效的 JSON"),
        Code::NotFound => (S::NOT_FOUND, "There is nothing here", "资源不存在"),
        Code::MethodNotAllowed => (S::METHOD_NOT_ALLOWED, "This method is not allowed here", "不支持该请求方法"),
        Code::RequestTimeout => (S::REQUEST_TIMEOUT, "The request took too long to arrive", "请求接收超时"),
        Code::PayloadTooLarge => (S::PAYLOAD_TOO_LARGE, "The body is too large", "请求体过大"),
        Code::UnsupportedMediaType => {
            (S::UNSUPPORTED_MEDIA_TYPE, "The body must be application/json", "请求体必须为 application/json")
        }
        Code::Unauthorized => (S::UNAUTHORIZED, "Please log in", "请先登录"),
        Code::Forbidden => (S::FORBIDDEN, "You are not allowed to do this", "没有权限执行此操作"),
        Code::WrongCode => (S::UNPROCESSABLE_ENTITY, "The code is wrong or has expired", "验证码错误或已过期"),
        Code::ProofRequired => (
            S::UNPROCESSABLE_ENTITY,
            "Solve a puzzle from /v1/login/puzzle first",
            "请先完成 /v1/login/puzzle 的计算验证",
        ),
        Code::AccountDisabled => (S::FORBIDDEN, "This account is disabled", "该账号已停用"),
        Code::TooManyRequests => (S::TOO_MANY_REQUESTS, "Too many requests; please wait", "请求过于频繁，请稍候"),
        Code::NoSuchSale => (S::NOT_FOUND, "There is no such sale", "活动不存在"),
        Code::NoSuchOrder => (S::NOT_FOUND, "There is no such order", "订单不存在"),
        Code::NoSuchSession => (S::NOT_FOUND, "There is no such session", "会话不存在"),
        Code::NoSuchUser => (S::NOT_FOUND, "There is no such user", "用户不存在"),
        Code::NoSuchShop => (S::NOT_FOUND, "There is no such shop", "店铺不存在"),
        Code::NoSuchVoucher => (S::NOT_FOUND, "There is no such voucher", "优惠券不存在"),
        Code::NoSuchShopType => (S::NOT_FOUND, "There is no such shop type", "店铺类型不存在"),
        Code::SoldOut => (S::CONFLICT, "Sold out", "已售罄"),
        Code::NotStarted => (S::CONFLICT, "The sale has not started yet", "活动尚未开始"),
        Code::Ended => (S::CONFLICT, "The sale has ended", "活动已结束"),
        Code::Paused => (S::CONFLICT, "The sale is paused", "活动已暂停"),
        Code::IllegalStep => (S::CONFLICT, "This cannot be done in the present state", "当前状态不允许此操作"),
        Code::SaleExists => (S::CONFLICT, "This voucher has a sale already", "该券已有活动"),
        Code::RequestIdReused => {
            (S::CONFLICT, "This request id was used for something else", "该请求编号已用于其他操作")
        }
        Code::NotRecordable => (
            S::CONFLICT,
            "The database still rejects this order; it stays in quarantine",
            "数据库仍拒绝该订单，订单保留在隔离区",
        ),
        Code::Busy => (S::SERVICE_UNAVAILABLE, "Very busy; please try again", "系统繁忙，请重试"),
        Code::Unavailable => {
            (S::SERVICE_UNAVAILABLE, "Not available right now; please try again", "服务暂不可用，请重试")
        }
        Code::OutcomeUnknown => {
            (S::SERVICE_UNAVAILABLE, "Not known yet; ask again to see whether you have it", "结果尚未确定，请再次查询")
        }
        Code::Internal => (S::INTERNAL_SERVER_ERROR, "Something went wrong on our side", "服务器内部错误"),
    }
}

impl Problem {
    pub fn new(code: Code) -> Self {
        let later = matches!(code, Code::Busy | Code::Unavailable | Code::OutcomeUnknown | Code::TooManyRequests);
        Self { code, detail: None, errors: Vec::new(), retry_after: later.then_some(Duration::from_secs(1)) }
    }

    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    pub fn invalid(member: &'static str, detail: impl Into<String>) -> Self {
        Self { errors: vec![Invalid::new(member, detail)], ..Self::new(Code::InvalidRequest) }
    }

    pub const fn code(&self) -> Code {
        self.code
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let code = error.code();
        let mut problem = Self::new(code);
        match error {
            Error::Invalid(errors) => problem.errors = errors,
            Error::Illegal(reason) => problem.detail = Some(reason),
            Error::Limited { wait } => problem.retry_after = Some(wait),
            // Only operators see it.
            Error::NotRecordable(said) => problem.detail = Some(said),
            Error::Ledger(_) | Error::Gate(_) | Error::Sender(_) => {
                // The public text says what to do; the cause is for the log alone.
                tracing::error!(error = &error as &dyn std::error::Error, code = code.as_str(), "a request failed");
            }
            Error::Refused(_) | Error::Plain(_) | Error::Busy | Error::OutcomeUnknown => {}
        }
        problem
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = texts(self.code).0.into_response();
        if let Some(wait) = self.retry_after {
            // Whole seconds, rounded up: who waits that long has waited long enough.
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.code == Code::Unauthorized {
            let challenge = HeaderValue::from_static("Bearer realm=\"stampede\"");
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response.extensions_mut().insert(Box::new(self));
        response
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(crate) struct Document<'a> {
    #[schema(pattern = "^urn:stampede:[a-z_]+$")]
    r#type: String,
    /// In English or Chinese, after `Accept-Language`.
    title: &'a str,
    status: u16,
    #[schema(value_type = Code)]
    code: &'a str,
    /// What in particular is wrong with this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    #[schema(value_type = Vec<Invalid>, required = false)]
    errors: &'a [Invalid],
}

/// Puts the text of a problem into its response. An answer that is none of ours (a bare 404 or 405 of the router) gets one too.
pub(crate) fn render(mut response: Response, language: Language) -> Response {
    let problem = match response.extensions_mut().remove::<Box<Problem>>() {
        Some(problem) => *problem,
        None if response.status() == StatusCode::METHOD_NOT_ALLOWED => Problem::new(Code::MethodNotAllowed),
        None => return response,
    };
    let (status, english, chinese) = texts(problem.code);
    let (title, tag) = match language {
        Language::English => (english, "en"),
        Language::Chinese => (chinese, "zh-CN"),
    };
    let code = problem.code.as_str();
    let document = Document {
        r#type: format!("urn:stampede:{code}"),
        title,
        status: status.as_u16(),
        code,
        detail: problem.detail.as_deref(),
        errors: &problem.errors,
    };
    // Plain strings and numbers: serialising them cannot fail.
    let body = serde_json::to_vec(&document).unwrap_or_default();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CONTENT_LANGUAGE, HeaderValue::from_static(tag));
    headers.remove(axum::http::header::CONTENT_LENGTH);
    *response.body_mut() = Body::from(body);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_no_for_a_status_and_two_texts() {
        for &code in Code::ALL {
            let (status, english, chinese) = texts(code);
            assert!(status.is_client_error() || status.is_server_error(), "{code:?}");
            assert!(english.is_ascii() && !chinese.is_ascii(), "{code:?}");
        }
    }

    #[test]
    fn the_first_language_we_speak_is_taken() {
        let of = |text: &'static str| {
            Language::of(&HeaderMap::from_iter([(ACCEPT_LANGUAGE, HeaderValue::from_static(text))]))
        };
        assert_eq!(of("zh-CN,zh;q=0.9,en;q=0.8"), Language::Chinese);
        assert_eq!(of("fr, zh-TW;q=0.7"), Language::Chinese);
        assert_eq!(of("en-GB,zh"), Language::English);
        assert_eq!(of("fr"), Language::English);
        assert_eq!(Language::of(&HeaderMap::new()), Language::English);
    }
}

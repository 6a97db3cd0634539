//! Refusals as `application/problem+json` (RFC 9457) with a stable code. Statuses and titles are in the table of [`Code`].
//!
//! A handler returns a [`Problem`]; its body is written by `render`, where the language of the request is known. Bodies without details are
//! made once, and a refusal to buy is answered with one of them (`refusal`).

use std::sync::LazyLock;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{ACCEPT_LANGUAGE, CONTENT_LANGUAGE, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use stampede_core::{Code, Invalid, Refusal};
use stampede_engine::Error;
use utoipa::ToSchema;

#[derive(Debug, Clone)]
pub struct Problem {
    code: Code,
    /// What exactly is wrong with this request, in English.
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
    /// The first supported language in `Accept-Language`.
    pub fn of(headers: &HeaderMap) -> Self {
        let accepted = headers.get(ACCEPT_LANGUAGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let first = accepted.split(',').map(str::trim).find(|tag| tag.starts_with("zh") || tag.starts_with("en"));
        if first.is_some_and(|tag| tag.starts_with("zh")) { Self::Chinese } else { Self::English }
    }

    const fn tag(self) -> HeaderValue {
        match self {
            Self::English => HeaderValue::from_static("en"),
            Self::Chinese => HeaderValue::from_static("zh-CN"),
        }
    }
}

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// The bodies of problems without details, by discriminant of [`Code`]: English, Chinese.
static PREPARED: LazyLock<Vec<[Bytes; 2]>> = LazyLock::new(|| {
    let body = |code: Code, language| Bytes::from(Problem::new(code).to_json(language));
    Code::ALL.iter().map(|&code| [body(code, Language::English), body(code, Language::Chinese)]).collect()
});

/// The body of a problem without details. Nothing is allocated.
fn prepared(code: Code, language: Language) -> Bytes {
    let [english, chinese] = &PREPARED[code as usize];
    match language {
        Language::English => english.clone(),
        Language::Chinese => chinese.clone(),
    }
}

/// The answer to a buyer who is refused. Most of a crowd gets one, so it is assembled from what is there already.
pub(crate) fn refusal(refusal: Refusal, language: Language) -> Response {
    let code = refusal.code();
    let mut response = Response::new(Body::from(prepared(code, language)));
    *response.status_mut() = status_of(code);
    let headers = response.headers_mut();
    // Room for these two and for the headers that every response gets.
    headers.reserve(8);
    headers.insert(CONTENT_TYPE, PROBLEM_JSON);
    headers.insert(CONTENT_LANGUAGE, language.tag());
    response
}

fn status_of(code: Code) -> StatusCode {
    StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

impl Problem {
    pub fn new(code: Code) -> Self {
        let retry_after = code.is_retryable().then_some(Duration::from_secs(1));
        Self { code, detail: None, errors: Vec::new(), retry_after }
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

    fn body(&self, language: Language) -> Bytes {
        if self.detail.is_none() && self.errors.is_empty() {
            prepared(self.code, language)
        } else {
            Bytes::from(self.to_json(language))
        }
    }

    pub(crate) fn to_json(&self, language: Language) -> Vec<u8> {
        let code = self.code.as_str();
        let document = Document {
            r#type: format!("urn:stampede:{code}"),
            title: match language {
                Language::English => self.code.title_en(),
                Language::Chinese => self.code.title_zh(),
            },
            status: self.code.http_status(),
            code,
            detail: self.detail.as_deref(),
            errors: &self.errors,
        };
        // Serializing plain strings and numbers does not fail.
        serde_json::to_vec(&document).unwrap_or_default()
    }
}

/// Whether the conversion into a [`Problem`] logs this error: the title tells the client what to do, and the cause is for the log alone.
pub(crate) const fn is_logged(error: &Error) -> bool {
    // A tier logs by itself when its gate cannot be used, once and not for every request.
    matches!(error, Error::Ledger(_) | Error::Sender(_))
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let code = error.code();
        if is_logged(&error) {
            tracing::error!(error = &error as &dyn std::error::Error, code = code.as_str(), "request failed");
        }
        let mut problem = Self::new(code);
        match error {
            Error::Invalid(errors) => problem.errors = errors,
            Error::Illegal(reason) => problem.detail = Some(reason),
            Error::Limited { wait } => problem.retry_after = Some(wait),
            // Only operators get this refusal.
            Error::NotRecordable(cause) => problem.detail = Some(cause),
            Error::Refused(_)
            | Error::Plain(_)
            | Error::Busy
            | Error::OutcomeUnknown
            | Error::Unready(_)
            | Error::Ledger(_)
            | Error::Gate(_)
            | Error::Sender(_) => {}
        }
        problem
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = status_of(self.code).into_response();
        if let Some(wait) = self.retry_after {
            // Whole seconds, rounded up, so that a retry is not too early.
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
    /// In English or Chinese, depending on `Accept-Language`.
    title: &'a str,
    status: u16,
    #[schema(value_type = Code)]
    code: &'a str,
    /// What exactly is wrong with this request.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    #[schema(value_type = Vec<Invalid>, required = false)]
    errors: &'a [Invalid],
}

/// Writes the body of a problem. A 405 of the router has no problem yet and gets one.
pub(crate) fn render(mut response: Response, language: Language) -> Response {
    let problem = match response.extensions_mut().remove::<Box<Problem>>() {
        Some(problem) => *problem,
        None if response.status() == StatusCode::METHOD_NOT_ALLOWED => Problem::new(Code::MethodNotAllowed),
        None => return response,
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, PROBLEM_JSON);
    headers.insert(CONTENT_LANGUAGE, language.tag());
    headers.remove(axum::http::header::CONTENT_LENGTH);
    *response.body_mut() = Body::from(problem.body(language));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_supported_language_is_used() {
        let of = |text: &'static str| {
            Language::of(&HeaderMap::from_iter([(ACCEPT_LANGUAGE, HeaderValue::from_static(text))]))
        };
        assert_eq!(of("zh-CN,zh;q=0.9,en;q=0.8"), Language::Chinese);
        assert_eq!(of("fr, zh-TW;q=0.7"), Language::Chinese);
        assert_eq!(of("en-GB,zh"), Language::English);
        assert_eq!(of("fr"), Language::English);
        assert_eq!(Language::of(&HeaderMap::new()), Language::English);
    }

    #[test]
    fn refusals_to_buy_are_prepared_in_both_languages() {
        for &reason in Refusal::ALL {
            let code = reason.code();
            assert!(!code.is_retryable() && code != Code::Unauthorized, "{code:?} needs further headers");
            for (language, tag) in [(Language::English, "en"), (Language::Chinese, "zh-CN")] {
                let problem = Problem::new(code);
                assert_eq!(problem.body(language), problem.to_json(language));
                assert_eq!(prepared(code, language).as_ptr(), prepared(code, language).as_ptr(), "made once");
                let rendered = render(problem.into_response(), language);
                let response = refusal(reason, language);
                assert_eq!(response.status(), rendered.status());
                assert_eq!(response.headers(), rendered.headers());
                assert_eq!(response.headers()[CONTENT_LANGUAGE], tag);
            }
        }
        let detailed = Problem::new(Code::SoldOut).detail("more");
        assert_eq!(detailed.body(Language::English), detailed.to_json(Language::English), "details are not lost");
    }
}

//! Cross-origin requests: allowed only for configured origins, and only to buyers' routes.

use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use axum::response::{IntoResponse as _, Response};

/// The origin of the request, if its pages may read the response.
pub(crate) fn allowed_origin<B>(request: &Request<B>, origins: &[HeaderValue]) -> Option<HeaderValue> {
    let origin = request.headers().get(ORIGIN)?;
    let allowed = request.uri().path().starts_with("/v1/") && origins.contains(origin);
    allowed.then(|| origin.clone())
}

/// The response to a preflight request.
pub(crate) fn preflight<B>(request: &Request<B>) -> Option<Response> {
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    is_preflight.then(|| {
        let mut response = StatusCode::NO_CONTENT.into_response();
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
        let names = HeaderValue::from_static("accept-language, authorization, content-type");
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names);
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        response
    })
}

pub(crate) fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("location, retry-after, x-request-id"));
    headers.append(VARY, HeaderValue::from_static("origin"));
}

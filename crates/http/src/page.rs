//! The page at `/`.

use axum::http::HeaderName;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY};
use axum::response::IntoResponse;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn asset(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers: [(HeaderName, &str); 4] = [
        (CONTENT_TYPE, kind),
        (CACHE_CONTROL, "public, max-age=60"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text)
}

pub(crate) async fn index() -> impl IntoResponse {
    asset("text/html; charset=utf-8", include_str!("../../../web/index.html"))
}

pub(crate) async fn script() -> impl IntoResponse {
    asset("text/javascript; charset=utf-8", include_str!("../../../web/app.js"))
}

pub(crate) async fn style() -> impl IntoResponse {
    asset("text/css; charset=utf-8", include_str!("../../../web/style.css"))
}

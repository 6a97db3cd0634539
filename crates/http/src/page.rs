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

const SCRIPT: &str = include_str!("../../../web/app.js");

pub(crate) async fn script() -> impl IntoResponse {
    asset("text/javascript; charset=utf-8", SCRIPT)
}

pub(crate) async fn style() -> impl IntoResponse {
    asset("text/css; charset=utf-8", include_str!("../../../web/style.css"))
}

#[cfg(test)]
mod tests {
    use stampede_core::{OrderStatus, SaleState};

    use super::*;

    /// The page has words for every state of a sale and of an order, in both languages.
    #[test]
    fn the_page_has_words_for_every_state() {
        let tables: Vec<&str> = SCRIPT.split("state: {").skip(1).filter_map(|rest| rest.split('}').next()).collect();
        assert_eq!(tables.len(), 2, "one table for each language");
        for state in SaleState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        let sales = SaleState::ALL.iter().map(|state| state.as_str());
        for word in sales.chain(OrderStatus::ALL.iter().map(|status| status.as_str())) {
            assert!(
                tables.iter().all(|table| table.contains(&format!(" {word}: "))),
                "web/app.js has no words for {word}"
            );
        }
    }
}

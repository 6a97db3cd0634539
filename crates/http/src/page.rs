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
    use stampede_core::{Actor, OrderStatus, SaleState, StepReason};

    use super::*;

    /// Checks that the table `name` of each language has an entry for every one of these values.
    fn assert_has_words(name: &str, values: &[&str]) {
        let start = format!(" {name}: {{");
        let rest_of_tables = SCRIPT.split(start.as_str()).skip(1);
        let tables: Vec<&str> = rest_of_tables.filter_map(|rest| rest.split('}').next()).collect();
        assert_eq!(tables.len(), 2, "one table {name} for each language");
        for value in values {
            assert!(
                tables.iter().all(|table| table.contains(&format!(" {value}: "))),
                "web/app.js has no words for {name} {value}"
            );
        }
    }

    /// The page has words for every state of a sale and of an order, in both languages.
    #[test]
    fn the_page_has_words_for_every_state() {
        for state in SaleState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        let sales = SaleState::ALL.iter().map(|state| state.as_str());
        let orders = OrderStatus::ALL.iter().map(|status| status.as_str());
        assert_has_words("state", &sales.chain(orders).collect::<Vec<_>>());
    }

    /// The page has words for everything that the history of an order can say, in both languages.
    #[test]
    fn the_page_has_words_for_every_step_of_an_order() {
        assert_has_words("reason", &StepReason::ALL.iter().map(|reason| reason.as_str()).collect::<Vec<_>>());
        assert_has_words("actor", &Actor::ALL.iter().map(|actor| actor.as_str()).collect::<Vec<_>>());
    }

    /// The page orders the states of an order by rank, so that an old one does not replace a new one.
    #[test]
    fn every_step_of_an_order_leads_to_a_higher_rank() {
        let (_, rest) = SCRIPT.split_once("const RANK = {").unwrap();
        let (table, _) = rest.split_once('}').unwrap();
        let rank = |status: OrderStatus| {
            let name = format!(" {}: ", status.as_str());
            let (_, rest) = table.split_once(name.as_str()).unwrap_or_else(|| panic!("no rank for {status:?}"));
            rest.split(',').next().unwrap().parse::<u32>().unwrap()
        };
        for &from in OrderStatus::ALL {
            for &to in OrderStatus::ALL {
                assert!(!from.may_become(to) || rank(from) < rank(to), "{from:?} → {to:?}");
            }
        }
    }
}

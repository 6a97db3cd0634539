//! Buying, from the request to the response.
//!
//! Nearly all requests of a sale are attempts to buy. [`match_path`] recognizes them before the router does, and the service calls
//! [`handle`] directly: the fast path. The routed handler [`buy`] gets what the fast path does not recognize, such as an id with
//! percent-encoded digits, and calls [`handle`] too. Timeouts, limits, metrics and logs are the same for both.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use metrics::{Counter, counter};
use stampede_core::{Code, SaleId, UserId};
use stampede_engine::{Bought, Error};
use stampede_limit::rate_limit_key;
use tokio::time::timeout;
use tracing::Span;

use crate::app::App;
use crate::extract::{ClientAddress, RequestId, parse_id, verified_token};
use crate::orders::{OrderResponse, PendingOrderResponse};
use crate::problem::{self, Language, Problem, is_logged};

/// The path of [`buy`], as it is named in metrics and in the OpenAPI document.
pub(crate) const PATH: &str = "/v1/sales/{id}/orders";

/// The sale that a request buys from, if the request is an attempt to buy in its usual form.
pub(crate) fn match_path(method: &Method, uri: &Uri) -> Option<SaleId> {
    let path = uri.path().strip_prefix("/v1/sales/")?;
    path.strip_suffix("/orders")?.parse().ok().filter(|_| method == Method::POST)
}

/// Buys one item of a sale. A repeated request returns the same order.
#[utoipa::path(post, path = "/v1/sales/{id}/orders", tag = "orders", responses((status = 201, description = "Order created and committed", body = OrderResponse), (status = 200, description = "The buyer already had this order", body = OrderResponse), (status = 202, description = "Order accepted, in the tiers `queued` and `shielded`: safe in the queue, and not yet in the ledger. `Location` tells where to ask for it", body = PendingOrderResponse)), security(("buyer" = [])))]
pub(crate) async fn buy(
    State(app): State<Arc<App>>,
    ClientAddress(client): ClientAddress,
    RequestId(id): RequestId,
    sale: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let language = Language::of(request.headers());
    let sale = parse_id(sale).map_err(|invalid| Error::Invalid(vec![invalid]));
    handle(&app, request, client, &id, language, sale).await
}

/// Answers an attempt to buy. `id` names the request in the log.
pub(crate) async fn handle<B>(
    app: &App,
    request: Request<B>,
    client: IpAddr,
    id: &str,
    language: Language,
    sale: Result<SaleId, Error>,
) -> Response {
    let started = Instant::now();
    let sale_id = sale.as_ref().ok().copied();
    let bought = try_buy(app, request, client, sale).await;
    app.buy_metrics.count(bought.as_ref().map(|(_, bought)| bought));
    let response = match bought.and_then(|(sale, bought)| respond(sale, &bought)) {
        Ok(response) => response,
        Err(Error::Refused(refusal)) => problem::refusal(refusal, language),
        Err(error) => {
            let span = if is_logged(&error) { error_span(id, sale_id) } else { Span::none() };
            span.in_scope(|| Problem::from(error)).into_response()
        }
    };
    app.http_metrics.buying.record(started.elapsed());
    response
}

/// The span of log lines about a failed attempt. Made only when there is a line to log: on the fast path the span of the request is
/// disabled unless debug logs are enabled.
pub(crate) fn error_span(id: &str, sale: Option<SaleId>) -> Span {
    tracing::error_span!("buy", id, sale = sale.map(tracing::field::display))
}

async fn try_buy<B>(
    app: &App,
    request: Request<B>,
    client: IpAddr,
    sale: Result<SaleId, Error>,
) -> Result<(SaleId, Bought), Error> {
    let user =
        timeout(app.config.answer_timeout, authenticate(app, request.headers(), client, sale.as_ref().ok())).await;
    let user = user.unwrap_or(Err(Error::Plain(Code::Unavailable)))?;
    // Frees the connection's read buffer before the wait for the ledger.
    drop(request);
    // The engine has a timeout of its own.
    let sale = sale?;
    Ok((sale, app.engine.buy(sale, user).await?))
}

/// The user of the request's token, within the limits of the address and of the user. The counts of this node are checked before the
/// session is read: a genuine token whose session has ended is limited too, before it reaches the ledger.
async fn authenticate(app: &App, headers: &HeaderMap, client: IpAddr, sale: Option<&SaleId>) -> Result<UserId, Error> {
    let limited = |wait| Error::Limited { wait };
    // Before the token is read, so that attempts with wrong tokens are limited too.
    let by_address = app.limits.buy_per_address.count_local(rate_limit_key(client)).map_err(limited)?;
    let proven = match verified_token(headers, app) {
        Ok(proven) => proven,
        Err(error) => {
            by_address.count_shared().await.map_err(limited)?;
            return Err(error);
        }
    };
    // An attempt that this node refuses because of its user counts against the address on this node only.
    let by_user = app.limits.buy_per_user.count_local(proven.user).map_err(limited)?;
    // Nothing before this asks Redis or the ledger, so that a crowd which comes too late or too early costs them nothing.
    if let Some(refusal) = sale.and_then(|&sale| app.engine.local_refusal(sale, proven.user)) {
        return Err(Error::Refused(refusal));
    }
    // Before the session is read: while the gate does not answer, reading it may take long, or burden the database.
    app.engine.can_buy()?;
    let user = app.engine.authenticate(proven).await;
    // Attempts whose session has ended are counted over all nodes too: above the limit, each node refuses the next ones by itself.
    by_address.count_shared_with(by_user).await.map_err(limited)?;
    user
}

fn respond(sale: SaleId, bought: &Bought) -> Result<Response, Error> {
    let mut body = Vec::with_capacity(256);
    let (status, written) = match bought {
        Bought::Created(order) => {
            (StatusCode::CREATED, serde_json::to_writer(&mut body, &OrderResponse::new(order, Some(false))))
        }
        Bought::Already(order) => {
            (StatusCode::OK, serde_json::to_writer(&mut body, &OrderResponse::new(order, Some(true))))
        }
        Bought::Accepted { id, already } => {
            let pending = PendingOrderResponse::new(*id, sale, Some(*already));
            (StatusCode::ACCEPTED, serde_json::to_writer(&mut body, &pending))
        }
    };
    // Serializing numbers and fixed words does not fail. If it did, the order would exist all the same.
    written.map_err(|_| Error::OutcomeUnknown)?;
    let location = match bought {
        Bought::Created(order) | Bought::Already(order) => format!("/v1/orders/{}", order.id),
        // An order that is not in the ledger yet is found by its sale.
        Bought::Accepted { id, .. } => format!("/v1/orders/{id}?sale={sale}"),
    };
    let location = HeaderValue::try_from(location).ok();
    Ok(json_response(status, Body::from(body), location))
}

/// The response to an order, and to the no-op of a load test.
pub(crate) fn json_response(status: StatusCode, body: Body, location: Option<HeaderValue>) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    // Room for these two and for the headers that every response gets.
    headers.reserve(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(location) = location {
        headers.insert(LOCATION, location);
    }
    response
}

/// Counters of the answers to buying. Created once: looking up a counter by name costs more than the rest of the path.
#[derive(Debug)]
pub(crate) struct BuyMetrics {
    created: Counter,
    accepted: Counter,
    already: Counter,
    /// By discriminant of [`Code`]. Those that refuse buying are registered from the start.
    refused: Vec<OnceLock<Counter>>,
}

fn answer_counter(answer: &'static str) -> Counter {
    counter!("stampede_buy_answers_total", "answer" => answer)
}

impl BuyMetrics {
    pub(crate) fn new() -> Self {
        let refusal = |code: &Code| match code.refuses_buying() {
            true => OnceLock::from(answer_counter(code.as_str())),
            false => OnceLock::new(),
        };
        let refused = Code::ALL.iter().map(refusal).collect();
        Self {
            created: answer_counter("created"),
            accepted: answer_counter("accepted"),
            already: answer_counter("already"),
            refused,
        }
    }

    fn count(&self, bought: Result<&Bought, &Error>) {
        match bought {
            Ok(Bought::Created(_)) => self.created.increment(1),
            Ok(Bought::Accepted { .. }) => self.accepted.increment(1),
            Ok(Bought::Already(_)) => self.already.increment(1),
            Err(error) => {
                let code = error.code();
                self.refused[code as usize].get_or_init(|| answer_counter(code.as_str())).increment(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_usual_form_takes_the_fast_path() {
        let sale = |method: Method, uri: &'static str| match_path(&method, &Uri::from_static(uri)).map(SaleId::get);
        assert_eq!(sale(Method::POST, "/v1/sales/77/orders"), Some(77));
        assert_eq!(sale(Method::POST, "http://shop/v1/sales/77/orders?x=1"), Some(77));
        assert_eq!(sale(Method::GET, "/v1/sales/77/orders"), None);
        for other in [
            "/v1/sales/%377/orders",
            "/v1/sales/0/orders",
            "/v1/sales//orders",
            "/v1/sales/7/orders/",
            "/v1/sales/7/8/orders",
        ] {
            assert_eq!(sale(Method::POST, other), None, "{other}");
        }
    }
}

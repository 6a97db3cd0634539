//! Buying, and a buyer's own orders.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Json as Answer;
use axum::body::Body;
use axum::extract::{FromRequestParts, State};
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::Response;
use metrics::{Counter, counter};
use serde::{Deserialize, Serialize};
use stampede_core::{Code, Order, OrderId, OrderStatus, SaleId, Timestamp, UserId};
use stampede_engine::{Bought, Error};
use utoipa::{IntoParams, ToSchema};

use crate::address::counted_as;
use crate::app::App;
use crate::extract::{Buyer, Id, Own, Params, Peer, to_the_end};
use crate::problem::Problem;
use crate::sales::page_size;

/// Counters of what buyers hear, made once: looking one up by name would cost more than the sale's own work.
#[derive(Debug)]
pub(crate) struct BuyMetrics {
    created: Counter,
    accepted: Counter,
    already: Counter,
    refused: Vec<(Code, Counter)>,
}

/// All that a try to buy can come to, but for an order.
const REFUSALS: [Code; 10] = [
    Code::SoldOut,
    Code::NotStarted,
    Code::Ended,
    Code::Paused,
    Code::NoSuchSale,
    Code::TooManyRequests,
    Code::Busy,
    Code::OutcomeUnknown,
    Code::Unavailable,
    Code::Internal,
];

impl BuyMetrics {
    pub(crate) fn new() -> Self {
        let of = |answer: &'static str| counter!("stampede_buy_answers_total", "answer" => answer);
        Self {
            created: of("created"),
            accepted: of("accepted"),
            already: of("already"),
            refused: REFUSALS.iter().map(|&code| (code, of(code.as_str()))).collect(),
        }
    }

    fn count(&self, bought: &Result<Bought, Error>) {
        match bought {
            Ok(Bought::Created(_)) => self.created.increment(1),
            Ok(Bought::Accepted(_)) => self.accepted.increment(1),
            Ok(Bought::Already(_)) => self.already.increment(1),
            Err(error) => self.count_refused(error.code()),
        }
    }

    fn count_refused(&self, refusal: Code) {
        if let Some((_, counter)) = self.refused.iter().find(|(code, _)| *code == refusal) {
            counter.increment(1);
        }
    }

    /// A try that the limit of its user refused.
    pub(crate) fn limited(&self) {
        self.count_refused(Code::TooManyRequests);
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OrderAnswer {
    id: OrderId,
    sale_id: SaleId,
    status: OrderStatus,
    price_cents: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    already: Option<bool>,
}

impl OrderAnswer {
    fn new(order: &Order, already: Option<bool>) -> Self {
        Self {
            id: order.id,
            sale_id: order.sale,
            status: order.status,
            price_cents: order.price.cents(),
            created_at: order.created_at,
            updated_at: order.updated_at,
            already,
        }
    }
}

/// Buys one. Asked again, the answer is the same order.
#[utoipa::path(post, path = "/v1/sales/{id}/orders", tag = "orders", responses((status = 201, description = "Yours, and on the disk", body = OrderAnswer), (status = 200, description = "Yours already", body = OrderAnswer), (status = 409, description = "`sold_out`, `not_started`, `ended` or `paused`")), security(("buyer" = [])))]
pub(crate) async fn buy(
    State(app): State<Arc<App>>,
    _: BuyerAddress,
    Buyer(user): Buyer,
    Id(sale): Id<SaleId>,
) -> Result<Response, Problem> {
    Ok(sell(&app, user, sale).await?)
}

/// The address of a request to buy, within its limit. Checked before the token, so that it limits wrong tokens, too.
pub(crate) struct BuyerAddress;

impl BuyerAddress {
    pub(crate) fn check(app: &App, client: IpAddr) -> Result<Self, Error> {
        match app.limits.buys_per_ip.check(counted_as(client)) {
            Ok(()) => Ok(Self),
            Err(wait) => {
                let limited = Err(Error::Limited { wait });
                app.buy_metrics.count(&limited);
                limited.map(|_| Self)
            }
        }
    }
}

impl FromRequestParts<Arc<App>> for BuyerAddress {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let Peer(client) = Peer::from_request_parts(parts, app).await?;
        Ok(Self::check(app, client)?)
    }
}

/// The path of [`buy`], as its figures name it.
pub(crate) const BUY: &str = "/v1/sales/{id}/orders";

/// The sale that a request wants to buy from, if that is what it is about and there is nothing odd about it.
pub(crate) fn wanted(method: &Method, uri: &Uri) -> Option<SaleId> {
    let path = uri.path().strip_prefix("/v1/sales/")?;
    path.strip_suffix("/orders")?.parse().ok().filter(|_| method == Method::POST)
}

/// One for this user, or the one he has, or why not.
pub(crate) async fn sell(app: &App, user: UserId, sale: SaleId) -> Result<Response, Error> {
    let bought = app.engine.buy(sale, user).await;
    app.buy_metrics.count(&bought);
    let bought = bought?;
    let mut body = Vec::with_capacity(256);
    let (status, written) = match &bought {
        Bought::Created(order) => {
            (StatusCode::CREATED, serde_json::to_writer(&mut body, &OrderAnswer::new(order, Some(false))))
        }
        Bought::Already(order) => {
            (StatusCode::OK, serde_json::to_writer(&mut body, &OrderAnswer::new(order, Some(true))))
        }
        Bought::Accepted(id) => {
            (StatusCode::ACCEPTED, serde_json::to_writer(&mut body, &AcceptedResponse { id: *id, sale_id: sale }))
        }
    };
    // Numbers and fixed words cannot fail to serialize. If they did, the order would exist all the same.
    written.map_err(|_| Error::OutcomeUnknown)?;
    let location = HeaderValue::try_from(format!("/v1/orders/{}", bought.id())).ok();
    Ok(respond(status, Body::from(body), location))
}

/// The answer while an order is on its way to the ledger.
#[derive(Serialize)]
struct AcceptedResponse {
    id: OrderId,
    sale_id: SaleId,
}

/// The response that an order, or the no-op of a load test, is sent in.
pub(crate) fn respond(status: StatusCode, body: Body, location: Option<HeaderValue>) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    // These two, and those that every answer gets.
    headers.reserve(8);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(location) = location {
        headers.insert(LOCATION, location);
    }
    response
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrdersParams {
    before: Option<OrderId>,
    /// How many on a page; 20 without it.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OrdersAnswer {
    orders: Vec<OrderAnswer>,
    /// Ask for the orders `before` this one to go on; null at the end.
    next: Option<OrderId>,
}

/// The orders of the one who asks, newest first.
#[utoipa::path(get, path = "/v1/orders", tag = "orders", params(OrdersParams), responses((status = 200, description = "A page", body = OrdersAnswer)), security(("buyer" = [])))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Own(user): Own,
    Params(params): Params<OrdersParams>,
) -> Result<Answer<OrdersAnswer>, Problem> {
    let limit = page_size(params.limit)?;
    let orders = app.engine.orders(user, params.before, limit).await?;
    let next = orders.last().filter(|_| orders.len() == limit as usize).map(|order| order.id);
    Ok(Answer(OrdersAnswer { orders: orders.iter().map(|order| OrderAnswer::new(order, None)).collect(), next }))
}

/// One order of the one who asks.
#[utoipa::path(get, path = "/v1/orders/{id}", tag = "orders", responses((status = 200, description = "The order", body = OrderAnswer)), security(("buyer" = [])))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Own(user): Own,
    Id(id): Id<OrderId>,
) -> Result<Answer<OrderAnswer>, Problem> {
    Ok(Answer(OrderAnswer::new(&app.engine.order(id, user).await?, None)))
}

/// Cancels an unpaid order. Its place is sold again.
#[utoipa::path(post, path = "/v1/orders/{id}/cancel", tag = "orders", responses((status = 200, description = "Cancelled", body = OrderAnswer), (status = 409, description = "`illegal_step`")), security(("buyer" = [])))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Own(user): Own,
    Id(id): Id<OrderId>,
) -> Result<Answer<OrderAnswer>, Problem> {
    let order = to_the_end(async move { app.engine.cancel(id, user).await }).await?;
    Ok(Answer(OrderAnswer::new(&order, None)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_plainly_a_try_to_buy_goes_past_the_router() {
        let wanted = |method: Method, uri: &'static str| wanted(&method, &Uri::from_static(uri)).map(SaleId::get);
        assert_eq!(wanted(Method::POST, "/v1/sales/77/orders"), Some(77));
        assert_eq!(wanted(Method::POST, "http://shop/v1/sales/77/orders?x=1"), Some(77));
        assert_eq!(wanted(Method::GET, "/v1/sales/77/orders"), None);
        for odd in [
            "/v1/sales/%377/orders",
            "/v1/sales/0/orders",
            "/v1/sales//orders",
            "/v1/sales/7/orders/",
            "/v1/sales/7/8/orders",
        ] {
            assert_eq!(wanted(Method::POST, odd), None, "{odd}");
        }
    }
}

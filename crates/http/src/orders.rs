//! A buyer's own orders.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use stampede_core::{Order, OrderId, OrderStatus, SaleId, Timestamp};
use stampede_engine::OrderView;
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{CurrentUser, Id, Json, Params, run_detached};
use crate::pagination::{self, page_size};
use crate::problem::Problem;

/// How long a stream of events waits for the next one.
const MAX_WATCH: Duration = Duration::from_secs(60);

#[derive(Serialize, ToSchema)]
pub(crate) struct OrderResponse {
    id: OrderId,
    sale_id: SaleId,
    status: OrderStatus,
    price_cents: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
    /// In the response to buying: whether the buyer had the order before.
    #[serde(skip_serializing_if = "Option::is_none")]
    already: Option<bool>,
}

impl OrderResponse {
    pub(crate) fn new(order: &Order, already: Option<bool>) -> Self {
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

/// An order that is accepted and on its way to the ledger.
#[derive(Serialize, ToSchema)]
pub(crate) struct PendingOrderResponse {
    id: OrderId,
    sale_id: SaleId,
    /// Always `pending`.
    status: OrderStatus,
    /// In the response to buying: whether the buyer had the order before.
    #[serde(skip_serializing_if = "Option::is_none")]
    already: Option<bool>,
}

impl PendingOrderResponse {
    pub(crate) const fn new(id: OrderId, sale_id: SaleId, already: Option<bool>) -> Self {
        Self { id, sale_id, status: OrderStatus::Pending, already }
    }
}

/// An order, in the ledger or on its way to it.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum OrderViewResponse {
    Recorded(OrderResponse),
    Pending(PendingOrderResponse),
}

impl From<&OrderView> for OrderViewResponse {
    fn from(view: &OrderView) -> Self {
        match view {
            OrderView::Recorded(order) => Self::Recorded(OrderResponse::new(order, None)),
            OrderView::Pending { id, sale } => Self::Pending(PendingOrderResponse::new(*id, *sale, None)),
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrderParams {
    /// The sale of the order, as in the `Location` of the response to buying. Without it, an order that is on its way to the ledger is
    /// not found.
    sale: Option<SaleId>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrdersParams {
    before: Option<OrderId>,
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OrdersResponse {
    orders: Vec<OrderResponse>,
    /// Pass it as `before` to get the next page; null on the last page.
    next: Option<OrderId>,
}

/// The orders of the current user, newest first.
#[utoipa::path(get, path = "/v1/orders", tag = "orders", params(OrdersParams), responses((status = 200, description = "A page", body = OrdersResponse)), security(("buyer" = [])))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Params(params): Params<OrdersParams>,
) -> Result<Json<OrdersResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let orders = app.engine.orders(user, params.before, limit).await?;
    let next = pagination::next(&orders, limit, |order| order.id);
    Ok(Json(OrdersResponse { orders: orders.iter().map(|order| OrderResponse::new(order, None)).collect(), next }))
}

/// One order of the current user.
#[utoipa::path(get, path = "/v1/orders/{id}", tag = "orders", params(OrderParams), responses((status = 200, description = "The order", body = OrderViewResponse)), security(("buyer" = [])))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
    Params(params): Params<OrderParams>,
) -> Result<Json<OrderViewResponse>, Problem> {
    Ok(Json(OrderViewResponse::from(&app.engine.order(id, user, params.sale).await?)))
}

/// The states of an order as server-sent events, from the present one on. The stream ends when the order is in the ledger.
#[utoipa::path(get, path = "/v1/orders/{id}/events", tag = "orders", params(OrderParams), responses((status = 200, description = "Events named `order`, whose data is the order", body = String, content_type = "text/event-stream")), security(("buyer" = [])))]
pub(crate) async fn events(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
    Params(params): Params<OrderParams>,
) -> Result<Response, Problem> {
    let watch = app.engine.watch_order(id, user, params.sale).await?;
    let first = OrderViewResponse::from(&watch.view);
    let draining = app.draining().clone();
    let next = async move {
        if !watch.is_pending() {
            return None;
        }
        // A client that is still interested connects again.
        let recorded = tokio::time::timeout(MAX_WATCH, watch.recorded());
        let order = draining.run_until_cancelled(recorded).await?.ok()??;
        Some(OrderViewResponse::from(&OrderView::Recorded(order)))
    };
    let states = stream::once(async { Some(first) }).chain(stream::once(next));
    let events = states.filter_map(async |state| state.map(|state| Event::default().event("order").json_data(state)));
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

/// Cancels an unpaid order. Its stock is sold again.
#[utoipa::path(post, path = "/v1/orders/{id}/cancel", tag = "orders", params(OrderParams), responses((status = 200, description = "Cancelled", body = OrderResponse), (status = 409, description = "`illegal_step`")), security(("buyer" = [])))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
    Params(params): Params<OrderParams>,
) -> Result<Json<OrderResponse>, Problem> {
    let order = run_detached(async move { app.engine.cancel(id, user, params.sale).await }).await?;
    Ok(Json(OrderResponse::new(&order, None)))
}

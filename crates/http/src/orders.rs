//! A buyer's own orders.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::{Order, OrderId, OrderStatus, SaleId, Timestamp};
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{CurrentUser, Id, Json, Params, run_detached};
use crate::pagination::{self, page_size};
use crate::problem::Problem;

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
#[utoipa::path(get, path = "/v1/orders/{id}", tag = "orders", responses((status = 200, description = "The order", body = OrderResponse)), security(("buyer" = [])))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderResponse>, Problem> {
    Ok(Json(OrderResponse::new(&app.engine.order(id, user).await?, None)))
}

/// Cancels an unpaid order. Its stock is sold again.
#[utoipa::path(post, path = "/v1/orders/{id}/cancel", tag = "orders", responses((status = 200, description = "Cancelled", body = OrderResponse), (status = 409, description = "`illegal_step`")), security(("buyer" = [])))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderResponse>, Problem> {
    let order = run_detached(async move { app.engine.cancel(id, user).await }).await?;
    Ok(Json(OrderResponse::new(&order, None)))
}

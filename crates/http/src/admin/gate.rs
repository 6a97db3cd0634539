//! What the gate and the ledger hold of a sale, to be compared with each other.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::ports::{OrderRow, Snapshot};
use stampede_core::{Order, OrderId, OrderStatus, SaleId, StepReason, Timestamp, UserId};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{Id, Json, Params, Viewer};
use crate::pagination::{self, page_size_within};
use crate::problem::Problem;

/// How long the number of quarantined orders is waited for.
const QUARANTINE_TIMEOUT: Duration = Duration::from_secs(1);

/// The state of a sale at the gate.
#[derive(Serialize, ToSchema)]
pub(crate) struct GateResponse {
    #[serde(rename = "ver")]
    version: i64,
    cap: u32,
    marks: u32,
    /// Marks whose orders are in the ledger.
    settled: u32,
    /// Digest of all marks: 16 hexadecimal digits, equal for equal sets of users and orders.
    digest: String,
    /// Admitted orders of this sale in the gate's outbox; null in a tier without one.
    outbox: Option<u32>,
    /// Orders of this sale in quarantine, whose stock stays taken; null while the database does not answer.
    quarantined: Option<u64>,
    /// Messages of all sales that wait in RabbitMQ, or in the database because their orders cannot be recorded; null in a tier without
    /// RabbitMQ, and while the number cannot be read.
    queue: Option<u64>,
    /// Why the number of messages cannot be read; null if it can, and in a tier without RabbitMQ.
    queue_error: Option<String>,
    /// Requests of all sales that wait for the gate or the ledger of this node.
    waiting: usize,
}

/// The state of a sale at the gate of this node, to be compared with the ledger.
#[utoipa::path(get, path = "/admin/v1/sales/{id}/gate", tag = "admin", responses((status = 200, description = "A consistent snapshot", body = GateResponse)))]
pub(crate) async fn gate(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
) -> Result<Json<GateResponse>, Problem> {
    let (gate, digest) = app.engine.gate_snapshot(id).await?;
    let Snapshot { version, cap, marks, settled, outbox, .. } = gate;
    let (digest, waiting) = (format!("{digest:016x}"), app.engine.waiting());
    // The gate is shown also while the broker is away.
    let (queue, queue_error) = match app.engine.queue_depth().await {
        Ok(depth) => (depth, None),
        Err(error) => (None, Some(error.to_string())),
    };
    // And while the database is away.
    let quarantined = timeout(QUARANTINE_TIMEOUT, app.engine.quarantined_in(id)).await.ok().and_then(Result::ok);
    Ok(Json(GateResponse { version, cap, marks, settled, digest, outbox, quarantined, queue, queue_error, waiting }))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct MarksParams {
    after: Option<UserId>,
    /// Page size; 1,000 by default.
    #[param(minimum = 1, maximum = 100_000)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct MarkResponse {
    user_id: UserId,
    order_id: OrderId,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct MarksResponse {
    marks: Vec<MarkResponse>,
    /// Pass it as `after` to get the next page; null on the last page.
    next: Option<UserId>,
}

/// The marks of a sale at the gate of this node, ordered by user id.
#[utoipa::path(get, path = "/admin/v1/sales/{id}/marks", tag = "admin", params(MarksParams), responses((status = 200, description = "A page: a consistent snapshot", body = MarksResponse)))]
pub(crate) async fn marks(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
    Params(params): Params<MarksParams>,
) -> Result<Json<MarksResponse>, Problem> {
    let limit = page_size_within(params.limit, 1_000, 1..=100_000)?;
    let marks = app.engine.marks(id, params.after, limit as usize).await?;
    let next = pagination::next(&marks, limit, |(user, _)| *user);
    let marks = marks.into_iter().map(|(user_id, order_id)| MarkResponse { user_id, order_id }).collect();
    Ok(Json(MarksResponse { marks, next }))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrdersInParams {
    after: Option<OrderId>,
    /// Page size; 100 by default.
    #[param(minimum = 1, maximum = 10_000)]
    limit: Option<u32>,
}

/// An order as it is stored in the ledger.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderRowResponse {
    id: OrderId,
    user_id: UserId,
    status: OrderStatus,
    live: bool,
    /// Why it was rejected or cancelled.
    reason: Option<StepReason>,
    epoch: i64,
    seq: i64,
    price_cents: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OrdersInResponse {
    orders: Vec<OrderRowResponse>,
    /// Pass it as `after` to get the next page; null on the last page.
    next: Option<OrderId>,
}

/// All orders of a sale, ordered by id, including those that are no longer live.
#[utoipa::path(get, path = "/admin/v1/sales/{id}/orders", tag = "admin", params(OrdersInParams), responses((status = 200, description = "A page", body = OrdersInResponse)))]
pub(crate) async fn orders_in(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
    Params(params): Params<OrdersInParams>,
) -> Result<Json<OrdersInResponse>, Problem> {
    let limit = page_size_within(params.limit, 100, 1..=10_000)?;
    let rows = app.engine.orders_in(id, params.after, limit).await?;
    let next = pagination::next(&rows, limit, |row| row.order.id);
    let response = |row: OrderRow| {
        let OrderRow { order, live, reason, epoch, seq } = row;
        let Order { id, user, status, price, created_at, updated_at, .. } = order;
        let (epoch, price_cents) = (epoch.0, price.cents());
        OrderRowResponse { id, user_id: user, status, live, reason, epoch, seq, price_cents, created_at, updated_at }
    };
    Ok(Json(OrdersInResponse { orders: rows.into_iter().map(response).collect(), next }))
}

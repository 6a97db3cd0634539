//! Orders that could not be recorded in the ledger.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::ports::{QuarantinedOrder, RecordOutcome};
use stampede_core::{Code, OrderId, SaleId, Timestamp, UserId};
use stampede_engine::{Action, Change, Outcome};
use utoipa::{IntoParams, ToSchema};

use super::audited;
use crate::app::App;
use crate::extract::{Id, Json, Operator, Params, Viewer};
use crate::pagination::{self, page_size};
use crate::problem::Problem;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct QuarantineParams {
    before: Option<OrderId>,
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

/// An order that could not be recorded. It holds its stock until it is retried or discarded.
#[derive(Serialize, ToSchema)]
pub(crate) struct QuarantinedOrderResponse {
    id: OrderId,
    sale_id: SaleId,
    user_id: UserId,
    epoch: i64,
    seq: i64,
    admitted_at: Timestamp,
    quarantined_at: Timestamp,
    /// The error of the database.
    error: String,
}

impl From<QuarantinedOrder> for QuarantinedOrderResponse {
    fn from(order: QuarantinedOrder) -> Self {
        let QuarantinedOrder { sale, epoch, admitted, error, quarantined_at } = order;
        Self {
            id: admitted.order,
            sale_id: sale,
            user_id: admitted.user,
            epoch: epoch.0,
            seq: admitted.seq,
            admitted_at: admitted.at,
            quarantined_at,
            error,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct QuarantineResponse {
    orders: Vec<QuarantinedOrderResponse>,
    /// Pass it as `before` to get the next page; null on the last page.
    next: Option<OrderId>,
}

/// The orders in quarantine, newest first.
#[utoipa::path(get, path = "/admin/v1/quarantine", tag = "admin", params(QuarantineParams), responses((status = 200, description = "A page", body = QuarantineResponse)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<QuarantineParams>,
) -> Result<Json<QuarantineResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let orders = app.engine.quarantined(params.before, limit).await?;
    let next = pagination::next(&orders, limit, |order| order.admitted.order);
    Ok(Json(QuarantineResponse { orders: orders.into_iter().map(Into::into).collect(), next }))
}

/// One order in quarantine.
#[utoipa::path(get, path = "/admin/v1/quarantine/{id}", tag = "admin", responses((status = 200, description = "The order", body = QuarantinedOrderResponse)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<OrderId>,
) -> Result<Json<QuarantinedOrderResponse>, Problem> {
    Ok(Json(app.engine.quarantined_order(id).await?.into()))
}

/// The outcome for a quarantined order.
#[derive(Serialize, ToSchema)]
pub(crate) struct QuarantineOutcomeResponse {
    id: OrderId,
    /// `recorded`: the order is in the ledger. `rejected`: it is not and will not be, and its stock is free.
    outcome: &'static str,
    /// Why the order was rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// Records a quarantined order after its cause is removed. The order is rejected if the sale has no stock left for it.
#[utoipa::path(post, path = "/admin/v1/quarantine/{id}/retry", tag = "admin", responses((status = 200, description = "Recorded or rejected", body = QuarantineOutcomeResponse), (status = 409, description = "`not_recordable`: the database still rejects the order; it stays in quarantine")))]
pub(crate) async fn retry(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
) -> Result<Json<QuarantineOutcomeResponse>, Problem> {
    let work = move |app: Arc<App>| async move {
        let recorded = app.engine.retry_quarantined(id).await?;
        let to = if matches!(recorded, RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded) {
            "recorded"
        } else {
            "rejected"
        };
        Ok(Outcome::done(recorded, vec![Change::new("order", "quarantined", to)]))
    };
    let recorded = audited(app, operator, Action::new("retry_quarantined", format!("order {id}")), work).await?;
    let (outcome, reason) = match recorded {
        RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded => ("recorded", None),
        RecordOutcome::Rejected { reason, .. } => ("rejected", Some(reason.as_str())),
        RecordOutcome::Dead => ("rejected", None),
        RecordOutcome::IdCollision | RecordOutcome::Quarantined => return Err(Problem::new(Code::NotRecordable)),
    };
    Ok(Json(QuarantineOutcomeResponse { id, outcome, reason }))
}

/// Rejects a quarantined order and frees its stock.
#[utoipa::path(post, path = "/admin/v1/quarantine/{id}/discard", tag = "admin", responses((status = 200, description = "Rejected", body = QuarantineOutcomeResponse), (status = 409, description = "`illegal_step`: the order was recorded in the meantime")))]
pub(crate) async fn discard(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
) -> Result<Json<QuarantineOutcomeResponse>, Problem> {
    let work = move |app: Arc<App>| async move {
        app.engine.discard_quarantined(id).await?;
        Ok(Outcome::done((), vec![Change::new("order", "quarantined", "rejected")]))
    };
    audited(app, operator, Action::new("discard_quarantined", format!("order {id}")), work).await?;
    Ok(Json(QuarantineOutcomeResponse { id, outcome: "rejected", reason: Some("discarded") }))
}

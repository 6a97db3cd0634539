//! What operators do with orders that could not be recorded.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::ports::{QuarantinedOrder, RecordOutcome};
use stampede_core::{Code, OrderId, SaleId, Timestamp, UserId};
use stampede_engine::{Action, Change, Outcome};
use utoipa::{IntoParams, ToSchema};

use crate::admin::audited;
use crate::app::App;
use crate::extract::{Id, Operator, Params, Viewer};
use crate::problem::Problem;
use crate::sales::page_size;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct QuarantineParams {
    before: Option<OrderId>,
    /// How many on a page; 20 without it.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

/// An order that could not be recorded. Its stock stays taken until it is retried or discarded.
#[derive(Serialize, ToSchema)]
pub(crate) struct QuarantinedOrderResponse {
    id: OrderId,
    sale_id: SaleId,
    user_id: UserId,
    epoch: i64,
    seq: i64,
    admitted_at: Timestamp,
    quarantined_at: Timestamp,
    /// What the database said.
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
    /// Ask for the orders `before` this one to go on; null at the end.
    next: Option<OrderId>,
}

/// The orders in quarantine, newest first.
#[utoipa::path(get, path = "/admin/v1/quarantine", tag = "admin", params(QuarantineParams), responses((status = 200, description = "A page", body = QuarantineResponse)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<QuarantineParams>,
) -> Result<Answer<QuarantineResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let orders = app.engine.quarantined(params.before, limit).await?;
    let next = orders.last().filter(|_| orders.len() == limit as usize).map(|order| order.admitted.order);
    Ok(Answer(QuarantineResponse { orders: orders.into_iter().map(Into::into).collect(), next }))
}

/// One order in quarantine.
#[utoipa::path(get, path = "/admin/v1/quarantine/{id}", tag = "admin", responses((status = 200, description = "The order", body = QuarantinedOrderResponse)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<OrderId>,
) -> Result<Answer<QuarantinedOrderResponse>, Problem> {
    Ok(Answer(app.engine.quarantined_order(id).await?.into()))
}

/// What became of a quarantined order.
#[derive(Serialize, ToSchema)]
pub(crate) struct QuarantineOutcomeResponse {
    id: OrderId,
    /// `recorded`: it is an order now. `rejected`: it never will be, and its stock is free.
    outcome: &'static str,
    /// Why it was rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// Records a quarantined order after its cause is removed. What the sale has no room for by now is rejected.
#[utoipa::path(post, path = "/admin/v1/quarantine/{id}/retry", tag = "admin", responses((status = 200, description = "RecordOutcome or rejected", body = QuarantineOutcomeResponse), (status = 409, description = "`not_recordable`: the database still rejects it; it stays in quarantine")))]
pub(crate) async fn retry(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
) -> Result<Answer<QuarantineOutcomeResponse>, Problem> {
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
    Ok(Answer(QuarantineOutcomeResponse { id, outcome, reason }))
}

/// Rejects a quarantined order for good; its stock is sold again.
#[utoipa::path(post, path = "/admin/v1/quarantine/{id}/discard", tag = "admin", responses((status = 200, description = "Rejected", body = QuarantineOutcomeResponse), (status = 409, description = "`illegal_step`: it was recorded in the meantime")))]
pub(crate) async fn discard(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
) -> Result<Answer<QuarantineOutcomeResponse>, Problem> {
    let work = move |app: Arc<App>| async move {
        app.engine.discard_quarantined(id).await?;
        Ok(Outcome::done((), vec![Change::new("order", "quarantined", "rejected")]))
    };
    audited(app, operator, Action::new("discard_quarantined", format!("order {id}")), work).await?;
    Ok(Answer(QuarantineOutcomeResponse { id, outcome: "rejected", reason: Some("discarded") }))
}

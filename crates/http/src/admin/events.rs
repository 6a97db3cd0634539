//! Events of orders that the receiver of the operator has rejected.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stampede_core::ports::OutboxEntry;
use stampede_core::{Actor, OrderId, OrderStatus, SaleId, StepReason, Timestamp, UserId};
use stampede_engine::{Action, Outcome};
use utoipa::ToSchema;

use super::audited;
use crate::app::App;
use crate::extract::{Json, Operator, Viewer};
use crate::problem::Problem;

/// The most events that are listed.
const MAX_LISTED: u32 = 100;

/// An event that is set aside.
#[derive(Serialize, ToSchema)]
pub(crate) struct FailedEventResponse {
    /// The id that it has in messages.
    id: String,
    order_id: OrderId,
    sale_id: SaleId,
    user_id: UserId,
    from: OrderStatus,
    to: OrderStatus,
    at: Timestamp,
    /// Why; null if there is nothing to say.
    reason: Option<StepReason>,
    /// Who made the order take the step.
    by: Actor,
    /// Higher for every later event of the order.
    number: u32,
    /// How often it was rejected; 0 if it only waits for an earlier event of its order.
    tries: u32,
    /// Why it was rejected, or waits.
    error: Option<String>,
}

/// The events of an entry with what has become of it.
fn failed_events(entry: OutboxEntry) -> impl Iterator<Item = FailedEventResponse> {
    let OutboxEntry { events, tries, error, .. } = entry;
    events.into_iter().map(move |event| FailedEventResponse {
        id: event.id(),
        order_id: event.order,
        sale_id: event.sale,
        user_id: event.user,
        from: event.step.from,
        to: event.step.to,
        at: event.step.at,
        reason: event.step.reason,
        by: event.step.by,
        number: event.number(),
        tries,
        error: error.clone(),
    })
}

#[derive(Serialize, ToSchema)]
pub(crate) struct FailedEventsResponse {
    /// How many entries of the outbox are not delivered, those included that are set aside. A recorded batch of orders is one.
    waiting: u64,
    /// The events that are set aside, the oldest first.
    failed: Vec<FailedEventResponse>,
}

/// The events that the receiver has rejected and that are set aside, the 100 oldest.
#[utoipa::path(get, path = "/admin/v1/events", tag = "admin", responses((status = 200, description = "The events", body = FailedEventsResponse)))]
pub(crate) async fn list(State(app): State<Arc<App>>, _: Viewer) -> Result<Json<FailedEventsResponse>, Problem> {
    let failed = app.engine.failed_events(MAX_LISTED).await?;
    let waiting = app.engine.waiting_events().await?;
    Ok(Json(FailedEventsResponse { waiting, failed: failed.into_iter().flat_map(failed_events).collect() }))
}

/// Which events.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetryEventsRequest {
    /// Only those of this order; null for all.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required = true)]
    order_id: Option<OrderId>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct RetryEventsResponse {
    /// How many are sent again.
    retried: u64,
}

/// Sends events again that are set aside, those of an order in sequence.
#[utoipa::path(post, path = "/admin/v1/events/retry", tag = "admin", request_body = RetryEventsRequest, responses((status = 200, description = "They are due now", body = RetryEventsResponse)))]
pub(crate) async fn retry(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(request): Json<RetryEventsRequest>,
) -> Result<Json<RetryEventsResponse>, Problem> {
    let order = request.order_id;
    let target = order.map_or_else(|| "events".to_owned(), |order| format!("order {order}"));
    let work = move |app: Arc<App>| async move {
        let retried = app.engine.retry_events(order).await?;
        Ok(if retried == 0 { Outcome::unchanged(0) } else { Outcome::done(retried, Vec::new()) })
    };
    let action = Action::new("retry_events", target).with_request(json!(request));
    Ok(Json(RetryEventsResponse { retried: audited(app, operator, action, work).await? }))
}

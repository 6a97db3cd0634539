//! A buyer's own orders.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use stampede_core::{Actor, Order, OrderEvent, OrderId, OrderStatus, SaleId, StepReason, Timestamp};
use stampede_engine::{OrderFollower, OrderView, OrderWatch};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{CurrentUser, Id, Json, Params, run_detached};
use crate::pagination::{self, page_size};
use crate::problem::Problem;

/// How long a stream of events follows the steps of an order.
const MAX_FOLLOW: Duration = Duration::from_secs(60);

#[derive(Serialize, ToSchema)]
pub(crate) struct OrderResponse {
    id: OrderId,
    sale_id: SaleId,
    status: OrderStatus,
    price_cents: i64,
    created_at: Timestamp,
    updated_at: Timestamp,
    /// Until when it must be paid. Not in the response to buying, and not without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pay_by: Option<Timestamp>,
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
            pay_by: order.pay_by,
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

/// One step of an order.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderEventResponse {
    from: OrderStatus,
    to: OrderStatus,
    at: Timestamp,
    /// Why; null if there is nothing to say.
    reason: Option<StepReason>,
    /// Who made the order take the step.
    by: Actor,
}

impl From<OrderEvent> for OrderEventResponse {
    fn from(OrderEvent { from, to, at, reason, by }: OrderEvent) -> Self {
        Self { from, to, at, reason, by }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OrderHistoryResponse {
    events: Vec<OrderEventResponse>,
}

/// Every step of an order of the current user, from the first on.
#[utoipa::path(get, path = "/v1/orders/{id}/history", tag = "orders", responses((status = 200, description = "The steps", body = OrderHistoryResponse)), security(("buyer" = [])))]
pub(crate) async fn history(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderHistoryResponse>, Problem> {
    let events = app.engine.order_history(id, user).await?;
    Ok(Json(OrderHistoryResponse { events: events.into_iter().map(OrderEventResponse::from).collect() }))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct EventsParams {
    /// The sale of the order, as in the `Location` of the response to buying. Without it, an order that is on its way to the ledger is
    /// not found.
    sale: Option<SaleId>,
    /// Whether the stream goes on when the order is in the ledger, with an event for every step.
    #[serde(default)]
    follow: bool,
}

/// A state of an order in a stream.
#[derive(Serialize)]
struct OrderStateResponse {
    #[serde(flatten)]
    order: OrderViewResponse,
    /// The step that has led to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<OrderEventResponse>,
}

/// The states of an order after the present one.
struct NextStates {
    watch: Option<OrderWatch>,
    order: Option<Order>,
    follower: Option<OrderFollower>,
}

impl NextStates {
    /// Waits for the next states, each with the step that has led to it; `None` if there is none.
    async fn next(&mut self) -> Option<Vec<(Order, Option<OrderEvent>)>> {
        let order = match self.watch.take() {
            Some(watch) if watch.is_pending() => {
                let mut order = watch.recorded().await?;
                if self.follower.is_some() && order.status != OrderStatus::Rejected {
                    // It may have taken steps since. They follow.
                    order = Order { status: OrderStatus::Unpaid, updated_at: order.created_at, ..order };
                }
                self.order = Some(order.clone());
                return Some(vec![(order, None)]);
            }
            Some(watch) => watch.recorded().await?,
            None => self.order.take()?,
        };
        let steps = self.follower.as_ref()?.next_steps(order.id, order.status).await?;
        let after = |step: OrderEvent| Order { status: step.to, updated_at: step.at, ..order.clone() };
        let states: Vec<_> = steps.into_iter().map(|step| (after(step), Some(step))).collect();
        self.order = states.last().map(|(order, _)| order.clone());
        Some(states)
    }
}

/// When a stream ends that has nothing more to say by then. Without `follow` it waits for the ledger, however long that takes: how many
/// wait for an order is bounded.
fn stream_deadline(follow: bool) -> Option<Instant> {
    follow.then(|| Instant::now() + MAX_FOLLOW)
}

/// What comes next, if it comes before the deadline.
async fn next_before<T>(deadline: Option<Instant>, next: impl Future<Output = Option<T>>) -> Option<T> {
    match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline, next).await.ok()?,
        None => next.await,
    }
}

/// The states of an order as server-sent events, from the present one on. The stream ends when the order is in the ledger, however long
/// that takes. With `follow` it goes on until the order has ended, and ends after a minute at most; connect again to go on.
#[utoipa::path(get, path = "/v1/orders/{id}/events", tag = "orders", params(EventsParams), responses((status = 200, description = "Events named `order`, whose data is the order; with `follow`, those after the first have the `step` that led to them, as in the history", body = String, content_type = "text/event-stream")), security(("buyer" = [])))]
pub(crate) async fn events(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
    Params(params): Params<EventsParams>,
) -> Result<Response, Problem> {
    let follower = params.follow.then(|| app.engine.follow_order()).transpose()?;
    let watch = app.engine.watch_order(id, user, params.sale).await?;
    let first = OrderStateResponse { order: OrderViewResponse::from(&watch.view), step: None };
    let draining = app.draining().clone();
    let states = NextStates { watch: Some(watch), order: None, follower };
    let deadline = stream_deadline(params.follow);
    let later = stream::unfold(states, move |mut states| {
        let draining = draining.clone();
        async move {
            let next = next_before(deadline, states.next());
            let next = draining.run_until_cancelled(next).await??;
            let next = next.into_iter().map(|(order, step)| OrderStateResponse {
                order: OrderViewResponse::from(&OrderView::Recorded(order)),
                step: step.map(OrderEventResponse::from),
            });
            Some((stream::iter(next.collect::<Vec<_>>()), states))
        }
    });
    let events = stream::once(async { first }).chain(later.flatten());
    let events = events.map(|state| Event::default().event("order").json_data(state));
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

/// Cancels an unpaid order. Its stock is sold again.
#[utoipa::path(post, path = "/v1/orders/{id}/cancel", tag = "orders", params(OrderParams), responses((status = 200, description = "`cancelled`; or `refunding` or `refunded`, if it was cancelled before and paid late", body = OrderResponse), (status = 409, description = "`illegal_step`; `not_recordable`: it is in quarantine, and the database rejects its row")), security(("buyer" = [])))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
    Params(params): Params<OrderParams>,
) -> Result<Json<OrderResponse>, Problem> {
    let order = run_detached(async move { app.engine.cancel(id, user, params.sale).await }).await?;
    Ok(Json(OrderResponse::new(&order, None)))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct RedeemCodeResponse {
    code: String,
}

/// The code with which the shop redeems a paid order. A code that was tried five times is replaced.
#[utoipa::path(post, path = "/v1/orders/{id}/redeem-code", tag = "orders", responses((status = 200, description = "The code", body = RedeemCodeResponse), (status = 409, description = "`illegal_step`: it is not paid, or was redeemed")), security(("buyer" = [])))]
pub(crate) async fn redeem_code(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
) -> Result<Json<RedeemCodeResponse>, Problem> {
    let code = run_detached(async move { app.engine.redeem_code(id, user).await }).await?;
    Ok(Json(RedeemCodeResponse { code }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes after all others that could be waiting have had their turn.
    async fn late() -> Option<u8> {
        tokio::task::yield_now().await;
        Some(1)
    }

    #[tokio::test]
    async fn only_streams_that_follow_an_order_have_a_deadline() {
        assert_eq!(stream_deadline(false), None);
        let begin = Instant::now();
        let deadline = stream_deadline(true).unwrap();
        assert!(deadline >= begin + MAX_FOLLOW && deadline <= Instant::now() + MAX_FOLLOW);

        assert_eq!(next_before(None, late()).await, Some(1));
        assert_eq!(next_before(Some(deadline), late()).await, Some(1));
        assert_eq!(next_before(Some(begin), std::future::pending::<Option<u8>>()).await, None);
    }
}

//! Orders: their history and payments, cancelling, redeeming, refunding.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stampede_core::{Order, OrderId, Payment, PaymentStatus, RefundReason, Timestamp, UserId};
use stampede_engine::{Action, Change, Engine, Error, Outcome};
use utoipa::ToSchema;

use super::audited;
use crate::app::App;
use crate::extract::{Id, Json, Operator, Viewer};
use crate::orders::{OrderEventResponse, OrderResponse};
use crate::problem::Problem;

/// A payment that was reported for an order, or moved to it.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderPaymentResponse {
    provider: String,
    transaction_id: String,
    /// The order that it has paid, or was to pay.
    order_id: OrderId,
    /// The order for which it was reported: another one if it came after that had ended, and was moved to a new order of the same buyer.
    reported_order_id: OrderId,
    amount_cents: i64,
    status: PaymentStatus,
    /// Why it must be returned, or was; null if it has paid the order.
    reason: Option<RefundReason>,
    received_at: Timestamp,
}

impl From<Payment> for OrderPaymentResponse {
    fn from(payment: Payment) -> Self {
        let Payment { reported, order, status, reason, received_at } = payment;
        Self {
            provider: reported.provider,
            transaction_id: reported.transaction,
            order_id: order,
            reported_order_id: reported.order,
            amount_cents: reported.amount_cents,
            status,
            reason,
            received_at,
        }
    }
}

/// An order with everything that has become of it.
#[derive(Serialize, ToSchema)]
pub(crate) struct OrderRecordResponse {
    order: OrderResponse,
    user_id: UserId,
    /// From the first step on.
    events: Vec<OrderEventResponse>,
    payments: Vec<OrderPaymentResponse>,
}

/// One order, with its steps and payments.
#[utoipa::path(get, path = "/admin/v1/orders/{id}", tag = "admin", responses((status = 200, description = "The order", body = OrderRecordResponse)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderRecordResponse>, Problem> {
    let record = app.engine.order_record(id).await?;
    Ok(Json(OrderRecordResponse {
        order: OrderResponse::new(&record.order, None),
        user_id: record.order.user,
        events: record.history.into_iter().map(OrderEventResponse::from).collect(),
        payments: record.payments.into_iter().map(OrderPaymentResponse::from).collect(),
    }))
}

/// Makes an order take a step, with a record in the audit log.
async fn change<W>(
    app: Arc<App>,
    operator: Operator,
    action: &'static str,
    id: OrderId,
    work: impl FnOnce(Arc<Engine>) -> W + Send + 'static,
) -> Result<Json<OrderResponse>, Problem>
where
    W: Future<Output = Result<Outcome<Order>, Error>> + Send,
{
    let action = Action::new(action, format!("order {id}"));
    let order = audited(app, operator, action, move |app: Arc<App>| work(app.engine.clone())).await?;
    Ok(Json(OrderResponse::new(&order, None)))
}

/// Cancels an unpaid order. Its stock is sold again.
#[utoipa::path(post, path = "/admin/v1/orders/{id}/cancel", tag = "admin", responses((status = 200, description = "`cancelled`; or `refunding` or `refunded`, if it was cancelled before and paid late", body = OrderResponse), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderResponse>, Problem> {
    let work = move |engine: Arc<Engine>| async move { engine.cancel_for_operator(id).await };
    change(app, operator, "cancel_order", id, work).await
}

/// Returns the payment of a paid order. Its stock is sold again.
#[utoipa::path(post, path = "/admin/v1/orders/{id}/refund", tag = "admin", responses((status = 200, description = "`refunding`, or `refunded` before", body = OrderResponse), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn refund(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderResponse>, Problem> {
    let work = move |engine: Arc<Engine>| async move { engine.refund(id).await };
    change(app, operator, "refund_order", id, work).await
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RedeemRequest {
    /// The code that its owner shows.
    #[schema(max_length = 64)]
    code: String,
}

/// Redeems a paid order with the code that its owner shows. It works once. A code can be tried five times; after that its owner gets another.
#[utoipa::path(post, path = "/admin/v1/orders/{id}/redeem", tag = "admin", request_body = RedeemRequest, responses((status = 200, description = "Redeemed", body = OrderResponse), (status = 409, description = "`illegal_step`: it is not paid, or was redeemed before"), (status = 422, description = "`wrong_code`")))]
pub(crate) async fn redeem(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<OrderId>,
    Json(request): Json<RedeemRequest>,
) -> Result<Json<OrderResponse>, Problem> {
    let work = move |engine: Arc<Engine>| async move { engine.redeem(id, &request.code).await };
    change(app, operator, "redeem_order", id, work).await
}

/// A payment that is to be returned.
#[derive(Serialize, ToSchema)]
pub(crate) struct OpenRefundResponse {
    payment: OrderPaymentResponse,
    order_id: OrderId,
    /// When the provider is asked next, unless the payment pays a new order before that; null if an operator must return the payment.
    due_at: Option<Timestamp>,
    /// How often the provider was asked.
    tries: u32,
    /// Why the last attempt failed.
    error: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct OpenRefundsResponse {
    refunds: Vec<OpenRefundResponse>,
}

/// The most payments that are listed.
const MAX_LISTED: u32 = 100;

/// The payments that are to be returned, the 100 oldest.
#[utoipa::path(get, path = "/admin/v1/refunds", tag = "admin", responses((status = 200, description = "The payments", body = OpenRefundsResponse)))]
pub(crate) async fn open_refunds(State(app): State<Arc<App>>, _: Viewer) -> Result<Json<OpenRefundsResponse>, Problem> {
    let refunds = app.engine.open_refunds(MAX_LISTED).await?;
    let refunds = refunds.into_iter().map(|refund| OpenRefundResponse {
        order_id: refund.payment.order,
        payment: refund.payment.into(),
        due_at: refund.due_at,
        tries: refund.tries,
        error: refund.error,
    });
    Ok(Json(OpenRefundsResponse { refunds: refunds.collect() }))
}

/// The longest name of a provider, and the longest transaction id.
const MAX_NAME: usize = 64;

/// Which payment.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RefundRequest {
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    provider: String,
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    transaction_id: String,
}

impl RefundRequest {
    fn check(&self) -> Result<(), Problem> {
        for (member, text) in [("provider", &self.provider), ("transaction_id", &self.transaction_id)] {
            if text.is_empty() || text.len() > MAX_NAME || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(Problem::invalid(member, format!("must have 1 to {MAX_NAME} visible ASCII characters")));
            }
        }
        Ok(())
    }

    fn action(&self, name: &'static str) -> Action {
        let Self { provider, transaction_id } = self;
        let request = json!({ "provider": provider, "transaction_id": transaction_id });
        Action::new(name, "payment".to_owned()).with_request(request)
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct RefundResponse {
    status: PaymentStatus,
}

/// Has the provider asked now to return a payment, after it has failed.
#[utoipa::path(post, path = "/admin/v1/refunds/retry", tag = "admin", request_body = RefundRequest, responses((status = 200, description = "It is due now", body = RefundResponse), (status = 409, description = "`illegal_step`: it is not to be returned")))]
pub(crate) async fn retry_refund(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(request): Json<RefundRequest>,
) -> Result<Json<RefundResponse>, Problem> {
    request.check()?;
    let action = request.action("retry_refund");
    let work = move |app: Arc<App>| async move {
        app.engine.retry_refund(&request.provider, &request.transaction_id).await?;
        Ok(Outcome::done((), Vec::new()))
    };
    audited(app, operator, action, work).await?;
    Ok(Json(RefundResponse { status: PaymentStatus::RefundDue }))
}

/// Records that a payment was returned by hand.
#[utoipa::path(post, path = "/admin/v1/refunds/complete", tag = "admin", request_body = RefundRequest, responses((status = 200, description = "Recorded", body = RefundResponse), (status = 409, description = "`illegal_step`: it is not to be returned")))]
pub(crate) async fn complete_refund(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(request): Json<RefundRequest>,
) -> Result<Json<RefundResponse>, Problem> {
    request.check()?;
    let action = request.action("complete_refund");
    let work = move |app: Arc<App>| async move {
        let before = app.engine.complete_refund(&request.provider, &request.transaction_id).await?.status;
        let after = PaymentStatus::Refunded;
        Ok(Outcome::done((), vec![Change::new("status", before.as_str(), after.as_str())]))
    };
    audited(app, operator, action, work).await?;
    Ok(Json(RefundResponse { status: PaymentStatus::Refunded }))
}

//! Payments: callbacks of a provider, and paying without one in demos and tests.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use serde::Serialize;
use stampede_core::{Code, OrderId, PaymentStatus, RefundReason};
use stampede_engine::Error;
use stampede_limit::rate_limit_key;
use utoipa::ToSchema;

use crate::app::App;
use crate::extract::{ClientAddress, CurrentUser, Id, Json, RawBody, run_detached};
use crate::orders::OrderResponse;
use crate::problem::Problem;

/// The header with the signature of a callback.
const SIGNATURE: &str = "x-stampede-signature";

/// The body of a callback, for the documentation. The signature covers its bytes, so it is read later.
#[derive(ToSchema)]
#[expect(dead_code, reason = "only its schema is used")]
pub(crate) struct PaymentCallback {
    /// Unique; a repeated callback with the same content changes nothing and gets the same answer, whatever has become of the payment since.
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    transaction_id: String,
    order_id: OrderId,
    #[schema(minimum = 0)]
    amount_cents: i64,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct PaymentResponse {
    status: PaymentStatus,
    /// Why the payment cannot pay its order, and is returned; null if it has paid it.
    reason: Option<RefundReason>,
    /// The new order of the same buyer that it has paid, if it came after the reported one had ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    order_id: Option<OrderId>,
}

/// The title of the code says to log in, which a provider cannot.
fn not_signed() -> Problem {
    Problem::new(Code::Unauthorized).detail("the header x-stampede-signature is missing, not valid, or too old")
}

/// Reports a payment. The header `x-stampede-signature` is `t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256 of `SECONDS.BODY`.
#[utoipa::path(post, path = "/v1/payments/callback", tag = "payments", request_body = PaymentCallback,
    params(("x-stampede-signature" = String, Header, description = "`t=SECONDS,v1=HEX`")),
    responses((status = 200, description = "Recorded, now or before", body = PaymentResponse), (status = 401, description = "`unauthorized`: the signature is not valid, or too old"), (status = 409, description = "`request_id_reused`: another payment has this transaction id")))]
pub(crate) async fn callback(
    State(app): State<Arc<App>>,
    ClientAddress(address): ClientAddress,
    headers: HeaderMap,
    body: Result<RawBody, Problem>,
) -> Result<Json<PaymentResponse>, Problem> {
    let signature = headers.get(SIGNATURE).and_then(|value| value.to_str().ok());
    let is_signed = match (signature, &body) {
        (Some(signature), Ok(RawBody(body))) => app.engine.is_signed_callback(signature, body),
        _ => false,
    };
    // A provider reports all payments from few addresses. What it has signed is not limited; everything else is, before the ledger is asked.
    if !is_signed {
        app.limits.reads_per_address.check(rate_limit_key(address)).await.map_err(|wait| Error::Limited { wait })?;
    }
    let RawBody(body) = body?;
    let signature = signature.ok_or_else(not_signed)?.to_owned();
    let received = run_detached(async move { app.engine.receive_callback(&signature, &body).await }).await;
    let payment =
        received.map_err(|problem| if problem.code() == Code::Unauthorized { not_signed() } else { problem })?;
    let (status, reason) = payment.answer();
    Ok(Json(PaymentResponse { status, reason, order_id: payment.was_moved().then_some(payment.order) }))
}

/// Pays an order without a provider. Only in demos and tests.
#[utoipa::path(post, path = "/v1/orders/{id}/pay", tag = "payments", responses((status = 200, description = "Paid", body = OrderResponse), (status = 409, description = "`illegal_step`")), security(("buyer" = [])))]
pub(crate) async fn pay(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(id): Id<OrderId>,
) -> Result<Json<OrderResponse>, Problem> {
    let order = run_detached(async move { app.engine.pay_for_test(id, user).await }).await?;
    Ok(Json(OrderResponse::new(&order, None)))
}

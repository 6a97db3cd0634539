//! Routes for load tests, served only if the settings allow it: a no-op, and sessions without login codes.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stampede_core::UserId;
use stampede_engine::{Action, Change, Outcome};
use utoipa::ToSchema;

use crate::admin::audited;
use crate::app::App;
use crate::buy::json_response;
use crate::extract::{Json, Operator};
use crate::orders::OrderResponse;
use crate::problem::Problem;

pub(crate) const NOOP: &str = "/load-test/noop";

/// Has the length of the body of a new order.
const BODY: &str = concat!(
    r#"{"id":"645112373996158977","sale_id":"645112373996158976","status":"unpaid","price_cents":100,"#,
    r#""created_at":"2026-01-01T00:00:00.000Z","updated_at":"2026-01-01T00:00:00.000Z","already":false}"#
);
const LOCATION: HeaderValue = HeaderValue::from_static("/v1/orders/645112373996158977");

/// Whether a request is the no-op, which takes the fast path as buying does.
pub(crate) fn is_noop(method: &Method, uri: &Uri) -> bool {
    method == Method::POST && uri.path() == NOOP
}

/// The response of the no-op.
pub(crate) fn respond(app: &App) -> Response {
    let started = Instant::now();
    let response = json_response(StatusCode::OK, Body::from(BODY), Some(LOCATION));
    app.http_metrics.noop().record(started.elapsed());
    response
}

/// Does nothing and responds as buying does: measures what a request costs before any work is done for it.
#[utoipa::path(post, path = "/load-test/noop", tag = "load test", responses((status = 200, description = "A fixed order", body = OrderResponse)))]
pub(crate) async fn noop(State(app): State<Arc<App>>) -> Response {
    respond(&app)
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TestBuyers {
    /// The number of the first test buyer. The same number always is the same user.
    #[schema(minimum = 0, maximum = 10_000_000)]
    first: u32,
    #[schema(minimum = 1, maximum = 10_000)]
    count: u32,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TestSession {
    user_id: UserId,
    token: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct TestSessionsResponse {
    sessions: Vec<TestSession>,
}

/// Opens sessions for test buyers without login codes.
#[utoipa::path(post, path = "/admin/v1/load-test/sessions", tag = "load test", request_body = TestBuyers,
    responses((status = 200, description = "Ordered by number", body = TestSessionsResponse)))]
pub(crate) async fn sessions(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(buyers): Json<TestBuyers>,
) -> Result<Json<TestSessionsResponse>, Problem> {
    if buyers.first > 10_000_000 {
        return Err(Problem::invalid("first", "must be at most 10000000"));
    }
    if !(1..=10_000).contains(&buyers.count) {
        return Err(Problem::invalid("count", "must be between 1 and 10000"));
    }
    let TestBuyers { first, count } = buyers;
    let action = Action::new("open_test_sessions", "test buyers".to_owned()).with_request(json!(buyers));
    let work = move |app: Arc<App>| async move {
        let sessions = app.engine.open_test_sessions(first, count).await?;
        let change = Change::new("sessions", Value::Null, sessions.len());
        Ok(Outcome::done(sessions, vec![change]))
    };
    let sessions = audited(app, operator, action, work).await?;
    let sessions = sessions.into_iter().map(|(user_id, token)| TestSession { user_id, token }).collect();
    Ok(Json(TestSessionsResponse { sessions }))
}

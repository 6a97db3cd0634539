//! For load tests, and there only if the settings allow it: a route that does nothing, and sessions without codes.

use std::sync::Arc;

use axum::Json as Answer;
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
use crate::extract::{Json, Operator};
use crate::orders::{self, OrderAnswer};
use crate::problem::Problem;

pub(crate) const NOOP: &str = "/load-test/noop";

/// As long as the body of a new order.
const BODY: &str = concat!(
    r#"{"id":"645112373996158977","sale_id":"645112373996158976","status":"unpaid","price_cents":100,"#,
    r#""created_at":"2026-01-01T00:00:00.000Z","updated_at":"2026-01-01T00:00:00.000Z","already":false}"#
);
const LOCATION: HeaderValue = HeaderValue::from_static("/v1/orders/645112373996158977");

/// Is this request the no-op? It takes the path that buying takes, past the router.
pub(crate) fn wanted(method: &Method, uri: &Uri) -> bool {
    method == Method::POST && uri.path() == NOOP
}

/// The response of the no-op.
pub(crate) fn respond() -> Response {
    orders::respond(StatusCode::OK, Body::from(BODY), Some(LOCATION))
}

/// Does nothing, and answers as an order is answered: what a request costs before anything is done for it.
#[utoipa::path(post, path = "/load-test/noop", tag = "load test", responses((status = 200, description = "A fixed order", body = OrderAnswer)))]
pub(crate) async fn noop() -> Response {
    respond()
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TestBuyers {
    /// The number of the first; the same number is the same person every time.
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
pub(crate) struct TestSessionsAnswer {
    sessions: Vec<TestSession>,
}

/// Logs test buyers in, without codes.
#[utoipa::path(post, path = "/admin/v1/load-test/sessions", tag = "load test", request_body = TestBuyers,
    responses((status = 200, description = "In the order of their numbers", body = TestSessionsAnswer)))]
pub(crate) async fn sessions(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(buyers): Json<TestBuyers>,
) -> Result<Answer<TestSessionsAnswer>, Problem> {
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
        let opened = Change::new("sessions", Value::Null, sessions.len());
        Ok(Outcome::done(sessions, vec![opened]))
    };
    let sessions = audited(app, operator, action, work).await?;
    let sessions = sessions.into_iter().map(|(user_id, token)| TestSession { user_id, token }).collect();
    Ok(Answer(TestSessionsAnswer { sessions }))
}

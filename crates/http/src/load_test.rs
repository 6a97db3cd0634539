//! For load tests, and there only if the settings allow it: a route that does nothing, and sessions without codes.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stampede_core::UserId;
use stampede_engine::{Action, Change, Outcome};
use utoipa::ToSchema;

use crate::admin::audited;
use crate::app::App;
use crate::extract::{Json, Operator};
use crate::problem::Problem;

/// Does nothing: what a request costs before anything is done for it.
#[utoipa::path(get, path = "/load-test/noop", tag = "load test", responses((status = 200, description = "Nothing", body = String)))]
pub(crate) async fn noop() -> &'static str {
    "ok\n"
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

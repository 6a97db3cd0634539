//! What administrators do. Every change is in the audit log before it is made.

pub(crate) mod audit;
pub(crate) mod dead_letters;
pub(crate) mod events;
pub(crate) mod gate;
pub(crate) mod orders;
pub(crate) mod quarantine;
pub(crate) mod reconcile;
pub(crate) mod sales;
pub(crate) mod shops;
pub(crate) mod users;
pub(crate) mod vouchers;

use std::sync::Arc;

use axum::http::StatusCode;
use stampede_engine::{Action, Error, Outcome};

use crate::app::App;
use crate::extract::{Json, Operator, run_detached};
use crate::problem::Problem;

type Created<T> = (StatusCode, Json<T>);

fn created<T>(body: T) -> Created<T> {
    (StatusCode::CREATED, Json(body))
}

/// Runs an operator's action to its end and records it in the audit log.
pub(crate) async fn audited<T, W>(
    app: Arc<App>,
    operator: Operator,
    action: Action,
    work: impl FnOnce(Arc<App>) -> W + Send + 'static,
) -> Result<T, Problem>
where
    T: Send + 'static,
    W: Future<Output = Result<Outcome<T>, Error>> + Send,
{
    run_detached(async move { app.engine.audited(&operator.0, action, work(app.clone())).await }).await
}

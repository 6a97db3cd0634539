//! Comparing the gate with the ledger.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stampede_core::ports::ReconcileRow;
use stampede_core::{OrderId, SaleId, Timestamp};
use stampede_engine::{Action, Outcome, Reconciled};
use utoipa::{IntoParams, ToSchema};

use super::audited;
use crate::app::App;
use crate::extract::{Json, Operator, Params, Viewer, run_detached};
use crate::pagination::{self, RowId, page_size};
use crate::problem::Problem;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReconcileParams {
    #[param(value_type = Option<String>, pattern = "^[1-9][0-9]{0,18}$")]
    before: Option<RowId>,
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

/// A difference between the gate and the ledger.
#[derive(Serialize, ToSchema)]
pub(crate) struct FindingResponse {
    /// The id of the line in the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Timestamp>,
    sale_id: SaleId,
    #[serde(skip_serializing_if = "Option::is_none")]
    order_id: Option<OrderId>,
    /// `mark_without_row`, `dead_row_with_mark`, `live_row_without_mark`, `old_version`, `newer_version`, `cap_differs` or `release_failed`.
    finding: String,
    detail: String,
    /// `repaired`; `failed`, and an alert was raised; or `reported` by a dry run.
    outcome: String,
}

impl From<ReconcileRow> for FindingResponse {
    fn from(row: ReconcileRow) -> Self {
        let ReconcileRow { id, at, sale, order, finding, detail, outcome } = row;
        Self { id: Some(id.to_string()), at: Some(at), sale_id: sale, order_id: order, finding, detail, outcome }
    }
}

impl From<Reconciled> for FindingResponse {
    fn from(found: Reconciled) -> Self {
        let Reconciled { sale, order, finding, detail, outcome } = found;
        let (finding, outcome) = (finding.to_owned(), outcome.to_owned());
        Self { id: None, at: None, sale_id: sale, order_id: order, finding, detail, outcome }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ReconcileLogResponse {
    findings: Vec<FindingResponse>,
    /// Pass it as `before` to get the next page; null on the last page.
    next: Option<String>,
}

/// What reconciling has found and done, newest first. Lines are kept for 90 days.
#[utoipa::path(get, path = "/admin/v1/reconcile", tag = "admin", params(ReconcileParams), responses((status = 200, description = "A page", body = ReconcileLogResponse)))]
pub(crate) async fn log(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<ReconcileParams>,
) -> Result<Json<ReconcileLogResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let rows = app.engine.reconcile_log(params.before.map(|before| before.0), limit).await?;
    let next = pagination::next(&rows, limit, |row| row.id.to_string());
    Ok(Json(ReconcileLogResponse { findings: rows.into_iter().map(Into::into).collect(), next }))
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReconcileRequest {
    /// Report what differs and change nothing.
    #[serde(default)]
    dry_run: bool,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ReconcileResponse {
    /// How many sales were compared.
    sales: usize,
    findings: Vec<FindingResponse>,
}

/// Compares the gate with the ledger, and repairs what differs for some seconds. Nodes do the same at intervals.
#[utoipa::path(post, path = "/admin/v1/reconcile", tag = "admin", request_body = ReconcileRequest, responses((status = 200, description = "What differed", body = ReconcileResponse), (status = 409, description = "`illegal_step`: the tier has no gate on a server")))]
pub(crate) async fn run(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(request): Json<ReconcileRequest>,
) -> Result<Json<ReconcileResponse>, Problem> {
    let report = if request.dry_run {
        run_detached(async move { app.engine.reconcile(true).await }).await?
    } else {
        let work = |app: Arc<App>| async move { Ok(Outcome::done(app.engine.reconcile(false).await?, Vec::new())) };
        audited(app, operator, Action::new("reconcile", "gate".to_owned()).with_request(json!(request)), work).await?
    };
    Ok(Json(ReconcileResponse { sales: report.sales, findings: report.findings.into_iter().map(Into::into).collect() }))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct RebuildResponse {
    /// How long it took. Sales were closed for less than that.
    ms: u64,
    /// How many sales stay closed, because their orders cannot be recorded or read now. They are tried again.
    closed_sales: usize,
}

/// Rebuilds the gate from the ledger. Sales are closed meanwhile.
#[utoipa::path(post, path = "/admin/v1/gate/rebuild", tag = "admin", responses((status = 200, description = "Rebuilt", body = RebuildResponse), (status = 409, description = "`illegal_step`: the tier has no gate on a server"), (status = 503, description = "`unavailable`: another node rebuilds it, or a server does not answer")))]
pub(crate) async fn rebuild(State(app): State<Arc<App>>, operator: Operator) -> Result<Json<RebuildResponse>, Problem> {
    let started = Instant::now();
    let work = |app: Arc<App>| async move { Ok(Outcome::done(app.engine.rebuild_gate().await?, Vec::new())) };
    let closed_sales = audited(app, operator, Action::new("rebuild", "gate".to_owned()), work).await?;
    let ms = started.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
    Ok(Json(RebuildResponse { ms, closed_sales }))
}

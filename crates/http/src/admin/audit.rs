//! Reading the audit log.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stampede_core::Timestamp;
use stampede_core::ports::AuditFilter;
use stampede_engine::{AuditRecord, Change};
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{Json, Params, Viewer};
use crate::pagination::{self, RowId, page_size};
use crate::problem::Problem;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct AuditParams {
    /// Only actions on this target, or that created it, such as `sale 12`, `voucher 7` or `shop 3`.
    #[param(min_length = 1, max_length = 128)]
    target: Option<String>,
    #[param(value_type = Option<String>, pattern = "^[1-9][0-9]{0,18}$")]
    before: Option<RowId>,
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ChangeResponse {
    field: String,
    /// Null if the action created the target.
    from: Value,
    to: Value,
}

impl From<Change> for ChangeResponse {
    fn from(change: Change) -> Self {
        let Change { field, from, to } = change;
        Self { field, from, to }
    }
}

/// An action of an administrator, with its outcome.
#[derive(Serialize, ToSchema)]
pub(crate) struct ActionResponse {
    id: String,
    /// The name of the administrator's token.
    actor: String,
    /// The address that the request came from.
    address: String,
    /// The `x-request-id` of the request, as in its response and in the server's log.
    request_id: String,
    action: String,
    /// What the action changed; for a creation, the parent.
    target: String,
    asked_at: Timestamp,
    /// The requested values.
    request: Value,
    /// `done`; `unchanged` if the target already had the requested values; otherwise the code of the refusal. `outcome_unknown`: the
    /// ledger did not confirm the change. Null while the action is in progress, or if the server stopped before it could write the
    /// outcome: check the target.
    outcome: Option<String>,
    finished_at: Option<Timestamp>,
    /// What was created, such as `sale 12`.
    made: Option<String>,
    /// The changed fields.
    changes: Vec<ChangeResponse>,
    /// Why the action was refused or failed.
    error: Option<String>,
}

impl From<AuditRecord> for ActionResponse {
    fn from(record: AuditRecord) -> Self {
        let AuditRecord { id, asked_at, actor, address, request_id, action, target, request, outcome } = record;
        let (finished_at, word, made, changes, error) = match outcome {
            Some(end) => (Some(end.at), Some(end.word), end.created, end.changes, end.error),
            None => (None, None, None, Vec::new(), None),
        };
        let changes = changes.into_iter().map(ChangeResponse::from).collect();
        Self {
            id: id.to_string(),
            actor,
            address,
            request_id,
            action,
            target,
            asked_at,
            request,
            outcome: word,
            finished_at,
            made,
            changes,
            error,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct AuditLogResponse {
    actions: Vec<ActionResponse>,
    /// Pass it as `before` to get the next page; null on the last page.
    next: Option<String>,
}

/// The actions of administrators with their outcomes, newest first.
#[utoipa::path(get, path = "/admin/v1/audit", operation_id = "audit", tag = "admin", params(AuditParams), responses((status = 200, description = "A page", body = AuditLogResponse)))]
pub(crate) async fn log(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<AuditParams>,
) -> Result<Json<AuditLogResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let target = params.target.as_deref();
    if target.is_some_and(|target| !(1..=128).contains(&target.chars().count()) || target.contains('\0')) {
        return Err(Problem::invalid("target", "must have 1 to 128 characters"));
    }
    let filter = AuditFilter { target, before: params.before.map(|id| id.0), limit };
    let records = app.engine.audit_log(filter).await?;
    let next = pagination::next(&records, limit, |record| record.id.to_string());
    Ok(Json(AuditLogResponse { actions: records.into_iter().map(ActionResponse::from).collect(), next }))
}

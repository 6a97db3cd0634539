//! The audit log, as administrators read it.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stampede_core::Timestamp;
use stampede_core::ids::NotAnId;
use stampede_core::ports::AuditFilter;
use stampede_engine::{AuditRecord, Change};
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{Params, Viewer};
use crate::problem::Problem;
use crate::sales::page_size;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct AuditParams {
    /// Only what is about this, or has made this, such as `sale 12`, `voucher 7` or `shop 3`.
    #[param(min_length = 1, max_length = 128)]
    target: Option<String>,
    #[param(value_type = Option<String>, pattern = "^[1-9][0-9]{0,18}$")]
    before: Option<ActionId>,
    /// How many on a page; 20 without it.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

/// The id of an action, as text like every id.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
struct ActionId(i64);

impl TryFrom<String> for ActionId {
    type Error = NotAnId;

    fn try_from(text: String) -> Result<Self, NotAnId> {
        text.parse().ok().filter(|id| *id > 0).map(Self).ok_or(NotAnId)
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ChangeAnswer {
    field: String,
    /// Null in what was made.
    from: Value,
    to: Value,
}

impl From<Change> for ChangeAnswer {
    fn from(change: Change) -> Self {
        let Change { field, from, to } = change;
        Self { field, from, to }
    }
}

/// An action of an administrator, and what came of it.
#[derive(Serialize, ToSchema)]
pub(crate) struct ActionAnswer {
    id: String,
    /// Who: the name of the administrator's token.
    actor: String,
    /// The address that the request came from.
    address: String,
    /// The `x-request-id` of the request, as in its answer and in the server's log.
    request_id: String,
    action: String,
    /// What it is about; of a creation the parent.
    target: String,
    asked_at: Timestamp,
    /// The values that were asked for.
    request: Value,
    /// `done`; `unchanged`: it was so already; otherwise the code of the refusal. `outcome_unknown`: the ledger did not say whether it
    /// was done. Null while it is under way, or if the server stopped before it could write the outcome: compare with what is there.
    outcome: Option<String>,
    finished_at: Option<Timestamp>,
    /// What was made, such as `sale 12`.
    made: Option<String>,
    /// From what to what.
    changes: Vec<ChangeAnswer>,
    /// Why it was refused or failed.
    error: Option<String>,
}

impl From<AuditRecord> for ActionAnswer {
    fn from(record: AuditRecord) -> Self {
        let AuditRecord { id, asked_at, actor, address, request_id, action, target, request, outcome } = record;
        let (finished_at, word, made, changes, error) = match outcome {
            Some(end) => (Some(end.at), Some(end.word), end.made, end.changes, end.error),
            None => (None, None, None, Vec::new(), None),
        };
        let changes = changes.into_iter().map(ChangeAnswer::from).collect();
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
pub(crate) struct AuditLogAnswer {
    actions: Vec<ActionAnswer>,
    /// Ask for the actions `before` this one to go on; null at the end.
    next: Option<String>,
}

/// What administrators have done, newest first: each action with its outcome.
#[utoipa::path(get, path = "/admin/v1/audit", operation_id = "audit", tag = "admin", params(AuditParams), responses((status = 200, description = "A page", body = AuditLogAnswer)))]
pub(crate) async fn log(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<AuditParams>,
) -> Result<Answer<AuditLogAnswer>, Problem> {
    let limit = page_size(params.limit)?;
    let target = params.target.as_deref();
    if target.is_some_and(|target| !(1..=128).contains(&target.chars().count()) || target.contains('\0')) {
        return Err(Problem::invalid("target", "must have 1 to 128 characters"));
    }
    let filter = AuditFilter { target, before: params.before.map(|id| id.0), limit };
    let records = app.engine.audit_log(filter).await?;
    let next = records.last().filter(|_| records.len() == limit as usize).map(|record| record.id.to_string());
    Ok(Answer(AuditLogAnswer { actions: records.into_iter().map(ActionAnswer::from).collect(), next }))
}

//! Messages of the queue that could not be read, or whose sale the database does not have.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_engine::{Action, Change, DeadLetter, DeadLetterId, Outcome};
use utoipa::{IntoParams, ToSchema};

use super::audited;
use crate::app::App;
use crate::extract::{Id, Json, Operator, Params, Viewer};
use crate::pagination::page_size;
use crate::problem::Problem;

/// The longest content that is shown.
const MAX_SHOWN: usize = 16 * 1024;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeadLettersParams {
    /// How many are listed, oldest first; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

/// A message that could not be read, or whose sale the database does not have.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeadLetterResponse {
    /// 16 hexadecimal digits, by its content.
    id: String,
    /// Why it is a dead letter.
    reason: String,
    /// Its length in bytes.
    bytes: usize,
}

impl From<&DeadLetter> for DeadLetterResponse {
    fn from(letter: &DeadLetter) -> Self {
        Self { id: letter.id.to_string(), reason: letter.reason.clone(), bytes: letter.bytes.len() }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct DeadLettersResponse {
    dead_letters: Vec<DeadLetterResponse>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct DeadLetterContentResponse {
    #[serde(flatten)]
    letter: DeadLetterResponse,
    /// Its first 16 KiB in hexadecimal digits.
    content: String,
}

/// The messages of the queue that could not be read, or whose sale the database does not have, oldest first.
#[utoipa::path(get, path = "/admin/v1/dead-letters", tag = "admin", params(DeadLettersParams), responses((status = 200, description = "The oldest ones", body = DeadLettersResponse), (status = 409, description = "`illegal_step`: the tier has no dead letters")))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<DeadLettersParams>,
) -> Result<Json<DeadLettersResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let letters = app.engine.dead_letters(limit as usize).await?;
    Ok(Json(DeadLettersResponse { dead_letters: letters.iter().map(Into::into).collect() }))
}

/// One of them, with its content.
#[utoipa::path(get, path = "/admin/v1/dead-letters/{id}", tag = "admin", responses((status = 200, description = "The message", body = DeadLetterContentResponse), (status = 404, description = "`not_found`: there is no such dead letter"), (status = 409, description = "`illegal_step`: the tier has no dead letters")))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<DeadLetterId>,
) -> Result<Json<DeadLetterContentResponse>, Problem> {
    let letter = app.engine.dead_letter(id).await?;
    let content = letter.bytes.iter().take(MAX_SHOWN).map(|byte| format!("{byte:02x}")).collect();
    Ok(Json(DeadLetterContentResponse { letter: (&letter).into(), content }))
}

/// What was done with a dead letter.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeadLetterOutcomeResponse {
    id: String,
    /// `queued`: it is in the queue again. `discarded`: it is gone.
    outcome: &'static str,
}

/// Puts a dead letter into the queue again. If it still cannot be read, it comes back.
#[utoipa::path(post, path = "/admin/v1/dead-letters/{id}/retry", tag = "admin", responses((status = 200, description = "In the queue again", body = DeadLetterOutcomeResponse), (status = 404, description = "`not_found`: there is no such dead letter"), (status = 409, description = "`illegal_step`: the tier has no dead letters")))]
pub(crate) async fn retry(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<DeadLetterId>,
) -> Result<Json<DeadLetterOutcomeResponse>, Problem> {
    let work = move |app: Arc<App>| async move {
        app.engine.retry_dead_letter(id).await?;
        Ok(Outcome::done((), vec![Change::new("message", "dead_letter", "queued")]))
    };
    audited(app, operator, Action::new("retry_dead_letter", format!("dead letter {id}")), work).await?;
    Ok(Json(DeadLetterOutcomeResponse { id: id.to_string(), outcome: "queued" }))
}

/// Removes a dead letter. Orders in it that have no row yet are still recorded from their marks.
#[utoipa::path(post, path = "/admin/v1/dead-letters/{id}/discard", tag = "admin", responses((status = 200, description = "Removed", body = DeadLetterOutcomeResponse), (status = 404, description = "`not_found`: there is no such dead letter"), (status = 409, description = "`illegal_step`: the tier has no dead letters")))]
pub(crate) async fn discard(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<DeadLetterId>,
) -> Result<Json<DeadLetterOutcomeResponse>, Problem> {
    let work = move |app: Arc<App>| async move {
        app.engine.discard_dead_letter(id).await?;
        Ok(Outcome::done((), vec![Change::new("message", "dead_letter", "discarded")]))
    };
    audited(app, operator, Action::new("discard_dead_letter", format!("dead letter {id}")), work).await?;
    Ok(Json(DeadLetterOutcomeResponse { id: id.to_string(), outcome: "discarded" }))
}

//! The marks of a gate, one by one, for whoever compares them with the ledger.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::{OrderId, SaleId, UserId};
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{Id, Params, Viewer};
use crate::problem::Problem;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct MarksParams {
    after: Option<UserId>,
    /// How many on a page; 1,000 without it.
    #[param(minimum = 1, maximum = 100_000)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct MarkAnswer {
    user_id: UserId,
    order_id: OrderId,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct MarksAnswer {
    marks: Vec<MarkAnswer>,
    /// Ask for the marks `after` this user to go on; null at the end.
    next: Option<UserId>,
}

/// The marks that the gate of this node holds of a sale now, in the order of their users.
#[utoipa::path(get, path = "/admin/v1/sales/{id}/marks", tag = "admin", params(MarksParams), responses((status = 200, description = "A page, at one moment", body = MarksAnswer)))]
pub(crate) async fn marks(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
    Params(params): Params<MarksParams>,
) -> Result<Answer<MarksAnswer>, Problem> {
    let limit = params.limit.unwrap_or(1_000);
    if !(1..=100_000).contains(&limit) {
        return Err(Problem::invalid("limit", "must be between 1 and 100000"));
    }
    let marks = app.engine.marks(id, params.after, limit as usize).await?;
    let next = marks.last().filter(|_| marks.len() == limit as usize).map(|(user, _)| *user);
    let marks = marks.into_iter().map(|(user_id, order_id)| MarkAnswer { user_id, order_id }).collect();
    Ok(Answer(MarksAnswer { marks, next }))
}

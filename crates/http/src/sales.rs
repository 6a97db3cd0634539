//! Sales, as visitors see them.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::{SaleId, SaleState, Timestamp, VoucherId};
use stampede_engine::SaleView;

use crate::app::App;
use crate::extract::{Id, Params};
use crate::problem::Problem;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    state: Option<SaleState>,
    before: Option<SaleId>,
    limit: Option<u32>,
}

#[derive(Serialize)]
pub(crate) struct SaleAnswer {
    id: SaleId,
    voucher_id: VoucherId,
    title: String,
    price_cents: i64,
    worth_cents: i64,
    state: Option<SaleState>,
    begin: Timestamp,
    end: Timestamp,
    total: u32,
    remaining: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_time: Option<Timestamp>,
}

impl SaleAnswer {
    pub(crate) fn new(view: &SaleView, server_time: Option<Timestamp>) -> Self {
        let SaleView { sale, state, remaining } = view;
        Self {
            id: sale.id,
            voucher_id: sale.voucher,
            title: sale.title.clone(),
            price_cents: sale.price.cents(),
            worth_cents: sale.worth.cents(),
            state: *state,
            begin: sale.window.begin,
            end: sale.window.end,
            total: sale.total,
            remaining: *remaining,
            server_time,
        }
    }
}

#[derive(Serialize)]
pub(crate) struct ListAnswer {
    server_time: Timestamp,
    sales: Vec<SaleAnswer>,
}

/// A page of at most 100.
pub(crate) fn page_size(limit: Option<u32>) -> Result<u32, Problem> {
    match limit.unwrap_or(20) {
        limit @ 1..=100 => Ok(limit),
        _ => Err(Problem::invalid("limit", "must be between 1 and 100")),
    }
}

pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Params(params): Params<ListParams>,
) -> Result<Answer<ListAnswer>, Problem> {
    let views = app.engine.sales(params.state, params.before, page_size(params.limit)? as usize);
    let sales = views.iter().map(|view| SaleAnswer::new(view, None)).collect();
    Ok(Answer(ListAnswer { server_time: app.engine.clock().now(), sales }))
}

pub(crate) async fn one(State(app): State<Arc<App>>, Id(id): Id<SaleId>) -> Result<Answer<SaleAnswer>, Problem> {
    let view = app.engine.sale(id)?;
    Ok(Answer(SaleAnswer::new(&view, Some(app.engine.clock().now()))))
}

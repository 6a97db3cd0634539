//! Sales, as visitors see them.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::{SaleId, SaleState, SaleStatus, Timestamp, VoucherId};
use stampede_engine::SaleView;
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{Id, Json, Params, Visitor};
use crate::pagination::page_size;
use crate::problem::Problem;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct SalesParams {
    state: Option<SaleState>,
    before: Option<SaleId>,
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SaleResponse {
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
    /// How long an order may be unpaid before it is cancelled; 0 without a limit.
    payment_deadline_ms: u32,
    /// Whether a buyer whose order has ended may buy again.
    buy_again: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_time: Option<Timestamp>,
    /// Only for administrators.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<SaleStatus>,
    /// Only for administrators.
    #[serde(rename = "ver", skip_serializing_if = "Option::is_none")]
    version: Option<i64>,
    /// Only for administrators.
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<i64>,
}

impl SaleResponse {
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
            payment_deadline_ms: sale.payment_deadline_ms,
            buy_again: sale.buy_again,
            server_time,
            status: None,
            version: None,
            epoch: None,
        }
    }

    /// With the members that only administrators see.
    pub(crate) fn for_admin(view: &SaleView) -> Self {
        let sale = &view.sale;
        let (status, version, epoch) = (Some(sale.status), Some(sale.version), Some(sale.epoch.0));
        Self { status, version, epoch, ..Self::new(view, None) }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SalesResponse {
    server_time: Timestamp,
    sales: Vec<SaleResponse>,
}

/// All published sales, newest first.
#[utoipa::path(get, path = "/v1/sales", tag = "sales", params(SalesParams), responses((status = 200, description = "A page", body = SalesResponse)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Visitor,
    Params(params): Params<SalesParams>,
) -> Result<Json<SalesResponse>, Problem> {
    let views = app.engine.sales(params.state, params.before, page_size(params.limit)? as usize);
    let sales = views.iter().map(|view| SaleResponse::new(view, None)).collect();
    Ok(Json(SalesResponse { server_time: app.engine.clock().now(), sales }))
}

/// One sale, with the server's clock.
#[utoipa::path(get, path = "/v1/sales/{id}", tag = "sales", responses((status = 200, description = "The sale", body = SaleResponse)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Visitor,
    Id(id): Id<SaleId>,
) -> Result<Json<SaleResponse>, Problem> {
    let view = app.engine.sale(id).await?;
    Ok(Json(SaleResponse::new(&view, Some(app.engine.clock().now()))))
}

//! Sales, as administrators see and change them.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stampede_core::{NewSale, SaleId, SaleStatus, Timestamp, WindowChange};
use stampede_engine::{Action, Outcome};
use utoipa::{IntoParams, ToSchema};

use super::{Created, audited, created};
use crate::app::App;
use crate::extract::{Id, Json, Operator, OptionalJson, Params, Viewer};
use crate::pagination::page_size;
use crate::problem::Problem;
use crate::sales::SaleResponse;

/// Creates a sale of a voucher.
#[utoipa::path(post, path = "/admin/v1/sales", tag = "admin", request_body = NewSale, responses((status = 201, description = "Created", body = SaleResponse), (status = 404, description = "`no_such_voucher`"), (status = 409, description = "`sale_exists`, or `illegal_step` if the voucher is not one for flash sales")))]
pub(crate) async fn create_sale(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewSale>,
) -> Result<Created<SaleResponse>, Problem> {
    let action = Action::new("create_sale", format!("voucher {}", new.voucher_id)).with_request(json!(new));
    let work = move |app: Arc<App>| async move {
        let view = app.engine.create_sale(new).await?;
        let sale = view.sale.clone();
        Ok(Outcome::created(view, sale.as_ref()))
    };
    let view = audited(app, operator, action, work).await?;
    Ok(created(SaleResponse::for_admin(&view)))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllSalesParams {
    before: Option<SaleId>,
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct AllSalesResponse {
    sales: Vec<SaleResponse>,
}

/// All sales, newest first.
#[utoipa::path(get, path = "/admin/v1/sales", tag = "admin", params(AllSalesParams), responses((status = 200, description = "A page", body = AllSalesResponse)))]
pub(crate) async fn list_sales(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<AllSalesParams>,
) -> Result<Json<AllSalesResponse>, Problem> {
    let views = app.engine.all_sales(params.before, page_size(params.limit)? as usize);
    Ok(Json(AllSalesResponse { sales: views.iter().map(SaleResponse::for_admin).collect() }))
}

/// One sale.
#[utoipa::path(get, path = "/admin/v1/sales/{id}", tag = "admin", responses((status = 200, description = "The sale", body = SaleResponse)))]
pub(crate) async fn one_sale(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<SaleId>,
) -> Result<Json<SaleResponse>, Problem> {
    Ok(Json(SaleResponse::for_admin(&app.engine.any_sale(id)?)))
}

/// May be left out: then the request is carried out each time.
#[derive(Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StatusEdit {
    /// Identifies this request: a repeated request changes nothing, even if the sale was edited since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    request_id: Option<String>,
}

async fn set_status(
    app: Arc<App>,
    operator: Operator,
    name: &'static str,
    id: SaleId,
    status: SaleStatus,
    edit: StatusEdit,
) -> Result<Json<SaleResponse>, Problem> {
    if let Some(request_id) = &edit.request_id {
        check_request_id(request_id)?;
    }
    let action = Action::new(name, format!("sale {id}")).with_request(json!(edit));
    let work =
        move |app: Arc<App>| async move { app.engine.set_sale_status(id, status, edit.request_id.as_deref()).await };
    let view = audited(app, operator, action, work).await?;
    Ok(Json(SaleResponse::for_admin(&view)))
}

/// Pauses a sale.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/pause", tag = "admin", request_body = Option<StatusEdit>, responses((status = 200, description = "Paused, or as it is now if the request is a repetition", body = SaleResponse), (status = 409, description = "`illegal_step` or `request_id_reused`")))]
pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    OptionalJson(edit): OptionalJson<StatusEdit>,
) -> Result<Json<SaleResponse>, Problem> {
    set_status(app, operator, "pause", id, SaleStatus::Paused, edit).await
}

/// Resumes a paused sale, or publishes a draft.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/resume", tag = "admin", request_body = Option<StatusEdit>, responses((status = 200, description = "On sale, or as it is now if the request is a repetition", body = SaleResponse), (status = 409, description = "`illegal_step` or `request_id_reused`")))]
pub(crate) async fn resume(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    OptionalJson(edit): OptionalJson<StatusEdit>,
) -> Result<Json<SaleResponse>, Problem> {
    set_status(app, operator, "resume", id, SaleStatus::OnSale, edit).await
}

/// Ends a sale. It cannot be resumed.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/end", tag = "admin", request_body = Option<StatusEdit>, responses((status = 200, description = "Ended", body = SaleResponse), (status = 409, description = "`illegal_step` or `request_id_reused`")))]
pub(crate) async fn end(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    OptionalJson(edit): OptionalJson<StatusEdit>,
) -> Result<Json<SaleResponse>, Problem> {
    set_status(app, operator, "end", id, SaleStatus::Ended, edit).await
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WindowEdit {
    /// The new begin, while the sale has not begun; without it, the begin stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    begin: Option<Timestamp>,
    /// The new end, in the future; without it, the end stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<Timestamp>,
    /// Identifies this request: a repeated request changes nothing, even if the sale was edited since.
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    request_id: String,
}

/// Changes when a sale ends, and until its begin also when it begins. A repeated request with the same request id changes nothing.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/window", tag = "admin", request_body = WindowEdit, responses((status = 200, description = "Changed, or as it is now if the request is a repetition", body = SaleResponse), (status = 409, description = "`illegal_step`: the sale has ended, or has begun and another begin was given; the new end is not in the future, or not after the begin; or `request_id_reused`")))]
pub(crate) async fn edit_window(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    Json(edit): Json<WindowEdit>,
) -> Result<Json<SaleResponse>, Problem> {
    check_request_id(&edit.request_id)?;
    let action = Action::new("edit_window", format!("sale {id}")).with_request(json!(edit));
    let change = WindowChange { begin: edit.begin, end: edit.end };
    let work = move |app: Arc<App>| async move { app.engine.set_sale_window(id, change, &edit.request_id).await };
    let view = audited(app, operator, action, work).await?;
    Ok(Json(SaleResponse::for_admin(&view)))
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TopUp {
    #[schema(minimum = 1, maximum = 10_000_000)]
    add: u32,
    /// Identifies this request: a repeated request adds nothing.
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    request_id: String,
}

fn check_request_id(request_id: &str) -> Result<(), Problem> {
    if (1..=64).contains(&request_id.len()) && request_id.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(());
    }
    Err(Problem::invalid("request_id", "must have 1 to 64 visible ASCII characters"))
}

/// Adds to the stock. A repeated request with the same request id adds nothing.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/top-ups", tag = "admin", request_body = TopUp, responses((status = 200, description = "Added", body = SaleResponse), (status = 409, description = "`illegal_step` or `request_id_reused`")))]
pub(crate) async fn top_up(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    Json(top_up): Json<TopUp>,
) -> Result<Json<SaleResponse>, Problem> {
    check_request_id(&top_up.request_id)?;
    let action = Action::new("top_up", format!("sale {id}")).with_request(json!(top_up));
    let work = move |app: Arc<App>| async move { app.engine.top_up(id, top_up.add, &top_up.request_id).await };
    let view = audited(app, operator, action, work).await?;
    Ok(Json(SaleResponse::for_admin(&view)))
}

#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reduction {
    #[schema(minimum = 1, maximum = 10_000_000)]
    remove: u32,
    /// Identifies this request: a repeated request takes nothing away.
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]*$")]
    request_id: String,
}

/// Takes from the stock, but nothing that is sold. A repeated request with the same request id takes nothing away.
#[utoipa::path(post, path = "/admin/v1/sales/{id}/reduce", tag = "admin", request_body = Reduction, responses((status = 200, description = "Reduced", body = SaleResponse), (status = 409, description = "`illegal_step` or `request_id_reused`")))]
pub(crate) async fn reduce(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<SaleId>,
    Json(reduction): Json<Reduction>,
) -> Result<Json<SaleResponse>, Problem> {
    check_request_id(&reduction.request_id)?;
    let action = Action::new("reduce", format!("sale {id}")).with_request(json!(reduction));
    let work = move |app: Arc<App>| async move { app.engine.reduce(id, reduction.remove, &reduction.request_id).await };
    let view = audited(app, operator, action, work).await?;
    Ok(Json(SaleResponse::for_admin(&view)))
}

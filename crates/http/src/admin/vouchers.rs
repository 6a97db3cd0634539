//! Vouchers, as administrators see and change them.

use std::sync::Arc;

use axum::extract::State;
use serde_json::json;
use stampede_core::{NewVoucher, ShopId, VoucherId};
use stampede_engine::{Action, Outcome};

use super::{Created, audited, created};
use crate::app::App;
use crate::extract::{Id, Json, Operator, Viewer};
use crate::problem::Problem;
use crate::shops::{VoucherResponse, VouchersResponse};

/// All vouchers of a shop, including those off the shelf.
#[utoipa::path(get, path = "/admin/v1/shops/{id}/vouchers", tag = "admin", responses((status = 200, description = "All", body = VouchersResponse)))]
pub(crate) async fn all_vouchers(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<ShopId>,
) -> Result<Json<VouchersResponse>, Problem> {
    Ok(Json(app.engine.all_vouchers_of(id).await?.into()))
}

/// Creates a voucher.
#[utoipa::path(post, path = "/admin/v1/vouchers", tag = "admin", request_body = NewVoucher, responses((status = 201, description = "Created", body = VoucherResponse), (status = 404, description = "`no_such_shop`")))]
pub(crate) async fn create_voucher(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewVoucher>,
) -> Result<Created<VoucherResponse>, Problem> {
    let action = Action::new("create_voucher", format!("shop {}", new.shop_id)).with_request(json!(new));
    let work = move |app: Arc<App>| async move {
        let voucher = app.engine.create_voucher(new).await?;
        Ok(Outcome::created(voucher.clone(), &voucher))
    };
    Ok(created(audited(app, operator, action, work).await?.into()))
}

/// Changes a voucher.
#[utoipa::path(put, path = "/admin/v1/vouchers/{id}", tag = "admin", request_body = NewVoucher, responses((status = 200, description = "Changed", body = VoucherResponse), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn edit_voucher(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<VoucherId>,
    Json(new): Json<NewVoucher>,
) -> Result<Json<VoucherResponse>, Problem> {
    let action = Action::new("edit_voucher", format!("voucher {id}")).with_request(json!(new));
    let work = move |app: Arc<App>| async move { app.engine.edit_voucher(id, new).await };
    Ok(Json(audited(app, operator, action, work).await?.into()))
}

async fn set_shelf(
    app: Arc<App>,
    operator: Operator,
    name: &'static str,
    id: VoucherId,
    on_shelf: bool,
) -> Result<Json<VoucherResponse>, Problem> {
    let work = move |app: Arc<App>| async move { app.engine.shelve(id, on_shelf).await };
    Ok(Json(audited(app, operator, Action::new(name, format!("voucher {id}")), work).await?.into()))
}

/// Puts a voucher on the shelf.
#[utoipa::path(post, path = "/admin/v1/vouchers/{id}/shelve", tag = "admin", responses((status = 200, description = "On the shelf", body = VoucherResponse)))]
pub(crate) async fn shelve(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<VoucherId>,
) -> Result<Json<VoucherResponse>, Problem> {
    set_shelf(app, operator, "shelve", id, true).await
}

/// Takes a voucher off the shelf.
#[utoipa::path(post, path = "/admin/v1/vouchers/{id}/unshelve", tag = "admin", responses((status = 200, description = "Off the shelf", body = VoucherResponse)))]
pub(crate) async fn unshelve(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<VoucherId>,
) -> Result<Json<VoucherResponse>, Problem> {
    set_shelf(app, operator, "unshelve", id, false).await
}

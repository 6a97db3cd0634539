//! What administrators do: shops, vouchers, sales.

use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use stampede_core::{NewSale, NewShop, NewVoucher, SaleId, SaleStatus, ShopId, ShopTypeId, VoucherId, VoucherKind};
use stampede_engine::SaleView;

use crate::app::App;
use crate::extract::{Admin, Id, Json, Params, to_the_end};
use crate::problem::Problem;
use crate::sales::{SaleAnswer, page_size};

type Created<T> = (StatusCode, Answer<T>);

fn created<T>(made: T) -> Created<T> {
    (StatusCode::CREATED, Answer(made))
}

#[derive(Serialize)]
pub(crate) struct ShopAnswer {
    id: ShopId,
    type_id: ShopTypeId,
    name: String,
    address: String,
}

pub(crate) async fn create_shop(
    State(app): State<Arc<App>>,
    _: Admin,
    Json(new): Json<NewShop>,
) -> Result<Created<ShopAnswer>, Problem> {
    let shop = to_the_end(async move { app.engine.create_shop(new).await }).await?;
    Ok(created(ShopAnswer { id: shop.id, type_id: shop.type_id, name: shop.name, address: shop.address }))
}

#[derive(Serialize)]
pub(crate) struct VoucherAnswer {
    id: VoucherId,
    shop_id: ShopId,
    kind: VoucherKind,
    title: String,
    subtitle: String,
    rules: String,
    price_cents: i64,
    worth_cents: i64,
}

pub(crate) async fn create_voucher(
    State(app): State<Arc<App>>,
    _: Admin,
    Json(new): Json<NewVoucher>,
) -> Result<Created<VoucherAnswer>, Problem> {
    let voucher = to_the_end(async move { app.engine.create_voucher(new).await }).await?;
    Ok(created(VoucherAnswer {
        id: voucher.id,
        shop_id: voucher.shop,
        kind: voucher.kind,
        title: voucher.title,
        subtitle: voucher.subtitle,
        rules: voucher.rules,
        price_cents: voucher.price.cents(),
        worth_cents: voucher.worth.cents(),
    }))
}

/// A sale with what only administrators see.
#[derive(Serialize)]
pub(crate) struct AdminSaleAnswer {
    #[serde(flatten)]
    sale: SaleAnswer,
    status: SaleStatus,
    ver: i64,
}

impl AdminSaleAnswer {
    fn new(view: &SaleView) -> Self {
        Self { sale: SaleAnswer::new(view, None), status: view.sale.status, ver: view.sale.ver }
    }
}

pub(crate) async fn create_sale(
    State(app): State<Arc<App>>,
    _: Admin,
    Json(new): Json<NewSale>,
) -> Result<Created<AdminSaleAnswer>, Problem> {
    let view = to_the_end(async move { app.engine.create_sale(new).await }).await?;
    Ok(created(AdminSaleAnswer::new(&view)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListParams {
    before: Option<SaleId>,
    limit: Option<u32>,
}

#[derive(Serialize)]
pub(crate) struct ListAnswer {
    sales: Vec<AdminSaleAnswer>,
}

pub(crate) async fn list_sales(
    State(app): State<Arc<App>>,
    _: Admin,
    Params(params): Params<ListParams>,
) -> Result<Answer<ListAnswer>, Problem> {
    let views = app.engine.all_sales(params.before, page_size(params.limit)? as usize);
    Ok(Answer(ListAnswer { sales: views.iter().map(AdminSaleAnswer::new).collect() }))
}

pub(crate) async fn one_sale(
    State(app): State<Arc<App>>,
    _: Admin,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    Ok(Answer(AdminSaleAnswer::new(&app.engine.any_sale(id)?)))
}

async fn set_status(app: Arc<App>, id: SaleId, status: SaleStatus) -> Result<Answer<AdminSaleAnswer>, Problem> {
    let view = to_the_end(async move { app.engine.set_sale_status(id, status).await }).await?;
    Ok(Answer(AdminSaleAnswer::new(&view)))
}

pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    _: Admin,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    set_status(app, id, SaleStatus::Paused).await
}

/// Also publishes a draft.
pub(crate) async fn resume(
    State(app): State<Arc<App>>,
    _: Admin,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    set_status(app, id, SaleStatus::OnSale).await
}

pub(crate) async fn end(
    State(app): State<Arc<App>>,
    _: Admin,
    Id(id): Id<SaleId>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    set_status(app, id, SaleStatus::Ended).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TopUp {
    add: u32,
    /// Names this request: sent again, it adds nothing.
    request_id: String,
}

pub(crate) async fn top_up(
    State(app): State<Arc<App>>,
    _: Admin,
    Id(id): Id<SaleId>,
    Json(top_up): Json<TopUp>,
) -> Result<Answer<AdminSaleAnswer>, Problem> {
    let good = (1..=64).contains(&top_up.request_id.len()) && top_up.request_id.bytes().all(|b| b.is_ascii_graphic());
    if !good {
        return Err(Problem::invalid("request_id", "must have 1 to 64 visible ASCII characters"));
    }
    let view = to_the_end(async move { app.engine.top_up(id, top_up.add, &top_up.request_id).await }).await?;
    Ok(Answer(AdminSaleAnswer::new(&view)))
}

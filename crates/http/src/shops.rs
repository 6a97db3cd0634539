//! Shops and their vouchers: for visitors, and for administrators.

use std::sync::Arc;
use std::time::Duration;

use axum::Json as Answer;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stampede_core::ports::{ShopFilter, ShopPage};
use stampede_core::{NewShop, NewVoucher, Shop, ShopId, ShopTypeId, Voucher, VoucherId, VoucherKind};
use stampede_engine::{Action, Error, Outcome};
use tokio::sync::SemaphorePermit;
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

use crate::address::counted_as;
use crate::admin::{Created, audited, created};
use crate::app::App;
use crate::extract::{Id, Json, Operator, Params, Peer, Viewer, Visitor};
use crate::problem::Problem;
use crate::sales::page_size;

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopTypeAnswer {
    id: ShopTypeId,
    name: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopTypesAnswer {
    shop_types: Vec<ShopTypeAnswer>,
}

/// All types of shops.
#[utoipa::path(get, path = "/v1/shop-types", tag = "shops", responses((status = 200, description = "All", body = ShopTypesAnswer)))]
pub(crate) async fn types(State(app): State<Arc<App>>, _: Visitor) -> Result<Answer<ShopTypesAnswer>, Problem> {
    let types = app.engine.shop_types().await?;
    let shop_types = types.iter().map(|one| ShopTypeAnswer { id: one.id, name: one.name.clone() }).collect();
    Ok(Answer(ShopTypesAnswer { shop_types }))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopAnswer {
    id: ShopId,
    type_id: ShopTypeId,
    name: String,
    address: String,
}

impl From<Shop> for ShopAnswer {
    fn from(shop: Shop) -> Self {
        let Shop { id, type_id, name, address } = shop;
        Self { id, type_id, name, address }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShopsParams {
    r#type: Option<ShopTypeId>,
    /// A part of the name.
    #[param(min_length = 1, max_length = 64)]
    name: Option<String>,
    before: Option<ShopId>,
    /// How many on a page; 20 without it.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopsAnswer {
    shops: Vec<ShopAnswer>,
    /// Ask for the shops `before` this one to go on; null at the end. A search by name may give a short or empty page before the end.
    next: Option<ShopId>,
}

/// Shops, newest first, by type and by a part of the name.
#[utoipa::path(get, path = "/v1/shops", tag = "shops", params(ShopsParams), responses((status = 200, description = "A page", body = ShopsAnswer)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Visitor,
    peer: Peer,
    Params(params): Params<ShopsParams>,
) -> Result<Answer<ShopsAnswer>, Problem> {
    let limit = page_size(params.limit)?;
    let good = |name: &String| (1..=64).contains(&name.chars().count()) && !name.contains('\0');
    if params.name.as_ref().is_some_and(|name| !good(name)) {
        return Err(Problem::invalid("name", "must have 1 to 64 characters"));
    }
    let _permit = match &params.name {
        Some(_) => Some(permit_search(&app, peer).await?),
        None => None,
    };
    let filter = ShopFilter { type_id: params.r#type, name: params.name, before: params.before, limit };
    let ShopPage { shops, next } = app.engine.shops(&filter).await?;
    Ok(Answer(ShopsAnswer { shops: shops.into_iter().map(ShopAnswer::from).collect(), next }))
}

/// How long a search may wait for others to end.
const SEARCH_PATIENCE: Duration = Duration::from_secs(1);

/// A search costs the database more than any other read: one address may ask for few, and few run at a time.
async fn permit_search(app: &App, Peer(client): Peer) -> Result<SemaphorePermit<'_>, Error> {
    app.limits.searches_per_ip.check(counted_as(client)).map_err(|wait| Error::Limited { wait })?;
    let permit = timeout(SEARCH_PATIENCE, app.searches.acquire()).await;
    permit.ok().and_then(Result::ok).ok_or(Error::Busy)
}

/// One shop.
#[utoipa::path(get, path = "/v1/shops/{id}", tag = "shops", responses((status = 200, description = "The shop", body = ShopAnswer)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Visitor,
    Id(id): Id<ShopId>,
) -> Result<Answer<ShopAnswer>, Problem> {
    Ok(Answer(Shop::clone(&*app.engine.shop(id).await?).into()))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct VoucherAnswer {
    id: VoucherId,
    shop_id: ShopId,
    kind: VoucherKind,
    title: String,
    subtitle: String,
    rules: String,
    price_cents: i64,
    worth_cents: i64,
    on_shelf: bool,
}

impl From<Voucher> for VoucherAnswer {
    fn from(voucher: Voucher) -> Self {
        let Voucher { id, shop, kind, title, subtitle, rules, price, worth, on_shelf } = voucher;
        let (price_cents, worth_cents) = (price.cents(), worth.cents());
        Self { id, shop_id: shop, kind, title, subtitle, rules, price_cents, worth_cents, on_shelf }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct VouchersAnswer {
    vouchers: Vec<VoucherAnswer>,
}

impl From<Vec<Voucher>> for VouchersAnswer {
    fn from(vouchers: Vec<Voucher>) -> Self {
        Self { vouchers: vouchers.into_iter().map(VoucherAnswer::from).collect() }
    }
}

/// The vouchers of a shop that are on the shelf.
#[utoipa::path(get, path = "/v1/shops/{id}/vouchers", tag = "shops", responses((status = 200, description = "All", body = VouchersAnswer)))]
pub(crate) async fn vouchers(
    State(app): State<Arc<App>>,
    _: Visitor,
    Id(id): Id<ShopId>,
) -> Result<Answer<VouchersAnswer>, Problem> {
    Ok(Answer(app.engine.vouchers_of(id).await?.into()))
}

/// All vouchers of a shop, those off the shelf too.
#[utoipa::path(get, path = "/admin/v1/shops/{id}/vouchers", tag = "admin", responses((status = 200, description = "All", body = VouchersAnswer)))]
pub(crate) async fn all_vouchers(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<ShopId>,
) -> Result<Answer<VouchersAnswer>, Problem> {
    Ok(Answer(app.engine.all_vouchers_of(id).await?.into()))
}

/// Makes a shop.
#[utoipa::path(post, path = "/admin/v1/shops", tag = "admin", request_body = NewShop, responses((status = 201, description = "Made", body = ShopAnswer), (status = 404, description = "`no_such_shop_type`")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewShop>,
) -> Result<Created<ShopAnswer>, Problem> {
    let action = Action::new("create_shop", format!("shop type {}", new.type_id)).with_request(json!(new));
    let work = move |app: Arc<App>| async move {
        let shop = app.engine.create_shop(new).await?;
        Ok(Outcome::made(shop.clone(), &shop))
    };
    Ok(created(audited(app, operator, action, work).await?.into()))
}

/// Changes a shop.
#[utoipa::path(put, path = "/admin/v1/shops/{id}", tag = "admin", request_body = NewShop, responses((status = 200, description = "Changed", body = ShopAnswer)))]
pub(crate) async fn edit(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<ShopId>,
    Json(new): Json<NewShop>,
) -> Result<Answer<ShopAnswer>, Problem> {
    let action = Action::new("edit_shop", format!("shop {id}")).with_request(json!(new));
    let work = move |app: Arc<App>| async move { app.engine.edit_shop(id, new).await };
    Ok(Answer(audited(app, operator, action, work).await?.into()))
}

/// Makes a voucher.
#[utoipa::path(post, path = "/admin/v1/vouchers", tag = "admin", request_body = NewVoucher, responses((status = 201, description = "Made", body = VoucherAnswer), (status = 404, description = "`no_such_shop`")))]
pub(crate) async fn create_voucher(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewVoucher>,
) -> Result<Created<VoucherAnswer>, Problem> {
    let action = Action::new("create_voucher", format!("shop {}", new.shop_id)).with_request(json!(new));
    let work = move |app: Arc<App>| async move {
        let voucher = app.engine.create_voucher(new).await?;
        Ok(Outcome::made(voucher.clone(), &voucher))
    };
    Ok(created(audited(app, operator, action, work).await?.into()))
}

/// Changes a voucher.
#[utoipa::path(put, path = "/admin/v1/vouchers/{id}", tag = "admin", request_body = NewVoucher, responses((status = 200, description = "Changed", body = VoucherAnswer), (status = 409, description = "`illegal_step`")))]
pub(crate) async fn edit_voucher(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<VoucherId>,
    Json(new): Json<NewVoucher>,
) -> Result<Answer<VoucherAnswer>, Problem> {
    let action = Action::new("edit_voucher", format!("voucher {id}")).with_request(json!(new));
    let work = move |app: Arc<App>| async move { app.engine.edit_voucher(id, new).await };
    Ok(Answer(audited(app, operator, action, work).await?.into()))
}

async fn set_shelf(
    app: Arc<App>,
    operator: Operator,
    name: &'static str,
    id: VoucherId,
    on_shelf: bool,
) -> Result<Answer<VoucherAnswer>, Problem> {
    let work = move |app: Arc<App>| async move { app.engine.shelve(id, on_shelf).await };
    Ok(Answer(audited(app, operator, Action::new(name, format!("voucher {id}")), work).await?.into()))
}

/// Puts a voucher on the shelf.
#[utoipa::path(post, path = "/admin/v1/vouchers/{id}/shelve", tag = "admin", responses((status = 200, description = "On the shelf", body = VoucherAnswer)))]
pub(crate) async fn shelve(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<VoucherId>,
) -> Result<Answer<VoucherAnswer>, Problem> {
    set_shelf(app, operator, "shelve", id, true).await
}

/// Takes a voucher off the shelf.
#[utoipa::path(post, path = "/admin/v1/vouchers/{id}/unshelve", tag = "admin", responses((status = 200, description = "Off the shelf", body = VoucherAnswer)))]
pub(crate) async fn unshelve(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<VoucherId>,
) -> Result<Answer<VoucherAnswer>, Problem> {
    set_shelf(app, operator, "unshelve", id, false).await
}

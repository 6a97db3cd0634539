//! Shops and their vouchers, as visitors see them.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use stampede_core::ports::{ShopFilter, ShopPage};
use stampede_core::{Shop, ShopId, ShopTypeId, Voucher, VoucherId, VoucherKind};
use stampede_engine::Error;
use stampede_limit::rate_limit_key;
use tokio::sync::SemaphorePermit;
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

use crate::app::App;
use crate::extract::{ClientAddress, Id, Json, Params, Visitor};
use crate::pagination::page_size;
use crate::problem::Problem;

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopTypeResponse {
    id: ShopTypeId,
    name: String,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopTypesResponse {
    shop_types: Vec<ShopTypeResponse>,
}

/// All shop types.
#[utoipa::path(get, path = "/v1/shop-types", tag = "shops", responses((status = 200, description = "All", body = ShopTypesResponse)))]
pub(crate) async fn types(State(app): State<Arc<App>>, _: Visitor) -> Result<Json<ShopTypesResponse>, Problem> {
    let types = app.engine.shop_types().await?;
    let shop_types = types.iter().map(|one| ShopTypeResponse { id: one.id, name: one.name.clone() }).collect();
    Ok(Json(ShopTypesResponse { shop_types }))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopResponse {
    id: ShopId,
    type_id: ShopTypeId,
    name: String,
    address: String,
}

impl From<Shop> for ShopResponse {
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
    /// Page size; 20 by default.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct ShopsResponse {
    shops: Vec<ShopResponse>,
    /// Pass it as `before` to get the next page; null on the last page. A search by name may return a short or empty page before the last.
    next: Option<ShopId>,
}

/// Shops, newest first, filtered by type and by a part of the name.
#[utoipa::path(get, path = "/v1/shops", tag = "shops", params(ShopsParams), responses((status = 200, description = "A page", body = ShopsResponse)))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    _: Visitor,
    client: ClientAddress,
    Params(params): Params<ShopsParams>,
) -> Result<Json<ShopsResponse>, Problem> {
    let limit = page_size(params.limit)?;
    let is_valid = |name: &String| (1..=64).contains(&name.chars().count()) && !name.contains('\0');
    if params.name.as_ref().is_some_and(|name| !is_valid(name)) {
        return Err(Problem::invalid("name", "must have 1 to 64 characters"));
    }
    let _permit = match &params.name {
        Some(_) => Some(permit_search(&app, client).await?),
        None => None,
    };
    let filter = ShopFilter { type_id: params.r#type, name: params.name, before: params.before, limit };
    let ShopPage { shops, next } = app.engine.shops(&filter).await?;
    Ok(Json(ShopsResponse { shops: shops.into_iter().map(ShopResponse::from).collect(), next }))
}

/// How long a search may wait for a permit.
const SEARCH_WAIT: Duration = Duration::from_secs(1);

/// A search costs the database more than any other read: searches are limited per address, and few run at a time.
async fn permit_search(app: &App, ClientAddress(client): ClientAddress) -> Result<SemaphorePermit<'_>, Error> {
    app.limits.searches_per_address.check(rate_limit_key(client)).await.map_err(|wait| Error::Limited { wait })?;
    let permit = timeout(SEARCH_WAIT, app.searches.acquire()).await;
    permit.ok().and_then(Result::ok).ok_or(Error::Busy)
}

/// One shop.
#[utoipa::path(get, path = "/v1/shops/{id}", tag = "shops", responses((status = 200, description = "The shop", body = ShopResponse)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Visitor,
    Id(id): Id<ShopId>,
) -> Result<Json<ShopResponse>, Problem> {
    Ok(Json(Shop::clone(&*app.engine.shop(id).await?).into()))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct VoucherResponse {
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

impl From<Voucher> for VoucherResponse {
    fn from(voucher: Voucher) -> Self {
        let Voucher { id, shop, kind, title, subtitle, rules, price, worth, on_shelf } = voucher;
        let (price_cents, worth_cents) = (price.cents(), worth.cents());
        Self { id, shop_id: shop, kind, title, subtitle, rules, price_cents, worth_cents, on_shelf }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct VouchersResponse {
    vouchers: Vec<VoucherResponse>,
}

impl From<Vec<Voucher>> for VouchersResponse {
    fn from(vouchers: Vec<Voucher>) -> Self {
        Self { vouchers: vouchers.into_iter().map(VoucherResponse::from).collect() }
    }
}

/// The vouchers of a shop that are on the shelf.
#[utoipa::path(get, path = "/v1/shops/{id}/vouchers", tag = "shops", responses((status = 200, description = "All", body = VouchersResponse)))]
pub(crate) async fn vouchers(
    State(app): State<Arc<App>>,
    _: Visitor,
    Id(id): Id<ShopId>,
) -> Result<Json<VouchersResponse>, Problem> {
    Ok(Json(app.engine.vouchers_of(id).await?.into()))
}

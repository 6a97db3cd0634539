//! Shops, as administrators change them.

use std::sync::Arc;

use axum::extract::State;
use serde_json::json;
use stampede_core::{NewShop, ShopId};
use stampede_engine::{Action, Outcome};

use super::{Created, audited, created};
use crate::app::App;
use crate::extract::{Id, Json, Operator};
use crate::problem::Problem;
use crate::shops::ShopResponse;

/// Creates a shop.
#[utoipa::path(post, path = "/admin/v1/shops", tag = "admin", request_body = NewShop, responses((status = 201, description = "Created", body = ShopResponse), (status = 404, description = "`no_such_shop_type`")))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    operator: Operator,
    Json(new): Json<NewShop>,
) -> Result<Created<ShopResponse>, Problem> {
    let action = Action::new("create_shop", format!("shop type {}", new.type_id)).with_request(json!(new));
    let work = move |app: Arc<App>| async move {
        let shop = app.engine.create_shop(new).await?;
        Ok(Outcome::created(shop.clone(), &shop))
    };
    Ok(created(audited(app, operator, action, work).await?.into()))
}

/// Changes a shop.
#[utoipa::path(put, path = "/admin/v1/shops/{id}", tag = "admin", request_body = NewShop, responses((status = 200, description = "Changed", body = ShopResponse)))]
pub(crate) async fn edit(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<ShopId>,
    Json(new): Json<NewShop>,
) -> Result<Json<ShopResponse>, Problem> {
    let action = Action::new("edit_shop", format!("shop {id}")).with_request(json!(new));
    let work = move |app: Arc<App>| async move { app.engine.edit_shop(id, new).await };
    Ok(Json(audited(app, operator, action, work).await?.into()))
}

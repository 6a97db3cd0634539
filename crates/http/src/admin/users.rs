//! Accounts of users.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use stampede_core::ports::Account;
use stampede_core::{Timestamp, UserId};
use stampede_engine::Action;
use utoipa::{IntoParams, ToSchema};

use super::audited;
use crate::app::App;
use crate::extract::{Id, Json, Operator, Params, Viewer};
use crate::login::parse_phone;
use crate::problem::Problem;

#[derive(Serialize, ToSchema)]
pub(crate) struct AccountResponse {
    id: UserId,
    nickname: String,
    /// Masked.
    phone: String,
    created_at: Timestamp,
    disabled: bool,
}

impl From<Account> for AccountResponse {
    fn from(account: Account) -> Self {
        let Account { user, created_at, disabled } = account;
        Self { id: user.id, nickname: user.nickname, phone: user.phone.to_string(), created_at, disabled }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct UserParams {
    #[param(pattern = "^1[3-9][0-9]{9}$")]
    phone: String,
}

/// The account with a phone number.
#[utoipa::path(get, path = "/admin/v1/users", tag = "admin", params(UserParams), responses((status = 200, description = "The account", body = AccountResponse), (status = 404, description = "`no_such_user`")))]
pub(crate) async fn find(
    State(app): State<Arc<App>>,
    _: Viewer,
    Params(params): Params<UserParams>,
) -> Result<Json<AccountResponse>, Problem> {
    let account = app.engine.account_of(&parse_phone(&params.phone)?).await?;
    Ok(Json(account.into()))
}

/// One account.
#[utoipa::path(get, path = "/admin/v1/users/{id}", tag = "admin", responses((status = 200, description = "The account", body = AccountResponse)))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    _: Viewer,
    Id(id): Id<UserId>,
) -> Result<Json<AccountResponse>, Problem> {
    Ok(Json(app.engine.account(id).await?.into()))
}

/// Ends all sessions of a user immediately.
#[utoipa::path(delete, path = "/admin/v1/users/{id}/sessions", tag = "admin", responses((status = 204, description = "Ended")))]
pub(crate) async fn end_sessions(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<UserId>,
) -> Result<StatusCode, Problem> {
    let work = move |app: Arc<App>| async move { app.engine.end_sessions(id).await };
    audited(app, operator, Action::new("end_sessions", format!("user {id}")), work).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn set_disabled(
    app: Arc<App>,
    operator: Operator,
    name: &'static str,
    id: UserId,
    disabled: bool,
) -> Result<Json<AccountResponse>, Problem> {
    let work = move |app: Arc<App>| async move { app.engine.set_disabled(id, disabled).await };
    let account = audited(app, operator, Action::new(name, format!("user {id}")), work).await?;
    Ok(Json(account.into()))
}

/// Disables an account: its sessions end immediately, and its user cannot log in.
#[utoipa::path(post, path = "/admin/v1/users/{id}/disable", tag = "admin", responses((status = 200, description = "Disabled", body = AccountResponse)))]
pub(crate) async fn disable(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<UserId>,
) -> Result<Json<AccountResponse>, Problem> {
    set_disabled(app, operator, "disable_user", id, true).await
}

/// Enables an account again.
#[utoipa::path(post, path = "/admin/v1/users/{id}/enable", tag = "admin", responses((status = 200, description = "Enabled", body = AccountResponse)))]
pub(crate) async fn enable(
    State(app): State<Arc<App>>,
    operator: Operator,
    Id(id): Id<UserId>,
) -> Result<Json<AccountResponse>, Problem> {
    set_disabled(app, operator, "enable_user", id, false).await
}

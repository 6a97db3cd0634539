//! Login by code, and the session.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use stampede_core::{Phone, Timestamp, UserId};
use stampede_engine::Error;

use crate::app::App;
use crate::extract::{Buyer, Json, Peer, Token, to_the_end};
use crate::problem::Problem;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CodeRequest {
    phone: String,
}

#[derive(Serialize)]
pub(crate) struct CodeAnswer {
    expires_in_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    demo_code: Option<String>,
}

fn parse_phone(text: &str) -> Result<Phone, Problem> {
    Phone::parse(text).map_err(|error| Problem::invalid("phone", error.to_string()))
}

fn check_address(app: &App, peer: Peer) -> Result<(), Problem> {
    Ok(app.logins_per_ip.check(network(peer.0.ip())).map_err(|wait| Error::Limited { wait })?)
}

/// Who has one IPv6 address has a whole /64 of them: that is what counts as one.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

pub(crate) async fn send_code(
    State(app): State<Arc<App>>,
    peer: Peer,
    Json(request): Json<CodeRequest>,
) -> Result<Answer<CodeAnswer>, Problem> {
    let phone = parse_phone(&request.phone)?;
    check_address(&app, peer)?;
    let sent = app.engine.send_code(&phone).await?;
    Ok(Answer(CodeAnswer { expires_in_s: sent.expires_in.as_secs(), demo_code: sent.shown }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoginRequest {
    phone: String,
    code: String,
}

#[derive(Serialize)]
pub(crate) struct UserAnswer {
    id: UserId,
    nickname: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    phone: Option<String>,
}

#[derive(Serialize)]
pub(crate) struct LoginAnswer {
    token: String,
    expires_at: Timestamp,
    user: UserAnswer,
}

pub(crate) async fn log_in(
    State(app): State<Arc<App>>,
    peer: Peer,
    Json(request): Json<LoginRequest>,
) -> Result<Answer<LoginAnswer>, Problem> {
    let phone = parse_phone(&request.phone)?;
    if request.code.len() != 6 || !request.code.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Problem::invalid("code", "must be six digits"));
    }
    check_address(&app, peer)?;
    let logged_in = app.engine.log_in(phone, &request.code).await?;
    let user = UserAnswer { id: logged_in.user.id, nickname: logged_in.user.nickname, phone: None };
    Ok(Answer(LoginAnswer { token: logged_in.token, expires_at: logged_in.expires_at, user }))
}

pub(crate) async fn log_out(State(app): State<Arc<App>>, _: Buyer, token: Token) -> Result<StatusCode, Problem> {
    to_the_end(async move { app.engine.log_out(&token.0).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn me(State(app): State<Arc<App>>, Buyer(user): Buyer) -> Result<Answer<UserAnswer>, Problem> {
    let user = app.engine.user(user).await?;
    // Masked: the page does not need more, and a stolen token does not tell the number.
    Ok(Answer(UserAnswer { id: user.id, nickname: user.nickname, phone: Some(user.phone.to_string()) }))
}

//! Login by code, and the sessions of a user.

use std::str::FromStr;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use stampede_core::ports::{ChallengeId, Session, SessionId};
use stampede_core::{Phone, Timestamp, UserId};
use stampede_engine::{Error, Puzzle, Solution};
use stampede_limit::rate_limit_key;
use utoipa::ToSchema;

use crate::app::App;
use crate::extract::{BearerToken, ClientAddress, CurrentUser, Id, Json, run_detached};
use crate::problem::Problem;

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CodeRequest {
    #[schema(pattern = "^1[3-9][0-9]{9}$")]
    phone: String,
    /// From `/v1/login/puzzle`; needed only if the shop requires a proof of work.
    #[schema(pattern = "^[A-Za-z0-9_-]{55}$")]
    puzzle: Option<String>,
    /// The SHA-256 of `puzzle:phone:answer` begins with as many zero bits as the puzzle requires.
    #[schema(max_length = 32)]
    answer: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CodeResponse {
    /// Identifies this request; sent back with the code at login.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    challenge: String,
    expires_in_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    demo_code: Option<String>,
}

pub(crate) fn parse_phone(text: &str) -> Result<Phone, Problem> {
    Phone::parse(text).map_err(|error| Problem::invalid("phone", error.to_string()))
}

async fn check_limit(app: &App, client: ClientAddress) -> Result<(), Problem> {
    Ok(app.limits.login_per_address.check(rate_limit_key(client.0)).await.map_err(|wait| Error::Limited { wait })?)
}

/// Sends a login code to a phone. The response is the same whether the number has an account or not.
#[utoipa::path(post, path = "/v1/login/codes", tag = "login", request_body = CodeRequest, responses((status = 200, description = "Sent", body = CodeResponse), (status = 422, description = "`proof_required`: solve a puzzle from `/v1/login/puzzle` first; a puzzle can be used once")))]
pub(crate) async fn send_code(
    State(app): State<Arc<App>>,
    client: ClientAddress,
    Json(request): Json<CodeRequest>,
) -> Result<Json<CodeResponse>, Problem> {
    let phone = parse_phone(&request.phone)?;
    check_limit(&app, client).await?;
    let solution = request.puzzle.as_deref().zip(request.answer.as_deref());
    let solution = solution.map(|(puzzle, answer)| Solution { puzzle, answer });
    let sent = app.engine.send_code(&phone, client.0, solution).await?;
    let challenge = HexId(sent.challenge.0).to_string();
    Ok(Json(CodeResponse { challenge, expires_in_s: sent.expires_in.as_secs(), demo_code: sent.shown }))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct PuzzleResponse {
    #[schema(pattern = "^[A-Za-z0-9_-]{55}$")]
    puzzle: String,
    /// How many zero bits the hash must begin with; 0 if the shop requires no proof of work.
    #[schema(minimum = 0, maximum = 32)]
    bits: u8,
    expires_in_s: u64,
}

/// A puzzle to be solved before a code is sent, if the shop requires a proof of work: find an `answer` for which the SHA-256 of
/// `puzzle:phone:answer` begins with `bits` zero bits.
#[utoipa::path(get, path = "/v1/login/puzzle", tag = "login", responses((status = 200, description = "A puzzle that can be used once", body = PuzzleResponse)))]
pub(crate) async fn puzzle(
    State(app): State<Arc<App>>,
    client: ClientAddress,
) -> Result<Json<PuzzleResponse>, Problem> {
    check_limit(&app, client).await?;
    let Puzzle { text, bits, expires_in } = app.engine.puzzle();
    Ok(Json(PuzzleResponse { puzzle: text, bits, expires_in_s: expires_in.as_secs() }))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoginRequest {
    #[schema(pattern = "^1[3-9][0-9]{9}$")]
    phone: String,
    /// Six digits, or ten after many wrong attempts.
    #[schema(pattern = "^[0-9]{6}([0-9]{4})?$")]
    code: String,
    /// From the response of `/v1/login/codes`. Without it, the newest code that was requested from the same address is used.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    challenge: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct UserResponse {
    id: UserId,
    nickname: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    phone: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct LoginResponse {
    token: String,
    expires_at: Timestamp,
    user: UserResponse,
}

/// Logs in with a code. The first login creates the user.
#[utoipa::path(post, path = "/v1/login", tag = "login", request_body = LoginRequest, responses((status = 200, description = "Logged in", body = LoginResponse), (status = 403, description = "`account_disabled`"), (status = 422, description = "`wrong_code`: wrong, used, expired, or tried too often")))]
pub(crate) async fn log_in(
    State(app): State<Arc<App>>,
    client: ClientAddress,
    Json(request): Json<LoginRequest>,
) -> Result<Json<LoginResponse>, Problem> {
    let phone = parse_phone(&request.phone)?;
    if !matches!(request.code.len(), 6 | 10) || !request.code.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Problem::invalid("code", "must be six or ten digits"));
    }
    let challenge = request.challenge.as_deref().map(HexId::from_str).transpose();
    let challenge = challenge.map_err(|error| Problem::invalid("challenge", error))?;
    let challenge = challenge.map(|HexId(id)| ChallengeId(id));
    check_limit(&app, client).await?;
    let masked = phone.to_string();
    let logged_in = app.engine.log_in(phone, &request.code, challenge, client.0).await.inspect_err(|error| {
        app.security_log.login_refused(client.0, &masked, error.code());
    })?;
    app.security_log.logged_in(client.0, &masked, logged_in.user.id);
    let user = UserResponse { id: logged_in.user.id, nickname: logged_in.user.nickname, phone: None };
    Ok(Json(LoginResponse { token: logged_in.token, expires_at: logged_in.expires_at, user }))
}

/// Ends the current session.
#[utoipa::path(delete, path = "/v1/session", tag = "login", responses((status = 204, description = "Ended"), (status = 404, description = "`no_such_session`")), security(("buyer" = [])))]
pub(crate) async fn log_out(
    State(app): State<Arc<App>>,
    _: CurrentUser,
    token: BearerToken,
) -> Result<StatusCode, Problem> {
    run_detached(async move { app.engine.log_out(&token.0).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SessionResponse {
    id: String,
    created_at: Timestamp,
    expires_at: Timestamp,
    /// Whether the request was made with this session.
    current: bool,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SessionsResponse {
    sessions: Vec<SessionResponse>,
}

/// The id of a session or of a challenge as 32 hexadecimal digits. Unlike a token it is not signed and grants nothing.
pub(crate) struct HexId([u8; 16]);

impl FromStr for HexId {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let id = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        id.map(|id| Self(id.to_be_bytes())).ok_or("must be 32 hexadecimal digits")
    }
}

impl std::fmt::Display for HexId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// The sessions of the current user, newest first.
#[utoipa::path(get, path = "/v1/sessions", tag = "login", responses((status = 200, description = "At most 100", body = SessionsResponse)), security(("buyer" = [])))]
pub(crate) async fn sessions(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    token: BearerToken,
) -> Result<Json<SessionsResponse>, Problem> {
    let current = app.engine.verify_token(&token.0).ok().map(|proven| proven.session);
    let response = |session: Session| SessionResponse {
        id: HexId(session.id.0).to_string(),
        created_at: session.created_at,
        expires_at: session.expires_at,
        current: Some(session.id) == current,
    };
    let sessions = app.engine.sessions(user).await?.into_iter().map(response).collect();
    Ok(Json(SessionsResponse { sessions }))
}

/// Ends one session of the current user.
#[utoipa::path(delete, path = "/v1/sessions/{id}", tag = "login", params(("id" = String, Path, pattern = "^[0-9a-f]{32}$")), responses((status = 204, description = "Ended")), security(("buyer" = [])))]
pub(crate) async fn end_session(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
    Id(HexId(id)): Id<HexId>,
) -> Result<StatusCode, Problem> {
    run_detached(async move { app.engine.end_session(user, SessionId(id)).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends all sessions of the current user, including this one.
#[utoipa::path(delete, path = "/v1/sessions", tag = "login", responses((status = 204, description = "Ended")), security(("buyer" = [])))]
pub(crate) async fn end_sessions(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
) -> Result<StatusCode, Problem> {
    run_detached(async move { app.engine.end_sessions(user).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The current user.
#[utoipa::path(get, path = "/v1/me", tag = "login", responses((status = 200, description = "The user, with a masked phone", body = UserResponse)), security(("buyer" = [])))]
pub(crate) async fn me(
    State(app): State<Arc<App>>,
    CurrentUser(user): CurrentUser,
) -> Result<Json<UserResponse>, Problem> {
    let user = app.engine.user(user).await?;
    // Masked: the page does not need more, and a stolen token does not reveal the number.
    Ok(Json(UserResponse { id: user.id, nickname: user.nickname, phone: Some(user.phone.to_string()) }))
}

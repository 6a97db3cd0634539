//! Login by code, and the session.

use std::str::FromStr;
use std::sync::Arc;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use stampede_core::ports::{ChallengeId, Session, SessionId};
use stampede_core::{Phone, Timestamp, UserId};
use stampede_engine::{Error, Puzzle, Solution};
use utoipa::ToSchema;

use crate::address::counted_as;
use crate::app::App;
use crate::extract::{Id, Json, Own, Peer, Token, to_the_end};
use crate::problem::Problem;

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CodeRequest {
    #[schema(pattern = "^1[3-9][0-9]{9}$")]
    phone: String,
    /// From `/v1/login/puzzle`; only if the shop wants a proof of work.
    #[schema(pattern = "^[A-Za-z0-9_-]{55}$")]
    puzzle: Option<String>,
    /// The SHA-256 of `puzzle:phone:answer` begins with as many zero bits as the puzzle wants.
    #[schema(max_length = 32)]
    answer: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct CodeAnswer {
    /// Names this request: to be sent back with the code.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    challenge: String,
    expires_in_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    demo_code: Option<String>,
}

pub(crate) fn parse_phone(text: &str) -> Result<Phone, Problem> {
    Phone::parse(text).map_err(|error| Problem::invalid("phone", error.to_string()))
}

fn check_address(app: &App, peer: Peer) -> Result<(), Problem> {
    Ok(app.limits.logins_per_ip.check(counted_as(peer.0)).map_err(|wait| Error::Limited { wait })?)
}

/// Sends a login code to a phone. The answer is the same whether the number is known or not.
#[utoipa::path(post, path = "/v1/login/codes", tag = "login", request_body = CodeRequest, responses((status = 200, description = "Sent", body = CodeAnswer), (status = 422, description = "`proof_required`: solve a puzzle from `/v1/login/puzzle` first; each works once")))]
pub(crate) async fn send_code(
    State(app): State<Arc<App>>,
    peer: Peer,
    Json(request): Json<CodeRequest>,
) -> Result<Answer<CodeAnswer>, Problem> {
    let phone = parse_phone(&request.phone)?;
    check_address(&app, peer)?;
    let solution = request.puzzle.as_deref().zip(request.answer.as_deref());
    let solution = solution.map(|(puzzle, answer)| Solution { puzzle, answer });
    let sent = app.engine.send_code(&phone, peer.0, solution).await?;
    let challenge = RandomName(sent.challenge.0).to_string();
    Ok(Answer(CodeAnswer { challenge, expires_in_s: sent.expires_in.as_secs(), demo_code: sent.shown }))
}

#[derive(Serialize, ToSchema)]
pub(crate) struct PuzzleAnswer {
    #[schema(pattern = "^[A-Za-z0-9_-]{55}$")]
    puzzle: String,
    /// How many zero bits the hash must begin with; 0 if the shop wants no proof of work.
    #[schema(minimum = 0, maximum = 32)]
    bits: u8,
    expires_in_s: u64,
}

/// A puzzle to be solved before a code is sent, if the shop wants a proof of work: find an `answer` for which the SHA-256 of
/// `puzzle:phone:answer` begins with `bits` zero bits.
#[utoipa::path(get, path = "/v1/login/puzzle", tag = "login", responses((status = 200, description = "Works once", body = PuzzleAnswer)))]
pub(crate) async fn puzzle(State(app): State<Arc<App>>, peer: Peer) -> Result<Answer<PuzzleAnswer>, Problem> {
    check_address(&app, peer)?;
    let Puzzle { text, bits, expires_in } = app.engine.puzzle();
    Ok(Answer(PuzzleAnswer { puzzle: text, bits, expires_in_s: expires_in.as_secs() }))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoginRequest {
    #[schema(pattern = "^1[3-9][0-9]{9}$")]
    phone: String,
    /// Six digits, or ten if there were many wrong ones.
    #[schema(pattern = "^[0-9]{6}([0-9]{4})?$")]
    code: String,
    /// Of the answer to `/v1/login/codes`. Without it the newest code counts that was requested from the same address.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    challenge: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct UserAnswer {
    id: UserId,
    nickname: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    phone: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct LoginAnswer {
    token: String,
    expires_at: Timestamp,
    user: UserAnswer,
}

/// Logs in with the code. The first login makes the user.
#[utoipa::path(post, path = "/v1/login", tag = "login", request_body = LoginRequest, responses((status = 200, description = "Logged in", body = LoginAnswer), (status = 403, description = "`account_disabled`"), (status = 422, description = "`wrong_code`: wrong, used, tried too often, or too old")))]
pub(crate) async fn log_in(
    State(app): State<Arc<App>>,
    peer: Peer,
    Json(request): Json<LoginRequest>,
) -> Result<Answer<LoginAnswer>, Problem> {
    let phone = parse_phone(&request.phone)?;
    if !matches!(request.code.len(), 6 | 10) || !request.code.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Problem::invalid("code", "must be six or ten digits"));
    }
    let challenge = request.challenge.as_deref().map(RandomName::from_str).transpose();
    let challenge = challenge.map_err(|error| Problem::invalid("challenge", error))?;
    let challenge = challenge.map(|RandomName(id)| ChallengeId(id));
    check_address(&app, peer)?;
    let shown = phone.to_string();
    let logged_in = app.engine.log_in(phone, &request.code, challenge, peer.0).await.inspect_err(|error| {
        app.security_log.login_refused(peer.0, &shown, error.code());
    })?;
    app.security_log.logged_in(peer.0, &shown, logged_in.user.id);
    let user = UserAnswer { id: logged_in.user.id, nickname: logged_in.user.nickname, phone: None };
    Ok(Answer(LoginAnswer { token: logged_in.token, expires_at: logged_in.expires_at, user }))
}

/// Ends the session that asks.
#[utoipa::path(delete, path = "/v1/session", tag = "login", responses((status = 204, description = "Ended"), (status = 404, description = "`no_such_session`")), security(("buyer" = [])))]
pub(crate) async fn log_out(State(app): State<Arc<App>>, _: Own, token: Token) -> Result<StatusCode, Problem> {
    to_the_end(async move { app.engine.log_out(&token.0).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SessionAnswer {
    id: String,
    created_at: Timestamp,
    expires_at: Timestamp,
    /// The one that asks.
    current: bool,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct SessionsAnswer {
    sessions: Vec<SessionAnswer>,
}

/// The name of a session or of a challenge as text: 32 hexadecimal digits. Not a token: that has a seal.
pub(crate) struct RandomName([u8; 16]);

impl FromStr for RandomName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let id = u128::from_str_radix(text, 16).ok().filter(|_| digits);
        id.map(|id| Self(id.to_be_bytes())).ok_or("must be 32 hexadecimal digits")
    }
}

impl std::fmt::Display for RandomName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// The sessions of the one who asks, newest first.
#[utoipa::path(get, path = "/v1/sessions", tag = "login", responses((status = 200, description = "At most 100", body = SessionsAnswer)), security(("buyer" = [])))]
pub(crate) async fn sessions(
    State(app): State<Arc<App>>,
    Own(user): Own,
    token: Token,
) -> Result<Answer<SessionsAnswer>, Problem> {
    let current = app.engine.prove(&token.0).ok().map(|proven| proven.session);
    let answer = |session: Session| SessionAnswer {
        id: RandomName(session.id.0).to_string(),
        created_at: session.created_at,
        expires_at: session.expires_at,
        current: Some(session.id) == current,
    };
    let sessions = app.engine.sessions(user).await?.into_iter().map(answer).collect();
    Ok(Answer(SessionsAnswer { sessions }))
}

/// Ends one of the sessions of the one who asks.
#[utoipa::path(delete, path = "/v1/sessions/{id}", tag = "login", params(("id" = String, Path, pattern = "^[0-9a-f]{32}$")), responses((status = 204, description = "Ended")), security(("buyer" = [])))]
pub(crate) async fn end_session(
    State(app): State<Arc<App>>,
    Own(user): Own,
    Id(RandomName(id)): Id<RandomName>,
) -> Result<StatusCode, Problem> {
    to_the_end(async move { app.engine.end_session(user, SessionId(id)).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends all sessions of the one who asks, this one too.
#[utoipa::path(delete, path = "/v1/sessions", tag = "login", responses((status = 204, description = "Ended")), security(("buyer" = [])))]
pub(crate) async fn end_sessions(State(app): State<Arc<App>>, Own(user): Own) -> Result<StatusCode, Problem> {
    to_the_end(async move { app.engine.end_sessions(user).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Who asks.
#[utoipa::path(get, path = "/v1/me", tag = "login", responses((status = 200, description = "The phone is masked", body = UserAnswer)), security(("buyer" = [])))]
pub(crate) async fn me(State(app): State<Arc<App>>, Own(user): Own) -> Result<Answer<UserAnswer>, Problem> {
    let user = app.engine.user(user).await?;
    // Masked: the page does not need more, and a stolen token does not tell the number.
    Ok(Answer(UserAnswer { id: user.id, nickname: user.nickname, phone: Some(user.phone.to_string()) }))
}

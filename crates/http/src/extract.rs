//! Extractors: bodies, ids, query strings, and the caller with their limits. Every rejection is a [`Problem`].

use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use stampede_core::{Code, Invalid, UserId};
use stampede_engine::{Caller, Error, VerifiedToken};
use stampede_limit::rate_limit_key;

use crate::app::App;
use crate::credentials::{AuthError, Role};
use crate::problem::Problem;
use crate::security_log::AdminRefusal;

/// The longest request body.
const MAX_BODY: usize = 16 * 1024;
/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// A JSON body, of a request or of a response.
pub(crate) struct Json<T>(pub(crate) T);

/// A JSON body that may be left out, or null.
pub(crate) struct OptionalJson<T>(pub(crate) T);

/// A JSON body as it was sent, whose bytes are signed.
pub(crate) struct RawBody(pub(crate) Bytes);

impl FromRequest<Arc<App>> for RawBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &Arc<App>) -> Result<Self, Problem> {
        read_body(request).await.map(Self)
    }
}

/// Reads a body that says it is JSON.
async fn read_body(request: Request) -> Result<Bytes, Problem> {
    if says_json(request.headers()) {
        read_any_body(request).await
    } else {
        Err(Problem::new(Code::UnsupportedMediaType))
    }
}

fn says_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

async fn read_any_body(request: Request) -> Result<Bytes, Problem> {
    let reading = Limited::new(request.into_body(), MAX_BODY).collect();
    match tokio::time::timeout(BODY_TIMEOUT, reading).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(Problem::new(Code::PayloadTooLarge)),
        Ok(Err(_)) => Err(Problem::new(Code::InvalidRequest).detail("the body could not be read")),
        Err(_) => Err(Problem::new(Code::RequestTimeout)),
    }
}

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &Arc<App>) -> Result<Self, Problem> {
        parse(&read_body(request).await?).map(Self)
    }
}

impl<T: DeserializeOwned + Default> FromRequest<Arc<App>> for OptionalJson<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &Arc<App>) -> Result<Self, Problem> {
        let says_json = says_json(request.headers());
        let body = read_any_body(request).await?;
        if body.is_empty() {
            // Clients send various types, or none, with it.
            Ok(Self(T::default()))
        } else if !says_json {
            Err(Problem::new(Code::UnsupportedMediaType))
        } else if body.trim_ascii() == b"null" {
            Ok(Self(T::default()))
        } else {
            parse(&body).map(Self)
        }
    }
}

/// The JSON object in a body.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let read = serde_json::from_slice(body).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => Problem::new(Code::InvalidRequest).detail(error.to_string()),
        _ => Problem::new(Code::InvalidJson).detail(error.to_string()),
    })?;
    // Serde also fills a struct from an array, member by member in their order. Such a body is a mistake of the caller.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(Problem::new(Code::InvalidRequest).detail("the body must be a JSON object"));
    }
    Ok(read)
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

/// The only id in the path.
pub(crate) struct Id<T>(pub(crate) T);

impl<T: FromStr<Err: Display>> FromRequestParts<Arc<App>> for Id<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let text = Path::from_request_parts(parts, app).await;
        parse_id(text).map(Self).map_err(|invalid| Error::Invalid(vec![invalid]).into())
    }
}

pub(crate) fn parse_id<T: FromStr<Err: Display>>(text: Result<Path<String>, PathRejection>) -> Result<T, Invalid> {
    let Path(text) = text.map_err(|_| Invalid::new("id", "cannot be read"))?;
    text.parse().map_err(|error: T::Err| Invalid::new("id", error.to_string()))
}

/// The query string.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<App>> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        let query = Query::<T>::try_from_uri(&parts.uri);
        query
            .map(|Query(params)| Self(params))
            .map_err(|rejection| Problem::new(Code::InvalidRequest).detail(rejection.body_text()))
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// The token of a session, not verified yet.
pub(crate) struct BearerToken(pub(crate) String);

impl FromRequestParts<Arc<App>> for BearerToken {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        bearer(&parts.headers).map(|token| Self(token.to_owned())).ok_or_else(|| Problem::new(Code::Unauthorized))
    }
}

/// The owner of the request's token, verified by its signature alone.
pub(crate) fn verified_token(headers: &HeaderMap, app: &App) -> Result<VerifiedToken, Error> {
    app.engine.verify_token(bearer(headers).ok_or(Error::Plain(Code::Unauthorized))?)
}

/// The user who is logged in, within the limit of requests about their own orders and sessions. Buying has a limit of its own.
pub(crate) struct CurrentUser(pub(crate) UserId);

impl FromRequestParts<Arc<App>> for CurrentUser {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let proven = verified_token(&parts.headers, app)?;
        // Before the session is read, so that an expired token is limited too, before it reaches the ledger.
        app.limits.own_per_user.check(proven.user).await.map_err(|wait| Error::Limited { wait })?;
        Ok(app.engine.authenticate(proven).await.map(Self)?)
    }
}

/// A visitor of a public page, within the limit of their address.
pub(crate) struct Visitor;

impl FromRequestParts<Arc<App>> for Visitor {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let ClientAddress(address) = ClientAddress::from_request_parts(parts, app).await?;
        app.limits.reads_per_address.check(rate_limit_key(address)).await.map_err(|wait| Error::Limited { wait })?;
        // Browsing keeps a session alive. The page is public: it neither waits for the session nor depends on it.
        if let Ok(proven) = verified_token(&parts.headers, app)
            && !app.engine.refresh(proven)
            && app.limits.own_per_user.check(proven.user).await.is_ok()
        {
            app.engine.look_up(proven);
        }
        Ok(Self)
    }
}

/// A caller of `/readyz`, `/openapi.json` or `/docs`, within the limit of their address.
pub(crate) struct Prober;

impl FromRequestParts<Arc<App>> for Prober {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let ClientAddress(address) = ClientAddress::from_request_parts(parts, app).await?;
        app.limits.probes_per_address.check(rate_limit_key(address)).await.map_err(|wait| Error::Limited { wait })?;
        Ok(Self)
    }
}

/// Authenticates an administrator: their address, name and role.
async fn authenticate_administrator(parts: &mut Parts, app: &Arc<App>) -> Result<(IpAddr, Arc<str>, Role), Problem> {
    let ClientAddress(address) = ClientAddress::from_request_parts(parts, app).await?;
    let refused = |reason, problem| {
        app.security_log.administrator_refused(address, reason, None);
        problem
    };
    let Some(token) = bearer(&parts.headers) else {
        return Err(refused(AdminRefusal::NoToken, Problem::new(Code::Unauthorized)));
    };
    match app.administrators.authenticate(address, token) {
        Ok((name, role)) => Ok((address, name, role)),
        Err(AuthError::WrongToken) => Err(refused(AdminRefusal::WrongToken, Problem::new(Code::Unauthorized))),
        Err(AuthError::Limited { wait }) => {
            Err(refused(AdminRefusal::TooManyWrongTokens, Error::Limited { wait }.into()))
        }
    }
}

/// An administrator with any role.
pub(crate) struct Viewer;

impl FromRequestParts<Arc<App>> for Viewer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        authenticate_administrator(parts, app).await.map(|_| Self)
    }
}

/// An administrator who may change things, with the request they sent.
pub(crate) struct Operator(pub(crate) Caller);

impl FromRequestParts<Arc<App>> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let (address, name, role) = authenticate_administrator(parts, app).await?;
        if role == Role::Viewer {
            app.security_log.administrator_refused(address, AdminRefusal::ViewerOnly, Some(&name));
            return Err(Problem::new(Code::Forbidden));
        }
        let RequestId(request_id) = RequestId::from_request_parts(parts, app).await?;
        Ok(Self(Caller { name, address, request_id }))
    }
}

/// Runs work to its end even if its caller disconnects: a change that has begun in the ledger must reach the gate too.
pub(crate) async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Problem> {
    match tokio::spawn(work).await {
        Ok(done) => Ok(done?),
        Err(error) => {
            tracing::error!(%error, "request panicked");
            Err(Problem::new(Code::Internal))
        }
    }
}

/// The address of the client: of the connection, or as a trusted proxy reports it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientAddress(pub(crate) IpAddr);

impl FromRequestParts<Arc<App>> for ClientAddress {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().copied().ok_or_else(|| Problem::new(Code::Internal))
    }
}

/// The id of the request, as in its response and in the log.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) Arc<str>);

impl FromRequestParts<Arc<App>> for RequestId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| Problem::new(Code::Internal))
    }
}

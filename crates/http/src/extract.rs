//! Bodies, ids, queries, and who is asking. Whatever is wrong becomes a [`Problem`].

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::request::Parts;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use stampede_core::{Code, UserId};
use stampede_engine::{Caller, Error, Proven};

use crate::address::counted_as;
use crate::app::App;
use crate::credentials::{Refused, Role};
use crate::problem::Problem;
use crate::security_log::AdminRefusal;

/// No body that we take is longer.
const MAX_BODY: usize = 16 * 1024;
/// No body may take longer to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// A JSON body.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &Arc<App>) -> Result<Self, Problem> {
        let kind = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
            return Err(Problem::new(Code::UnsupportedMediaType));
        }
        let reading = Limited::new(request.into_body(), MAX_BODY).collect();
        let body = match tokio::time::timeout(BODY_TIMEOUT, reading).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(Problem::new(Code::PayloadTooLarge)),
            Ok(Err(_)) => return Err(Problem::new(Code::InvalidRequest).detail("the body could not be read")),
            Err(_) => return Err(Problem::new(Code::RequestTimeout)),
        };
        let read = serde_json::from_slice(&body).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => Problem::new(Code::InvalidRequest).detail(error.to_string()),
            _ => Problem::new(Code::InvalidJson).detail(error.to_string()),
        })?;
        // Serde fills a struct from an array as well, member by member in their order. No caller means that.
        if body.trim_ascii_start().first() != Some(&b'{') {
            return Err(Problem::new(Code::InvalidRequest).detail("the body must be a JSON object"));
        }
        Ok(Self(read))
    }
}

/// The one id in the path.
pub(crate) struct Id<T>(pub(crate) T);

impl<T: FromStr<Err: std::fmt::Display>> FromRequestParts<Arc<App>> for Id<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let text = Path::<String>::from_request_parts(parts, app).await;
        let Path(text) = text.map_err(|_| Problem::invalid("id", "cannot be read"))?;
        text.parse().map(Self).map_err(|error| Problem::invalid("id", format!("{error}")))
    }
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

/// The token of the session, as it came.
pub(crate) struct Token(pub(crate) String);

impl FromRequestParts<Arc<App>> for Token {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        bearer(&parts.headers).map(|token| Self(token.to_owned())).ok_or_else(|| Problem::new(Code::Unauthorized))
    }
}

/// Whose token the request carries, by its seal alone.
fn proven(headers: &HeaderMap, app: &App) -> Result<Proven, Error> {
    app.engine.prove(bearer(headers).ok_or(Error::Plain(Code::Unauthorized))?)
}

/// Somebody who is logged in and wants to buy, so often and no more.
pub(crate) struct Buyer(pub(crate) UserId);

impl Buyer {
    /// The limit comes before the session is looked for: a token that has expired is limited, too, before it reaches the ledger.
    pub(crate) async fn of(headers: &HeaderMap, app: &App) -> Result<Self, Error> {
        let proven = proven(headers, app)?;
        if let Err(wait) = app.limits.buys_per_user.check(proven.user) {
            app.buy_metrics.limited();
            return Err(Error::Limited { wait });
        }
        app.engine.authenticate(proven).await.map(Self)
    }
}

impl FromRequestParts<Arc<App>> for Buyer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        Ok(Self::of(&parts.headers, app).await?)
    }
}

/// Somebody who is logged in and sees to what is their own. Buying has a limit of its own.
pub(crate) struct Own(pub(crate) UserId);

impl FromRequestParts<Arc<App>> for Own {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let proven = proven(&parts.headers, app)?;
        // Before the session is looked for: see `Buyer::of`.
        app.limits.own_per_user.check(proven.user).map_err(|wait| Error::Limited { wait })?;
        Ok(app.engine.authenticate(proven).await.map(Self)?)
    }
}

/// Anybody who looks around, so often and no more.
pub(crate) struct Visitor;

impl FromRequestParts<Arc<App>> for Visitor {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let Peer(address) = Peer::from_request_parts(parts, app).await?;
        app.limits.reads_per_ip.check(counted_as(address)).map_err(|wait| Error::Limited { wait })?;
        // A visitor who is logged in stays so. The page is public: it neither waits for the session nor depends on it.
        if let Ok(proven) = proven(&parts.headers, app)
            && !app.engine.refresh(proven)
            && app.limits.own_per_user.check(proven.user).is_ok()
        {
            app.engine.look_up(proven);
        }
        Ok(Self)
    }
}

/// A caller of what is there for operators and programmers: `/readyz`, the API document and its pages.
pub(crate) struct Prober;

impl FromRequestParts<Arc<App>> for Prober {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let Peer(address) = Peer::from_request_parts(parts, app).await?;
        app.limits.probes_per_ip.check(counted_as(address)).map_err(|wait| Error::Limited { wait })?;
        Ok(Self)
    }
}

/// The address, name and role of an administrator.
async fn administrator(parts: &mut Parts, app: &Arc<App>) -> Result<(IpAddr, Arc<str>, Role), Problem> {
    let Peer(address) = Peer::from_request_parts(parts, app).await?;
    let refused = |reason, problem| {
        app.security_log.administrator_refused(address, reason, None);
        problem
    };
    let Some(token) = bearer(&parts.headers) else {
        return Err(refused(AdminRefusal::NoToken, Problem::new(Code::Unauthorized)));
    };
    match app.administrators.authenticate(address, token) {
        Ok((name, role)) => Ok((address, name, role)),
        Err(Refused::Wrong) => Err(refused(AdminRefusal::WrongToken, Problem::new(Code::Unauthorized))),
        Err(Refused::Limited { wait }) => {
            Err(refused(AdminRefusal::TooManyWrongTokens, Error::Limited { wait }.into()))
        }
    }
}

/// An administrator who may look.
pub(crate) struct Viewer;

impl FromRequestParts<Arc<App>> for Viewer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        administrator(parts, app).await.map(|_| Self)
    }
}

/// An administrator who may change things, and the request that they sent.
pub(crate) struct Operator(pub(crate) Caller);

impl FromRequestParts<Arc<App>> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Problem> {
        let (address, name, role) = administrator(parts, app).await?;
        if role == Role::Viewer {
            app.security_log.administrator_refused(address, AdminRefusal::ViewerOnly, Some(&name));
            return Err(Problem::new(Code::Forbidden));
        }
        let RequestId(request_id) = RequestId::from_request_parts(parts, app).await?;
        Ok(Self(Caller { name, address, request_id }))
    }
}

/// Carries the work out even if its caller goes away: what has begun in the ledger must reach the gate too.
pub(crate) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Problem> {
    match tokio::spawn(work).await {
        Ok(done) => Ok(done?),
        Err(error) => {
            tracing::error!(%error, "a request panicked");
            Err(Problem::new(Code::Internal))
        }
    }
}

/// Where the request came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) IpAddr);

impl FromRequestParts<Arc<App>> for Peer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().copied().ok_or_else(|| Problem::new(Code::Internal))
    }
}

/// The id of the request, as in its answer and in the log.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) Arc<str>);

impl FromRequestParts<Arc<App>> for RequestId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<App>) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| Problem::new(Code::Internal))
    }
}

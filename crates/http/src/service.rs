//! One request, from its head to its response: request id, `Host` check, CORS, the fast path or the router, security headers, the text of
//! problems, metrics. Connections are the business of [`crate::server`].

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, STRICT_TRANSPORT_SECURITY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Request};
use axum::response::{IntoResponse as _, Response};
use hyper::body::Incoming;
use rand::RngExt as _;
use stampede_core::{Code, SaleId};
use tower::ServiceExt as _;
use tracing::{Instrument as _, Span};

use crate::app::{App, Surface};
use crate::extract::{ClientAddress, RequestId};
use crate::problem::{Language, Problem, render};
use crate::router::is_admin_path;
use crate::{address, buy, cors, host, load_test, router, security_log};

/// How much of a path is logged, so that long paths do not fill the disk.
const MAX_LOGGED_PATH: usize = 128;
/// A response that is not a page loads nothing and is shown in no frame.
pub(crate) const DEFAULT_CONTENT_SECURITY_POLICY: HeaderValue =
    HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");

/// Answers the requests of a listener.
#[derive(Debug)]
pub struct HttpService {
    app: Arc<App>,
    router: Router,
    /// Whether buyers' routes are served.
    serves_buyers: bool,
}

/// A request that is answered without the router.
#[derive(Clone, Copy)]
enum FastPath {
    Buy(SaleId),
    /// The no-op that buying is compared with in a load test.
    Noop,
}

impl HttpService {
    pub fn new(app: Arc<App>, surface: Surface) -> Self {
        let router = router::build(app.clone(), surface);
        Self { app, router, serves_buyers: surface.serves_buyers() }
    }

    pub(crate) fn is_trusted_proxy(&self, address: IpAddr) -> bool {
        address::is_trusted(address, &self.app.config.trusted_proxies)
    }

    /// Answers a request that came over a connection from `peer`. `is_evicted`: the connection was closed to make room for another at
    /// the moment in which the request arrived, so the request is refused.
    pub(crate) async fn call(&self, request: Request<Incoming>, peer: IpAddr, is_evicted: bool) -> Response {
        let started = Instant::now();
        let id = next_request_id();
        let fast_path = self.match_fast_path(&request);
        let span = request_span(&request, &id, fast_path.is_some());
        let language = Language::of(request.headers());
        let origin = cors::allowed_origin(&request, &self.app.config.cors_origins);
        let early = if is_evicted {
            Some(Problem::new(Code::Busy).into_response())
        } else if let Err(detail) = host::check(request.version(), request.headers()) {
            Some(Problem::new(Code::InvalidRequest).detail(detail).into_response())
        } else {
            origin.as_ref().and_then(|_| cors::preflight(&request))
        };
        let response = match early {
            Some(response) => response,
            None => self.dispatch(request, peer, &id, language, fast_path).instrument(span.clone()).await,
        };
        let mut response = render(response, language);
        self.add_headers(response.headers_mut(), &id);
        if let Some(origin) = origin {
            cors::allow(response.headers_mut(), origin);
        }
        self.app.http_metrics.count(response.status());
        span.in_scope(
            || tracing::debug!(status = response.status().as_u16(), elapsed = ?started.elapsed(), "request answered"),
        );
        response
    }

    fn match_fast_path<B>(&self, request: &Request<B>) -> Option<FastPath> {
        if !self.serves_buyers {
            return None;
        }
        let (method, uri) = (request.method(), request.uri());
        if let Some(sale) = buy::match_path(method, uri) {
            return Some(FastPath::Buy(sale));
        }
        (self.app.config.allow_load_test && load_test::is_noop(method, uri)).then_some(FastPath::Noop)
    }

    async fn dispatch(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        id: &str,
        language: Language,
        fast_path: Option<FastPath>,
    ) -> Response {
        if let Some(FastPath::Noop) = fast_path {
            drop(request);
            return load_test::respond(&self.app);
        }
        let client = address::client(peer, request.headers(), &self.app.config.trusted_proxies);
        let is_admin_path = is_admin_path(request.uri().path());
        let response = match fast_path {
            Some(FastPath::Buy(sale)) => buy::handle(&self.app, request, client, id, language, Ok(sale)).await,
            _ => self.route(request, client, id).await,
        };
        // Refused administrators are logged with their reason where they are authenticated.
        if !is_admin_path && security_log::is_access_denied(response.status()) {
            let span = match fast_path {
                Some(FastPath::Buy(sale)) => buy::error_span(id, Some(sale)),
                _ => Span::current(),
            };
            span.in_scope(|| self.app.security_log.access_denied(client, response.status()));
        }
        response
    }

    async fn route(&self, request: Request<Incoming>, client: IpAddr, id: &str) -> Response {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ClientAddress(client));
        request.extensions_mut().insert(RequestId(id.into()));
        let Ok(response) = self.router.clone().oneshot(request).await;
        response
    }

    /// Adds the headers that every response has. A page sets some of them itself.
    fn add_headers(&self, headers: &mut HeaderMap, id: &str) {
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        headers.entry(CONTENT_SECURITY_POLICY).or_insert(DEFAULT_CONTENT_SECURITY_POLICY);
        // Responses to buyers and operators are private.
        headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
        if self.app.config.hsts {
            headers.insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static("max-age=31536000"));
        }
        if let Ok(id) = HeaderValue::try_from(id) {
            headers.insert("x-request-id", id);
        }
    }
}

/// Names a request in logs and in its response: unique in this process, and unlikely to be used by another one.
fn next_request_id() -> String {
    static START: LazyLock<u64> = LazyLock::new(|| rand::rng().random::<u64>() << 20);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{:016x}", START.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// The span of a request. On the fast path it has the level `DEBUG`, because a span costs as much as the rest of the request; fields of a
/// disabled span are not evaluated.
fn request_span<B>(request: &Request<B>, id: &str, is_fast_path: bool) -> Span {
    if is_fast_path {
        tracing::debug_span!("request", id, method = %request.method(), path = logged_path(request))
    } else {
        tracing::error_span!("request", id, method = %request.method(), path = logged_path(request))
    }
}

fn logged_path<B>(request: &Request<B>) -> &str {
    let path = request.uri().path();
    &path[..path.floor_char_boundary(MAX_LOGGED_PATH)]
}

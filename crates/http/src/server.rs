//! Accepts connections, answers requests, and shuts down gracefully.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::header::{
    CACHE_CONTROL, CONNECTION, CONTENT_SECURITY_POLICY, STRICT_TRANSPORT_SECURITY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use axum::http::{HeaderValue, Request};
use axum::response::{IntoResponse as _, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rand::RngExt as _;
use stampede_core::{Code, SaleId};
use stampede_engine::Error;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tower::Service as _;
use tracing::{Instrument as _, Level, Span};

use crate::app::{App, Surface};
use crate::connections::{Admitted, Connection, Connections, REFUSED_TOTAL, UnderWay};
use crate::extract::{Buyer, Peer, RequestId};
use crate::orders::BuyerAddress;
use crate::patient::Patient;
use crate::problem::{Language, Problem, render};
use crate::throttle::Throttle;
use crate::{address, cors, host, load_test, openapi, orders, security_log};

#[derive(Clone)]
pub struct ServerConfig {
    /// Plain without.
    pub tls: Option<TlsAcceptor>,
    /// Tell browsers to come by HTTPS alone.
    pub hsts: bool,
    /// Pages of these origins may call the buyers' routes.
    pub cors_origins: Vec<HeaderValue>,
    pub max_connections: usize,
    /// Of them, from one address that is not a trusted proxy.
    pub max_connections_per_address: usize,
    /// A request's head must arrive within this time; an idle connection is closed after it.
    pub head_timeout: Duration,
    /// A request must be answered within this time. Of who wants to buy it must be known by then who it is; the rest has a time of its own.
    pub answer_timeout: Duration,
    /// How long requests under way may go on after shutdown has begun.
    pub drain_timeout: Duration,
}

impl fmt::Debug for ServerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("ServerConfig");
        shown.field("tls", &self.tls.is_some()).field("max_connections", &self.max_connections).finish_non_exhaustive()
    }
}

/// The longest request head that is read; a longer one gets 431.
const MAX_HEAD: usize = 16 * 1024;
const MAX_HEADERS: usize = 64;
/// How much of a path the log shows: longer ones are sent to fill the disk.
const MAX_LOGGED_PATH: usize = 128;
/// An answer that is not a page loads nothing and is shown in no frame.
const NO_CONTENT_ALLOWED: HeaderValue = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
/// How long an answer may wait for a peer that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);

/// How many connections may be told at once that they are too many; more are closed without a word.
pub const MAX_REFUSALS: usize = 128;
const REFUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is logged that no connection can be accepted.
const ACCEPT_ERROR_EVERY: Duration = Duration::from_secs(10);

/// What a connection hears that is one too many.
static FULL: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let body = "{\"type\":\"urn:stampede:busy\",\"title\":\"Too many connections; please try again\",\
                \"status\":503,\"code\":\"busy\"}";
    let head = "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\nx-frame-options: DENY\r\n\
                content-security-policy: default-src 'none'; frame-ancestors 'none'\r\n\
                content-type: application/problem+json\r\ncontent-length:";
    format!("{head} {}\r\n\r\n{body}", body.len()).into_bytes()
});

/// Serves until `shutdown`, then lets the requests under way finish.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    surface: Surface,
    config: ServerConfig,
    shutdown: impl Future<Output = ()> + Send,
) {
    let router = app.clone().routes(surface);
    let drain_timeout = config.drain_timeout;
    let connections = Connections::new(config.max_connections, config.max_connections_per_address);
    let mut accept_errors = Throttle::new(ACCEPT_ERROR_EVERY);
    let edge = Edge { app: app.clone(), router, sells: surface != Surface::Admin, config: Arc::new(config) };
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let graceful = GracefulShutdown::new();
    tokio::pin!(shutdown);
    loop {
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, or the peer has gone: neither is a reason to stop serving.
                    if let Some(held_back) = accept_errors.pass(Instant::now()) {
                        tracing::warn!(%error, held_back, "cannot accept a connection");
                    }
                    if error.kind() != ErrorKind::ConnectionAborted {
                        connections.evict_one();
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    continue;
                }
            },
            () = &mut shutdown => break,
        };
        let is_proxy = address::is_trusted(peer.ip(), &app.config.trusted_proxies);
        let counted = (!is_proxy).then(|| address::counted_as(peer.ip().to_canonical()));
        match connections.admit(counted) {
            Some(place) => serve_connection(stream, peer, edge.clone(), &graceful, place),
            None => refuse(stream, &refusals, edge.config.tls.is_some()),
        }
    }
    drop(listener);
    app.drain();
    if timeout(drain_timeout, graceful.shutdown()).await.is_err() {
        tracing::warn!("some connections did not finish in time and were cut");
    }
}

fn refuse(mut stream: TcpStream, refusals: &Arc<Semaphore>, tls: bool) {
    metrics::counter!(REFUSED_TOTAL).increment(1);
    if tls {
        // A handshake is what we have no room for; closing it says enough.
        return;
    }
    let Ok(place) = refusals.clone().try_acquire_owned() else { return };
    let telling = async move {
        stream.write_all(&FULL).await?;
        stream.shutdown().await?;
        // What was sent is read away: closing with it unread would reset the connection, and the answer with it.
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
    };
    tokio::spawn(async move {
        // Whether it was heard or not, the connection is over.
        let _ = timeout(REFUSE_TIMEOUT, telling).await;
        drop(place);
    });
}

fn serve_connection(stream: TcpStream, peer: SocketAddr, edge: Edge, graceful: &GracefulShutdown, place: Admitted) {
    // Answers are small and complete: there is nothing to wait for.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let watcher = graceful.watcher();
    let connection = place.connection().clone();
    tokio::spawn(place.until_evicted(async move {
        match &edge.config.tls {
            None => speak_http(stream, peer, edge, connection, watcher).await,
            Some(tls) => match timeout(edge.config.head_timeout, tls.accept(stream)).await {
                Ok(Ok(stream)) => speak_http(stream, peer, edge, connection, watcher).await,
                Ok(Err(error)) => tracing::debug!(%error, "a connection does not speak TLS"),
                Err(_) => tracing::debug!("a connection took too long to speak TLS"),
            },
        }
    }));
}

async fn speak_http<S>(stream: S, peer: SocketAddr, edge: Edge, place: Arc<Connection>, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let head_timeout = edge.config.head_timeout;
    let stream = Patient::new(stream, WRITE_TIMEOUT, place.clone());
    let service = service_fn(move |request| answer(edge.clone(), request, peer, place.begin()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// What every connection has at hand.
#[derive(Clone)]
struct Edge {
    app: Arc<App>,
    router: Router,
    /// Buyers may come here.
    sells: bool,
    config: Arc<ServerConfig>,
}

/// What takes the short way, past the router.
#[derive(Clone, Copy)]
enum Direct {
    Buy(SaleId),
    /// What buying is measured against in a load test.
    Noop,
}

impl Edge {
    fn direct<B>(&self, request: &Request<B>) -> Option<Direct> {
        if !self.sells {
            return None;
        }
        let (method, uri) = (request.method(), request.uri());
        orders::wanted(method, uri)
            .map(Direct::Buy)
            .or_else(|| (self.app.config.allow_load_test && load_test::wanted(method, uri)).then_some(Direct::Noop))
    }

    /// The same as [`load_test::noop`].
    fn noop(&self, request: Request<Incoming>) -> Response {
        let started = Instant::now();
        drop(request);
        let response = load_test::respond();
        self.app.http_metrics.noop().record(started.elapsed());
        response
    }

    /// What everything but buying goes through.
    async fn route(&mut self, request: Request<Incoming>, client: IpAddr, id: &str) -> Response {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer(client));
        request.extensions_mut().insert(RequestId(id.into()));
        match timeout(self.config.answer_timeout, self.router.call(request)).await {
            Ok(Ok(response)) => response,
            Err(_) => Problem::new(Code::OutcomeUnknown).into_response(),
        }
    }

    /// What everybody waits for takes the short way, past the router: the same as [`orders::buy`].
    async fn sell(&self, request: Request<Incoming>, client: IpAddr, sale: SaleId, id: &str) -> Response {
        let started = Instant::now();
        let known = match BuyerAddress::check(&self.app, client) {
            Ok(_) => timeout(self.config.answer_timeout, Buyer::of(request.headers(), &self.app)).await,
            Err(limited) => Ok(Err(limited)),
        };
        // What was read of the connection is free again before the wait for the ledger.
        drop(request);
        let sold = match known.unwrap_or(Err(Error::Plain(Code::Unavailable))) {
            Ok(Buyer(user)) => orders::sell(&self.app, user, sale).await,
            Err(error) => Err(error),
        };
        self.app.http_metrics.buying.record(started.elapsed());
        sold.unwrap_or_else(|error| {
            // The one refusal that the log hears of.
            let failed = matches!(error, Error::Ledger(_));
            let span = if failed { tracing::error_span!("buying", id, %sale) } else { Span::none() };
            span.in_scope(|| Problem::from(error)).into_response()
        })
    }
}

/// Names a request in logs and in its answer: unique in this process, and hard to mistake for another's.
fn next_request_id() -> String {
    static START: LazyLock<u64> = LazyLock::new(|| rand::rng().random::<u64>() << 20);
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{:016x}", START.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)))
}

async fn answer(
    mut edge: Edge,
    request: Request<Incoming>,
    peer: SocketAddr,
    under_way: UnderWay,
) -> Result<Response, Infallible> {
    let started = Instant::now();
    let id = next_request_id();
    let direct = edge.direct(&request);
    // On the way of a try to buy nothing is told, unless it fails or everything is.
    let span = if direct.is_some() && !tracing::enabled!(Level::DEBUG) {
        Span::none()
    } else {
        let path = request.uri().path();
        let path = &path[..path.floor_char_boundary(MAX_LOGGED_PATH)];
        tracing::error_span!("request", id, method = %request.method(), path)
    };
    let is_for_administrators = openapi::is_for_administrators(request.uri().path());
    let language = Language::of(request.headers());
    let client = address::client(peer.ip(), request.headers(), &edge.app.config.trusted_proxies);
    let origin = cors::allowed(&request, &edge.config.cors_origins);
    let preflight = origin.as_ref().and_then(|_| cors::preflight(&request));
    let bad_host = host::fault(request.version(), request.headers());
    let refused = bad_host.map(|fault| Problem::new(Code::InvalidRequest).detail(fault).into_response());
    let refused = if under_way.is_evicted { Some(Problem::new(Code::Busy).into_response()) } else { refused };
    let response = match (refused.or(preflight), direct) {
        (Some(response), _) => response,
        (None, Some(Direct::Buy(sale))) => edge.sell(request, client, sale, &id).instrument(span.clone()).await,
        (None, Some(Direct::Noop)) => async { edge.noop(request) }.instrument(span.clone()).await,
        (None, None) => edge.route(request, client, &id).instrument(span.clone()).await,
    };
    let mut response = render(response, language);
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    // The pages set their own.
    headers.entry(CONTENT_SECURITY_POLICY).or_insert(NO_CONTENT_ALLOWED);
    // What a buyer or an operator is told is for nobody else; the page sets its own.
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    if under_way.is_evicted {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if edge.config.hsts {
        headers.insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static("max-age=31536000"));
    }
    if let Some(origin) = origin {
        cors::allow(headers, origin);
    }
    if let Ok(id) = HeaderValue::try_from(&id) {
        headers.insert("x-request-id", id);
    }
    edge.app.http_metrics.count(response.status());
    if !is_for_administrators && security_log::is_refusal(response.status()) {
        // A try to buy has a span only if there is something to say.
        let span = match direct {
            Some(Direct::Buy(sale)) => tracing::error_span!("buying", id, %sale),
            _ => span.clone(),
        };
        span.in_scope(|| edge.app.security_log.buyer_refused(client, response.status()));
    }
    span.in_scope(|| tracing::debug!(status = response.status().as_u16(), elapsed = ?started.elapsed(), "answered"));
    Ok(response)
}

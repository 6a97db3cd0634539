//! Accepts connections, with TLS or without, within limits; speaks HTTP/1 over them; shuts down gracefully.
//!
//! What a request gets as its response is the business of [`HttpService`].

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request};
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use stampede_core::Code;
use stampede_limit::rate_limit_key;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::connections::{Connection, ConnectionGuard, Connections, REFUSED_TOTAL, RequestGuard};
use crate::log_throttle::LogThrottle;
use crate::problem::{Language, Problem};
use crate::service::{DEFAULT_CONTENT_SECURITY_POLICY, HttpService};
use crate::write_timeout::WriteTimeout;

#[derive(Clone)]
pub struct ServerConfig {
    /// Plain HTTP without it.
    pub tls: Option<TlsAcceptor>,
    pub max_connections: usize,
    /// How many of them may come from one address that is not a trusted proxy.
    pub max_connections_per_address: usize,
    /// How long the head of a request may take to arrive; an idle connection is closed after it.
    pub head_timeout: Duration,
    /// How long requests in progress may go on after shutdown has begun.
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
/// How long a response may wait for a peer that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);

/// How many connections over the limit may be sent a response at once; more are closed without one.
pub const MAX_REFUSALS: usize = 128;
const REFUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a failure to accept is logged.
const ACCEPT_ERROR_EVERY: Duration = Duration::from_secs(10);
/// The pause after a failure to accept.
const ACCEPT_RETRY: Duration = Duration::from_millis(20);

/// The response to a connection over the limit.
static TOO_MANY_CONNECTIONS: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let problem = Problem::new(Code::Busy).detail("too many connections");
    let body = problem.to_json(Language::English);
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\nx-frame-options: DENY\r\n\
         content-security-policy: {}\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\n\r\n",
        DEFAULT_CONTENT_SECURITY_POLICY.to_str().unwrap_or_default(),
        body.len()
    );
    [head.into_bytes(), body].concat()
});

/// Serves until `shutdown`, then lets requests in progress finish.
pub async fn serve(
    listener: TcpListener,
    service: HttpService,
    config: ServerConfig,
    shutdown: impl Future<Output = ()> + Send,
) {
    let (service, config) = (Arc::new(service), Arc::new(config));
    let connections = Connections::new(config.max_connections, config.max_connections_per_address);
    let accept_errors = LogThrottle::new("cannot accept a connection", 1, ACCEPT_ERROR_EVERY);
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let graceful = GracefulShutdown::new();
    tokio::pin!(shutdown);
    loop {
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, or the peer has gone: the server keeps serving.
                    if accept_errors.allows() {
                        tracing::warn!(%error, "cannot accept a connection");
                    }
                    if error.kind() != ErrorKind::ConnectionAborted {
                        connections.evict_one();
                        tokio::time::sleep(ACCEPT_RETRY).await;
                    }
                    continue;
                }
            },
            () = &mut shutdown => break,
        };
        let is_limited = !service.is_trusted_proxy(peer.ip());
        let counted_for = is_limited.then(|| rate_limit_key(peer.ip().to_canonical()));
        match connections.admit(counted_for) {
            Some(guard) => serve_connection(stream, peer, &service, &config, &graceful, guard),
            None => refuse(stream, &refusals, config.tls.is_some()),
        }
    }
    drop(listener);
    if timeout(config.drain_timeout, graceful.shutdown()).await.is_err() {
        tracing::warn!("some connections did not finish in time and were closed");
    }
}

fn refuse(mut stream: TcpStream, refusals: &Arc<Semaphore>, tls: bool) {
    metrics::counter!(REFUSED_TOTAL).increment(1);
    if tls {
        // A response would need a handshake, which costs more than a connection over the limit may.
        return;
    }
    let Ok(permit) = refusals.clone().try_acquire_owned() else { return };
    let responding = async move {
        stream.write_all(&TOO_MANY_CONNECTIONS).await?;
        stream.shutdown().await?;
        // Closing a connection with unread input resets it, and the peer may lose the response.
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
    };
    tokio::spawn(async move {
        // The connection is closed whether or not the response arrived.
        let _ = timeout(REFUSE_TIMEOUT, responding).await;
        drop(permit);
    });
}

fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    service: &Arc<HttpService>,
    config: &Arc<ServerConfig>,
    graceful: &GracefulShutdown,
    guard: ConnectionGuard,
) {
    // Responses are small and written at once: there is nothing to coalesce.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let (service, config, watcher) = (service.clone(), config.clone(), graceful.watcher());
    let connection = guard.connection().clone();
    tokio::spawn(guard.until_evicted(async move {
        match &config.tls {
            None => serve_http(stream, peer, service, &config, connection, watcher).await,
            Some(tls) => match timeout(config.head_timeout, tls.accept(stream)).await {
                Ok(Ok(stream)) => serve_http(stream, peer, service, &config, connection, watcher).await,
                Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                Err(_) => tracing::debug!("TLS handshake timed out"),
            },
        }
    }));
}

async fn serve_http<S>(
    stream: S,
    peer: SocketAddr,
    service: Arc<HttpService>,
    config: &ServerConfig,
    connection: Arc<Connection>,
    watcher: Watcher,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stream = WriteTimeout::new(stream, WRITE_TIMEOUT, connection.clone());
    let service = service_fn(move |request| answer(service.clone(), request, peer, connection.begin_request()));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(config.head_timeout)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(serving).await {
        tracing::debug!(%error, "connection ended with an error");
    }
}

/// Answers a request. `guard` is an argument because an `async` block would capture only the field that it reads and drop the guard before
/// the response is ready.
async fn answer(
    service: Arc<HttpService>,
    request: Request<Incoming>,
    peer: SocketAddr,
    guard: RequestGuard,
) -> Result<Response, Infallible> {
    let mut response = service.call(request, peer.ip(), guard.is_evicted).await;
    if guard.is_evicted {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

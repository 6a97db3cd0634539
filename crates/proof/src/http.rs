//! A client over one keep-alive HTTP/1.1 connection, with JSON bodies and bearer tokens.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The timeout of a client that has no other.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A request and its response.
#[derive(Debug)]
pub struct Exchange<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    pub reply: &'a Reply,
}

static OBSERVER: OnceLock<fn(&Exchange<'_>)> = OnceLock::new();

/// Sets a function that is called with every exchange of every client of this process. Only the first call has an effect. The
/// end-to-end tests compare every response with the OpenAPI document this way.
pub fn observe(observer: fn(&Exchange<'_>)) {
    OBSERVER.get_or_init(|| observer);
}

#[derive(Debug)]
pub struct Client {
    requests: SendRequest<Full<Bytes>>,
    /// A response that takes longer is an error.
    timeout: Duration,
}

#[derive(Debug, Clone)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    /// The body as JSON, or null if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// A member of the JSON body that is a string, or an empty string if there is none.
    pub fn text(&self, member: &str) -> String {
        self.json()[member].as_str().unwrap_or_default().to_owned()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Result<Self, Error> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Self::from_stream(stream).await
    }

    /// Uses a connection that is already open, such as one with TLS.
    pub async fn from_stream(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Result<Self, Error> {
        let (requests, connection) = handshake(TokioIo::new(stream)).await?;
        // An error of the connection is reported by the request that it fails.
        tokio::spawn(connection);
        Ok(Self { requests, timeout: TIMEOUT })
    }

    /// For requests that take longer than usual.
    #[must_use]
    pub const fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Reply, Error> {
        let (method, uri) = (request.method().clone(), request.uri().clone());
        let exchange = async {
            self.requests.ready().await?;
            let (head, body) = self.requests.send_request(request).await?.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, Error>(Reply { status: head.status, headers: head.headers, body })
        };
        let reply = tokio::time::timeout(self.timeout, exchange).await??;
        if let Some(observer) = OBSERVER.get() {
            observer(&Exchange { method: &method, path: uri.path(), reply: &reply });
        }
        Ok(reply)
    }

    /// Sends a request with a bearer token, unless it is empty, and with a JSON body, unless it is null.
    pub async fn call(&mut self, method: Method, path: &str, token: &str, body: &Value) -> Result<Reply, Error> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, "localhost");
        if !token.is_empty() {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = if body.is_null() {
            Full::default()
        } else {
            request = request.header(CONTENT_TYPE, "application/json");
            Full::from(body.to_string())
        };
        self.send(request.body(body)?).await
    }

    pub async fn get(&mut self, path: &str, token: &str) -> Result<Reply, Error> {
        self.call(Method::GET, path, token, &Value::Null).await
    }

    pub async fn post(&mut self, path: &str, token: &str, body: &Value) -> Result<Reply, Error> {
        self.call(Method::POST, path, token, body).await
    }
}

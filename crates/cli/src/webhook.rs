//! Posts login codes, alerts and other messages to URLs of the operator, signed and with retries.
//!
//! Nothing waits for the delivery of a code: the response to a request for a code is the same for every number and takes the same time.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http_body_util::Full;
use hyper::client::conn::http1::handshake;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use sha2::Sha256;
use stampede_core::{Clock as _, Phone, SystemClock};
use stampede_engine::{Alert, AlertSender, Sender};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;

use crate::redact::SecretUrl;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The number of messages that may wait for delivery; further ones fail.
const MAX_QUEUED: usize = 1000;
/// The number of concurrent deliveries.
const CONCURRENCY: usize = 8;
const MAX_ATTEMPTS: u32 = 4;
/// A message that has waited longer is dropped: the owner of a code has requested another one.
const MAX_AGE: Duration = Duration::from_secs(120);
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub struct Webhook {
    queue: mpsc::Sender<Delivery>,
}

/// A message that waits for delivery.
struct Delivery {
    body: String,
    /// What it is, for the log.
    what: String,
    queued_at: Instant,
}

/// The parsed URL and the key of the signature.
pub struct WebhookClient {
    address: Address,
    tls: Option<TlsConnector>,
    key: Hmac<Sha256>,
}

/// Why a message was not accepted.
#[derive(Debug)]
pub enum PostError {
    /// The receiver answered with this status.
    Refused(StatusCode),
    /// There was no answer.
    Failed(anyhow::Error),
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(status) => write!(f, "it returned {status}"),
            Self::Failed(error) => write!(f, "{error:#}"),
        }
    }
}

impl std::error::Error for PostError {}

/// The parts of the URL.
struct Address {
    tls: bool,
    /// Host and port as in the URL, without credentials.
    authority: String,
    /// The credentials of the URL.
    authorization: Option<HeaderValue>,
    host: String,
    port: u16,
    path: String,
}

/// Checks the syntax of the URL in this setting.
pub fn check_url(url: &SecretUrl, setting: &str) -> anyhow::Result<()> {
    Address::parse(url.expose(), setting).map(drop)
}

/// The secret of a webhook: from the environment, or from the file in this setting.
pub fn webhook_secret(variable: &str, setting: &str, file: &str) -> anyhow::Result<String> {
    match std::env::var(variable) {
        Ok(secret) => Ok(secret),
        Err(_) => std::fs::read_to_string(file)
            .with_context(|| format!("the webhook needs a secret: set {setting} or {variable}")),
    }
}

impl Address {
    fn parse(url: &str, setting: &str) -> anyhow::Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("{setting} is not a URL"))?;
        let (tls, default_port) = match uri.scheme_str() {
            Some("https") => (true, 443),
            Some("http") => (false, 80),
            _ => bail!("{setting} must begin with http:// or https://"),
        };
        let authority = uri.authority().with_context(|| format!("{setting} has no host"))?.as_str();
        let (credentials, authority) =
            authority.rsplit_once('@').map_or((None, authority), |(credentials, host)| (Some(credentials), host));
        let host = uri.host().filter(|host| !host.is_empty()).with_context(|| format!("{setting} has no host"))?;
        let port = match authority.strip_prefix(host).and_then(|rest| rest.strip_prefix(':')) {
            None | Some("") => default_port,
            Some(port) => port.parse().with_context(|| format!("{setting} is not a URL: its port is not a number"))?,
        };
        Ok(Self {
            tls,
            authority: authority.to_owned(),
            authorization: credentials.map(|credentials| basic(credentials, setting)).transpose()?,
            host: host.trim_matches(['[', ']']).to_owned(),
            port,
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        })
    }
}

impl Webhook {
    /// Starts delivering to the URL in this setting. Must be called inside the runtime.
    pub fn start(url: &SecretUrl, setting: &str, secret: &str) -> anyhow::Result<Self> {
        let target = Arc::new(WebhookClient::new(url.expose(), setting, secret)?);
        let (queue, waiting) = mpsc::channel::<Delivery>(MAX_QUEUED);
        let waiting = Arc::new(tokio::sync::Mutex::new(waiting));
        for _ in 0..CONCURRENCY {
            let (target, waiting) = (target.clone(), waiting.clone());
            tokio::spawn(async move {
                loop {
                    let next = waiting.lock().await.recv().await;
                    let Some(delivery) = next else { return };
                    if delivery.queued_at.elapsed() < MAX_AGE {
                        target.deliver(&delivery).await;
                    }
                }
            });
        }
        Ok(Self { queue })
    }

    fn deliver(&self, body: &Value, what: String) -> Result<(), BoxError> {
        let delivery = Delivery { body: body.to_string(), what, queued_at: Instant::now() };
        Ok(self.queue.try_send(delivery).map_err(|_| "too many messages wait for delivery")?)
    }
}

#[async_trait]
impl Sender for Webhook {
    async fn send(&self, phone: &Phone, code: &str) -> Result<(), BoxError> {
        self.deliver(&json!({ "phone": phone.as_str(), "code": code }), format!("a login code for {phone}"))
    }

    async fn send_text(&self, phone: &Phone, text: &str) -> Result<(), BoxError> {
        self.deliver(&json!({ "phone": phone.as_str(), "text": text }), format!("a message for {phone}"))
    }
}

#[async_trait]
impl AlertSender for Webhook {
    async fn send(&self, alert: &Alert) -> Result<(), BoxError> {
        let Alert { kind, about, message } = alert;
        let body = json!({ "alert": kind.as_str(), "about": about, "message": message });
        self.deliver(&body, format!("the alert {}", kind.as_str()))
    }
}

impl WebhookClient {
    /// Posts to the URL in this setting.
    pub fn new(url: &str, setting: &str, secret: &str) -> anyhow::Result<Self> {
        ensure!(secret.len() >= 16, "the secret of {setting} must have at least 16 characters");
        let address = Address::parse(url, setting)?;
        let tls = if address.tls { Some(connector()?) } else { None };
        let key = Hmac::new_from_slice(secret.as_bytes()).context("the secret of the webhook cannot be used")?;
        Ok(Self { address, tls, key })
    }

    /// Tries a few times until the webhook accepts the message. After that it is dropped: the owner of a code can request another one, and
    /// an alert is in the log.
    async fn deliver(&self, Delivery { body, what, .. }: &Delivery) {
        for attempt in 1..=MAX_ATTEMPTS {
            let error = match tokio::time::timeout(ATTEMPT_TIMEOUT, self.post(body)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "timed out".to_owned(),
            };
            tracing::warn!(attempt, error, "the webhook did not accept {what}");
            if attempt < MAX_ATTEMPTS {
                tokio::time::sleep(Duration::from_millis(200) * 4u32.pow(attempt - 1)).await;
            }
        }
        tracing::error!("{what} could not be delivered");
    }

    /// Posts a message once, and fails unless the webhook accepts it.
    pub async fn post(&self, body: &str) -> Result<(), PostError> {
        let status = self.send(body).await.map_err(PostError::Failed)?;
        if status.is_success() { Ok(()) } else { Err(PostError::Refused(status)) }
    }

    async fn send(&self, body: &str) -> anyhow::Result<StatusCode> {
        let stream = TcpStream::connect((self.address.host.as_str(), self.address.port)).await?;
        match &self.tls {
            None => self.send_over(stream, body).await,
            Some(tls) => {
                let name = ServerName::try_from(self.address.host.clone())?;
                self.send_over(tls.connect(name, stream).await?, body).await
            }
        }
    }

    async fn send_over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        body: &str,
    ) -> anyhow::Result<StatusCode> {
        let (mut requests, connection) = handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let mut request = Request::post(&self.address.path)
            .header(HOST, &self.address.authority)
            .header(CONTENT_TYPE, "application/json")
            .header("x-stampede-signature", self.sign(body))
            .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))?;
        if let Some(authorization) = &self.address.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let response = requests.send_request(request).await;
        connection.abort();
        Ok(response?.status())
    }

    /// `t=SECONDS,v1=HEX`: an HMAC with a timestamp, so that the receiver can check the origin and the age.
    fn sign(&self, body: &str) -> String {
        let seconds = SystemClock.now().ms() / 1000;
        let mut mac = self.key.clone();
        mac.update(format!("{seconds}.{body}").as_bytes());
        let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("t={seconds},v1={hex}")
    }
}

impl fmt::Debug for WebhookClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WebhookClient({})", self.address.authority)
    }
}

/// The percent-encoded `user:password` of a URL as HTTP basic authentication.
fn basic(credentials: &str, setting: &str) -> anyhow::Result<HeaderValue> {
    let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
    let mut plain: Vec<u8> = percent_decode_str(user).collect();
    plain.push(b':');
    plain.extend(percent_decode_str(password));
    let mut value = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(plain)))
        .with_context(|| format!("the credentials in {setting} cannot be used"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn connector() -> anyhow::Result<TlsConnector> {
    let mut roots = rustls::RootCertStore::empty();
    roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn invalid_settings_are_named() {
        for (url, secret, word) in [
            ("ftp://x/y", "0123456789abcdef", "http://"),
            ("nowhere", "0123456789abcdef", "http://"),
            ("http://x/y", "short", "16"),
            ("http://me:short@", "0123456789abcdef", "webhook_url"),
            ("http://me:short@:80/y", "0123456789abcdef", "webhook_url"),
            ("http://me:short@x:port/y", "0123456789abcdef", "webhook_url"),
            ("http://me:short@x:66000/y", "0123456789abcdef", "webhook_url"),
            ("me:short@x/y", "0123456789abcdef", "webhook_url"),
        ] {
            let error = format!("{:#}", Webhook::start(&url.into(), "login.webhook_url", secret).unwrap_err());
            assert!(error.contains(word), "{url}: {error}");
            assert!(!error.contains("short"));
        }
    }

    #[test]
    fn credentials_are_sent_as_authorization_and_not_in_the_host() {
        for (url, authority, authorization) in [
            ("http://x/y", "x", None),
            ("http://me:word@x:81/y", "x:81", Some("me:word")),
            ("http://me@[::1]:81/y", "[::1]:81", Some("me:")),
            ("http://m%40e:wo%3Ard%20@x/y", "x", Some("m@e:wo:rd ")),
        ] {
            let address = Address::parse(url, "login.webhook_url").unwrap();
            let sent = address.authorization.map(|value| {
                assert!(value.is_sensitive());
                let coded = value.to_str().unwrap().strip_prefix("Basic ").unwrap().to_owned();
                String::from_utf8(STANDARD.decode(coded).unwrap()).unwrap()
            });
            assert_eq!((address.authority.as_str(), sent.as_deref()), (authority, authorization), "{url}");
        }
    }
}

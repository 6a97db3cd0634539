//! The section `[http]`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, bail};
use serde::Deserialize;
use stampede_http::tls::Certificate;
use stampede_http::{HeaderValue, Network, ServerConfig};

use super::at_least_one;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    max_connections: usize,
    max_connections_per_address: usize,
    head_timeout_ms: u64,
    answer_timeout_ms: u64,
    drain_timeout_ms: u64,
    trusted_proxies: Vec<String>,
    tls_certificate: String,
    tls_key: String,
    hsts: bool,
    cors_origins: Vec<String>,
}

impl Http {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("http.max_connections", self.max_connections as u64),
            ("http.max_connections_per_address", self.max_connections_per_address as u64),
            ("http.head_timeout_ms", self.head_timeout_ms),
            ("http.answer_timeout_ms", self.answer_timeout_ms),
        ])
    }

    pub fn trusted_proxies(&self) -> anyhow::Result<Vec<Network>> {
        let parse = |text: &String| {
            text.parse().map_err(|_| anyhow!("http.trusted_proxies: {text:?} is not a network such as 10.0.0.0/8"))
        };
        self.trusted_proxies.iter().map(parse).collect()
    }

    /// The files of the certificate and of its key; `None` without TLS.
    pub fn tls_files(&self) -> anyhow::Result<Option<(&Path, &Path)>> {
        match (self.tls_certificate.as_str(), self.tls_key.as_str()) {
            ("", "") => Ok(None),
            ("", _) | (_, "") => bail!("http.tls_certificate and http.tls_key must be set together or not at all"),
            (certificate, key) => Ok(Some((Path::new(certificate), Path::new(key)))),
        }
    }

    /// Reads the certificate, if there is one.
    pub fn certificate(&self) -> anyhow::Result<Option<Arc<Certificate>>> {
        Ok(self.tls_files()?.map(|(certificate, key)| Certificate::read(certificate, key)).transpose()?)
    }

    /// Whether responses have the header that makes browsers use HTTPS only: always with TLS.
    pub fn hsts(&self) -> bool {
        self.hsts || !self.tls_certificate.is_empty()
    }

    pub fn cors_origins(&self) -> anyhow::Result<Vec<HeaderValue>> {
        let origin = |text: &String| {
            let good = text.split_once("://").is_some_and(|(scheme, host)| {
                matches!(scheme, "http" | "https") && !host.is_empty() && !host.contains(['/', ' '])
            });
            let value = HeaderValue::try_from(text).ok().filter(|_| good);
            value.ok_or_else(|| anyhow!("http.cors_origins: {text:?} is not an origin such as https://shop.example"))
        };
        self.cors_origins.iter().map(origin).collect()
    }

    pub const fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.answer_timeout_ms)
    }

    pub fn server(&self, certificate: Option<&Arc<Certificate>>) -> anyhow::Result<ServerConfig> {
        Ok(ServerConfig {
            tls: certificate.map(Certificate::acceptor).transpose()?,
            max_connections: self.max_connections,
            max_connections_per_address: self.max_connections_per_address,
            head_timeout: Duration::from_millis(self.head_timeout_ms),
            drain_timeout: Duration::from_millis(self.drain_timeout_ms),
        })
    }
}

//! The section `[redis]`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use serde::Deserialize;
use stampede_redis::{Client, Servers};
use stampede_tls::{Tls, TlsFiles};

use super::{at_least_one, tls_files};
use crate::redact::SecretUrl;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Redis {
    url: SecretUrl,
    tls_ca: String,
    tls_certificate: String,
    tls_key: String,
    pub(super) assume_noeviction: bool,
    connect_timeout_ms: u64,
    response_timeout_ms: u64,
    failover_window_ms: u64,
}

impl Redis {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("redis.connect_timeout_ms", self.connect_timeout_ms),
            ("redis.response_timeout_ms", self.response_timeout_ms),
        ])
    }

    /// Whether there is a URL.
    pub(super) fn is_set(&self) -> bool {
        !self.url.expose().is_empty()
    }

    pub(super) fn servers(&self) -> anyhow::Result<Servers> {
        let servers = Servers::from(self.url.expose());
        Ok(match self.tls()? {
            Some(tls) => servers.with_tls(tls),
            None => servers,
        })
    }

    /// For connecting, and for a response.
    pub(super) const fn timeouts(&self) -> (Duration, Duration) {
        (Duration::from_millis(self.connect_timeout_ms), Duration::from_millis(self.response_timeout_ms))
    }

    /// How long an old master may accept orders after a fail-over.
    pub(super) const fn failover_window(&self) -> Duration {
        Duration::from_millis(self.failover_window_ms)
    }

    /// A client of Redis. Nothing is sent.
    pub(super) fn client(&self) -> anyhow::Result<Arc<Client>> {
        let (url, servers, (connect, response)) = (&self.url, self.servers()?, self.timeouts());
        let client = Client::new(servers, connect, response).map_err(|error| {
            // The detail of an error may quote the URL with its password.
            let reason = if error.detail().is_none() { format!(" ({error})") } else { String::new() };
            anyhow!(
                "redis.url: {url} is not a URL such as redis://127.0.0.1:6379/0 or rediss://127.0.0.1:6379/0{reason}"
            )
        })?;
        Ok(Arc::new(client))
    }

    /// Reads the certificates, if there are any.
    fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let Self { url, tls_ca, tls_certificate, tls_key, .. } = self;
        if tls_certificate.is_empty() != tls_key.is_empty() {
            bail!("redis.tls_certificate and redis.tls_key must be set together or not at all");
        }
        let files = tls_files(tls_ca, tls_certificate, tls_key);
        if files == TlsFiles::default() {
            return Ok(None);
        }
        if !url.expose().starts_with("rediss://") {
            bail!("redis.tls_ca, redis.tls_certificate and redis.tls_key need a redis.url that begins with rediss://");
        }
        Ok(Some(files.read().context("the TLS files of [redis]")?))
    }
}

//! The section `[rabbitmq]`.

use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use stampede_engine::RabbitMqConfig;
use stampede_queue::rabbitmq::{Config, MAX_PARTITIONS, QueueType};
use stampede_tls::{Tls, TlsFiles};

use super::{at_least_one, tls_files};
use crate::redact::SecretUrl;

/// How long the broker may take to confirm what no buyer waits for: orders that were left in an outbox, markers and dead letters. If they
/// were given up earlier, a broker that is slower than that would get them again and again.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum QueueTypeSetting {
    Classic,
    Quorum,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RabbitMq {
    url: SecretUrl,
    tls_ca: String,
    tls_certificate: String,
    tls_key: String,
    partitions: u16,
    queue_type: QueueTypeSetting,
    mandatory: bool,
    prefetch: u16,
    max_parked: u32,
    max_in_flight: usize,
    connect_timeout_ms: u64,
    heartbeat_ms: u64,
}

impl RabbitMq {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if self.partitions > MAX_PARTITIONS {
            bail!("invalid settings: rabbitmq.partitions must be at most {MAX_PARTITIONS}");
        }
        if self.heartbeat_ms < 1000 {
            bail!("invalid settings: rabbitmq.heartbeat_ms must be at least 1000");
        }
        at_least_one(&[
            ("rabbitmq.partitions", self.partitions.into()),
            ("rabbitmq.prefetch", self.prefetch.into()),
            ("rabbitmq.max_in_flight", self.max_in_flight as u64),
            ("rabbitmq.connect_timeout_ms", self.connect_timeout_ms),
        ])
    }

    /// Nothing is sent. A buyer waits for at most `accept_within`.
    pub(super) fn config(&self, accept_within: Duration) -> anyhow::Result<RabbitMqConfig> {
        if self.url.expose().is_empty() {
            bail!("queue.kind = \"rabbitmq\" needs a broker: set --amqp, such as amqp://127.0.0.1:5672");
        }
        // The error does not repeat the URL.
        let address = self.url.expose().parse().context("rabbitmq.url")?;
        let broker = Config {
            tls: self.tls()?,
            partitions: self.partitions,
            queue_type: match self.queue_type {
                QueueTypeSetting::Classic => QueueType::Classic,
                QueueTypeSetting::Quorum => QueueType::Quorum,
            },
            mandatory: self.mandatory,
            max_in_flight: self.max_in_flight,
            connect_timeout: Duration::from_millis(self.connect_timeout_ms),
            confirm_timeout: CONFIRM_TIMEOUT.max(accept_within),
            heartbeat: Duration::from_millis(self.heartbeat_ms),
            ..Config::new(address, "")
        };
        Ok(RabbitMqConfig { broker, prefetch: self.prefetch, max_parked: self.max_parked })
    }

    /// Reads the certificates; `None` without TLS.
    fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let Self { url, tls_ca, tls_certificate, tls_key, .. } = self;
        let files = tls_files(tls_ca, tls_certificate, tls_key);
        if url.expose().starts_with("amqps://") {
            return Ok(Some(files.read().context("the TLS files of [rabbitmq]")?));
        }
        if files != TlsFiles::default() {
            bail!(
                "rabbitmq.tls_ca, rabbitmq.tls_certificate and rabbitmq.tls_key need a rabbitmq.url that begins with amqps://"
            );
        }
        Ok(None)
    }
}

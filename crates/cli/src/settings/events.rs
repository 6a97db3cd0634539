//! The section `[events]`.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use stampede_engine::EventConfig;

use super::at_least_one;
use crate::event_sender::EventWebhook;
use crate::redact::SecretUrl;
use crate::webhook::{WebhookClient, check_url, webhook_secret};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Events {
    webhook_url: SecretUrl,
    webhook_secret_file: String,
    retry_pause_ms: u64,
}

impl Events {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if self.are_on() {
            check_url(&self.webhook_url, "events.webhook_url")?;
        }
        at_least_one(&[("events.retry_pause_ms", self.retry_pause_ms)])
    }

    /// Whether events are written and delivered.
    pub fn are_on(&self) -> bool {
        !self.webhook_url.expose().is_empty()
    }

    /// Reads the secret.
    pub(super) fn config(&self) -> anyhow::Result<Option<EventConfig>> {
        if !self.are_on() {
            return Ok(None);
        }
        let secret = webhook_secret("STAMPEDE_EVENTS_SECRET", "events.webhook_secret_file", &self.webhook_secret_file)?;
        let client = WebhookClient::new(self.webhook_url.expose(), "events.webhook_url", secret.trim())?;
        let retry_pause = Duration::from_millis(self.retry_pause_ms);
        Ok(Some(EventConfig { sender: Arc::new(EventWebhook(client)), retry_pause }))
    }
}

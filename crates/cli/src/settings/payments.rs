//! The section `[payments]`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use stampede_engine::{LatePayments, PaymentConfig, PaymentProvider};

use super::at_least_one;
use crate::payment_provider::RefundWebhook;
use crate::redact::SecretUrl;
use crate::webhook::{WebhookClient, check_url, webhook_secret};

/// The shortest key of callbacks.
const MIN_KEY: usize = 32;
/// The key in use and the next one.
const MAX_KEYS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Late {
    Refund,
    Readmit,
}

impl From<Late> for LatePayments {
    fn from(late: Late) -> Self {
        match late {
            Late::Refund => Self::Refund,
            Late::Readmit => Self::Readmit,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Payments {
    callback_key_files: Vec<String>,
    replay_window_ms: u64,
    test_provider: bool,
    late: Late,
    refund_url: SecretUrl,
    refund_secret_file: String,
    refund_pause_ms: u64,
    refund_tries: u32,
}

impl Payments {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.callback_key_files.len() <= MAX_KEYS,
            "invalid settings: payments.callback_key_files must have at most {MAX_KEYS} files"
        );
        if !self.refund_url.expose().is_empty() {
            check_url(&self.refund_url, "payments.refund_url")?;
        }
        at_least_one(&[
            ("payments.replay_window_ms", self.replay_window_ms),
            ("payments.refund_pause_ms", self.refund_pause_ms),
            ("payments.refund_tries", self.refund_tries.into()),
        ])
    }

    fn provider(&self) -> anyhow::Result<Option<Arc<dyn PaymentProvider>>> {
        if self.refund_url.expose().is_empty() {
            return Ok(None);
        }
        let secret = webhook_secret("STAMPEDE_REFUND_SECRET", "payments.refund_secret_file", &self.refund_secret_file)?;
        let client = WebhookClient::new(self.refund_url.expose(), "payments.refund_url", secret.trim())?;
        Ok(Some(Arc::new(RefundWebhook(client))))
    }

    /// Reads the keys. A demo has the provider for tests.
    pub fn config(&self, demo: bool) -> anyhow::Result<PaymentConfig> {
        let read = |file: &String| {
            let key = std::fs::read_to_string(file).with_context(|| format!("payments.callback_key_files: {file}"))?;
            let key = key.trim().as_bytes().to_vec();
            ensure!(key.len() >= MIN_KEY, "the key in {file} must have at least {MIN_KEY} characters");
            Ok(key)
        };
        Ok(PaymentConfig {
            callback_keys: self.callback_key_files.iter().map(read).collect::<anyhow::Result<_>>()?,
            replay_window: Duration::from_millis(self.replay_window_ms),
            test_provider: self.test_provider || demo,
            late: self.late.into(),
            provider: self.provider()?,
            refund_pause: Duration::from_millis(self.refund_pause_ms),
            refund_tries: self.refund_tries,
        })
    }
}

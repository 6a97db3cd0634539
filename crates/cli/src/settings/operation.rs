//! What operators see: the sections `[alerts]` and `[log]`.

use std::time::Duration;

use anyhow::anyhow;
use serde::Deserialize;
use stampede_core::Phone;

use super::at_least_one;
use crate::redact::SecretUrl;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alerts {
    pub webhook_url: SecretUrl,
    pub webhook_secret_file: String,
    phones: Vec<String>,
    repeat_after_ms: u64,
}

impl Alerts {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[("alerts.repeat_after_ms", self.repeat_after_ms)])
    }

    pub fn phones(&self) -> anyhow::Result<Vec<Phone>> {
        let parse = |text: &String| Phone::parse(text).map_err(|_| anyhow!("alerts.phones: {text:?} is not a number"));
        self.phones.iter().map(parse).collect()
    }

    pub const fn repeat_after(&self) -> Duration {
        Duration::from_millis(self.repeat_after_ms)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    pub level: String,
    pub format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    Text,
    Json,
}

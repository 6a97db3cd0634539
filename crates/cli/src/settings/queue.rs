//! The section `[queue]`.

use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;
use stampede_engine::{AnswerAfter, QueueConfig};

use super::at_least_one;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum QueueKind {
    RedisStream,
    #[serde(rename = "rabbitmq")]
    #[value(name = "rabbitmq")]
    RabbitMq,
}

impl QueueKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RedisStream => "redis-stream",
            Self::RabbitMq => "rabbitmq",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AnswerAfterSetting {
    Queue,
    Ledger,
}

impl From<AnswerAfterSetting> for AnswerAfter {
    fn from(setting: AnswerAfterSetting) -> Self {
        match setting {
            AnswerAfterSetting::Queue => Self::Queue,
            AnswerAfterSetting::Ledger => Self::Ledger,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Queue {
    pub(super) kind: QueueKind,
    answer_after: AnswerAfterSetting,
    accept_within_ms: u64,
    pub(super) consume: bool,
    pub(super) allow_without_aof: bool,
    max_batches: u32,
    pub(super) abandon: bool,
}

impl Queue {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("queue.accept_within_ms", self.accept_within_ms),
            ("queue.max_batches", self.max_batches.into()),
        ])
    }

    pub(super) const fn accept_within(&self) -> Duration {
        Duration::from_millis(self.accept_within_ms)
    }

    pub(super) fn config(&self) -> QueueConfig {
        QueueConfig {
            accept_within: self.accept_within(),
            answer_after: self.answer_after.into(),
            consume: self.consume,
            max_batches: self.max_batches,
        }
    }
}

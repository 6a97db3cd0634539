//! The section `[buy]`.

use std::time::Duration;

use anyhow::bail;
use serde::Deserialize;

use super::{Limit, at_least_one};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buy {
    answer_timeout_ms: u64,
    pub(super) max_batch: usize,
    pub(super) queue_per_sale: usize,
    pub(super) queue_total: usize,
    quarantine_after_ms: u64,
    pub per_user: Limit,
    pub per_address: Limit,
}

impl Buy {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if self.max_batch > 4096 {
            bail!("invalid settings: buy.max_batch must be at most 4096");
        }
        at_least_one(&[
            ("buy.answer_timeout_ms", self.answer_timeout_ms),
            ("buy.max_batch", self.max_batch as u64),
            ("buy.queue_per_sale", self.queue_per_sale as u64),
            ("buy.queue_total", self.queue_total as u64),
            ("buy.per_user.window_ms", self.per_user.window_ms),
            ("buy.per_address.window_ms", self.per_address.window_ms),
        ])
    }

    pub(super) const fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.answer_timeout_ms)
    }

    pub(super) const fn quarantine_after(&self) -> Duration {
        Duration::from_millis(self.quarantine_after_ms)
    }
}

//! The section `[orders]`.

use anyhow::bail;
use serde::Deserialize;
use stampede_core::shop::MAX_PAYMENT_DEADLINE_MS;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orders {
    pub(super) payment_deadline_ms: u32,
    pub(super) buy_again: bool,
}

impl Orders {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if self.payment_deadline_ms > MAX_PAYMENT_DEADLINE_MS {
            bail!("invalid settings: orders.payment_deadline_ms must be at most {MAX_PAYMENT_DEADLINE_MS}");
        }
        Ok(())
    }
}

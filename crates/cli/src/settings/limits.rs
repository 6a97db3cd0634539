//! Rate limits: the type that several sections use, and the section `[limits]`.

use std::time::Duration;

use serde::Deserialize;

use super::at_least_one;

/// So many in a sliding window.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    pub(super) count: u32,
    pub(super) window_ms: u64,
}

impl From<Limit> for stampede_limit::Limit {
    fn from(limit: Limit) -> Self {
        Self { count: limit.count, window: Duration::from_millis(limit.window_ms) }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub reads_per_address: Limit,
    pub searches_per_address: Limit,
    pub searches_at_once: usize,
    pub probes_per_address: Limit,
    pub own_per_user: Limit,
    pub memory: usize,
    redis_timeout_ms: u64,
}

impl Limits {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("limits.reads_per_address.window_ms", self.reads_per_address.window_ms),
            ("limits.searches_per_address.window_ms", self.searches_per_address.window_ms),
            ("limits.searches_at_once", self.searches_at_once as u64),
            ("limits.probes_per_address.window_ms", self.probes_per_address.window_ms),
            ("limits.own_per_user.window_ms", self.own_per_user.window_ms),
            ("limits.redis_timeout_ms", self.redis_timeout_ms),
        ])
    }

    pub(super) const fn redis_timeout(&self) -> Duration {
        Duration::from_millis(self.redis_timeout_ms)
    }
}

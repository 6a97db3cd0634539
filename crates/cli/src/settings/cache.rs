//! The section `[cache]`.

use std::time::Duration;

use anyhow::bail;
use serde::Deserialize;
use stampede_engine::CacheConfig;

use super::at_least_one;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    ttl_ms: u64,
    refresh_after_ms: u64,
    empty_ttl_ms: u64,
    local_ttl_ms: u64,
    jitter: f64,
    max_entries: u64,
    filter_rebuild_ms: u64,
    redis_timeout_ms: u64,
}

impl Cache {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if !(0.0..=1.0).contains(&self.jitter) {
            bail!("invalid settings: cache.jitter must be between 0 and 1");
        }
        if self.refresh_after_ms > self.ttl_ms {
            bail!("invalid settings: cache.refresh_after_ms must be at most cache.ttl_ms");
        }
        at_least_one(&[
            ("cache.ttl_ms", self.ttl_ms),
            ("cache.refresh_after_ms", self.refresh_after_ms),
            ("cache.empty_ttl_ms", self.empty_ttl_ms),
            ("cache.local_ttl_ms", self.local_ttl_ms),
            ("cache.max_entries", self.max_entries),
            ("cache.filter_rebuild_ms", self.filter_rebuild_ms),
            ("cache.redis_timeout_ms", self.redis_timeout_ms),
        ])
    }

    pub(super) const fn config(&self) -> CacheConfig {
        CacheConfig {
            ttl: Duration::from_millis(self.ttl_ms),
            refresh_after: Duration::from_millis(self.refresh_after_ms),
            empty_ttl: Duration::from_millis(self.empty_ttl_ms),
            local_ttl: Duration::from_millis(self.local_ttl_ms),
            jitter: self.jitter,
            max_entries: self.max_entries,
            filter_rebuild_interval: Duration::from_millis(self.filter_rebuild_ms),
            redis_timeout: Duration::from_millis(self.redis_timeout_ms),
        }
    }
}

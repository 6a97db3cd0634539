//! The settings `tier` and `ids`, the sections `[shield]` and `[reconcile]`, and what of the other sections a tier consists of.

use std::time::Duration;

use anyhow::bail;
use clap::ValueEnum;
use serde::Deserialize;
use stampede_engine::{
    IdConfig, QueuedConfig, ReconcileConfig, RedisTierConfig, ShieldConfig, SoloConfig, StreamConfig, TierConfig,
    Transport,
};
use stampede_ledger::Database;

use super::{QueueKind, Settings, at_least_one};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    Solo,
    Shared,
    Queued,
    Shielded,
}

impl Tier {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Solo => "solo",
            Self::Shared => "shared",
            Self::Queued => "queued",
            Self::Shielded => "shielded",
        }
    }

    /// Whether a queue is in front of the database.
    pub const fn has_queue(self) -> bool {
        matches!(self, Self::Queued | Self::Shielded)
    }

    /// Whether the gate is in Redis.
    pub const fn has_redis(self) -> bool {
        matches!(self, Self::Shared | Self::Queued | Self::Shielded)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ids {
    Snowflake,
    Redis,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shield {
    expiry_ms: u64,
    max_buyers: u32,
}

impl Shield {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[("shield.expiry_ms", self.expiry_ms), ("shield.max_buyers", self.max_buyers.into())])
    }

    pub(super) const fn config(&self) -> ShieldConfig {
        ShieldConfig { expiry: Duration::from_millis(self.expiry_ms), max_buyers: self.max_buyers }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reconcile {
    interval_ms: u64,
    confirm_after_ms: u64,
}

impl Reconcile {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("reconcile.interval_ms", self.interval_ms),
            ("reconcile.confirm_after_ms", self.confirm_after_ms),
        ])
    }

    const fn config(&self) -> ReconcileConfig {
        ReconcileConfig {
            interval: Duration::from_millis(self.interval_ms),
            confirm_after: Duration::from_millis(self.confirm_after_ms),
        }
    }
}

impl Settings {
    /// The tier and its settings.
    pub fn tier(&self, database: &Database) -> anyhow::Result<TierConfig> {
        let is_embedded = matches!(database, Database::Sqlite(_));
        match self.tier {
            Tier::Solo => Ok(TierConfig::Solo(SoloConfig {
                // This process holds the lock of an embedded database.
                shared_ledger: !is_embedded,
                max_batch: self.buy.max_batch,
                queue_per_sale: self.buy.queue_per_sale,
                queue_total: self.buy.queue_total,
                quarantine_after: self.buy.quarantine_after(),
                abandon_queue: self.queue.abandon,
            })),
            Tier::Shared | Tier::Queued | Tier::Shielded if is_embedded => bail!(
                "the tier {} has several nodes, and SQLite belongs to one process: set --database to mysql://… or postgres://…",
                self.tier.as_str()
            ),
            Tier::Shared | Tier::Queued | Tier::Shielded if !self.redis.is_set() => {
                bail!(
                    "the tier {} has its gate in Redis: set --redis, such as redis://127.0.0.1:6379",
                    self.tier.as_str()
                )
            }
            Tier::Shared => Ok(TierConfig::Shared(self.redis_tier()?)),
            Tier::Queued | Tier::Shielded => {
                let shield = (self.tier == Tier::Shielded).then(|| self.shield.config());
                let (redis, queue, transport) = (self.redis_tier()?, self.queue.config(), self.transport()?);
                Ok(TierConfig::Queued(QueuedConfig { redis, queue, transport, shield }))
            }
        }
    }

    fn redis_tier(&self) -> anyhow::Result<RedisTierConfig> {
        let (connect_timeout, response_timeout) = self.redis.timeouts();
        Ok(RedisTierConfig {
            redis: self.redis.client()?,
            limit_redis: self.redis.client()?,
            limit_timeout: self.limits.redis_timeout(),
            servers: self.redis.servers()?,
            connect_timeout,
            response_timeout,
            failover_window: self.redis.failover_window(),
            assume_noeviction: self.redis.assume_noeviction,
            max_batch: self.buy.max_batch,
            queue_per_sale: self.buy.queue_per_sale,
            queue_total: self.buy.queue_total,
            quarantine_after: self.buy.quarantine_after(),
            reconcile: self.reconcile.config(),
        })
    }

    fn transport(&self) -> anyhow::Result<Transport> {
        match self.queue.kind {
            QueueKind::RedisStream => {
                let allow_without_aof = self.queue.allow_without_aof;
                Ok(Transport::RedisStream(StreamConfig { redis: self.redis.client()?, allow_without_aof }))
            }
            QueueKind::RabbitMq => Ok(Transport::RabbitMq(Box::new(self.rabbitmq.config(self.queue.accept_within())?))),
        }
    }

    /// The settings of a process that records orders and serves no buyers.
    pub fn for_worker(mut self) -> anyhow::Result<Self> {
        if !self.tier.has_queue() {
            bail!(
                "only the tiers queued and shielded have a queue; this is the tier {}: set --tier queued",
                self.tier.as_str()
            );
        }
        self.queue.consume = true;
        Ok(self)
    }

    /// How ids are made.
    pub fn ids(&self, tier: &TierConfig) -> anyhow::Result<IdConfig> {
        match (self.ids, tier) {
            (Ids::Snowflake, _) => Ok(IdConfig::Snowflake),
            (Ids::Redis, TierConfig::Shared(tier)) => Ok(IdConfig::Redis(tier.redis.clone())),
            (Ids::Redis, TierConfig::Queued(queued)) => Ok(IdConfig::Redis(queued.redis.redis.clone())),
            (Ids::Redis, TierConfig::Solo(_)) if !self.redis.is_set() => {
                bail!("ids = \"redis\" needs a Redis: set --redis, such as redis://127.0.0.1:6379")
            }
            (Ids::Redis, TierConfig::Solo(_)) => Ok(IdConfig::Redis(self.redis.client()?)),
        }
    }
}

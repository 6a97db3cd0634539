//! What the engine uses in Redis beside the gate: counters of rate limits, the second level of the caches, and locks.

use rand::RngExt as _;
use stampede_cache::{Remote, RemoteConfig};
use stampede_core::ports::{GateRecord, Ledger, LedgerError};
use stampede_limit::{Counters, RedisCounters};
use stampede_lock::Locks;

use super::super::Services;
use super::RedisTierConfig;
use crate::catalogue_cache::{CacheConfig, Sharing};
use crate::engine::StartError;

/// The ledger's record of the gate, with the id of the ledger that all keys in Redis have. The first call makes the id.
pub(crate) async fn gate_record(ledger: &dyn Ledger) -> Result<GateRecord, LedgerError> {
    let new_id = format!("{:016x}", rand::rng().random::<u64>());
    ledger.gate_record(&new_id).await
}

/// Each of these has its own connections, so that none waits for another or for the gate.
pub(in crate::tier) async fn connect(
    config: &RedisTierConfig,
    cache: &CacheConfig,
    ledger: &dyn Ledger,
) -> Result<Services, StartError> {
    let application = format!("stampede:{}", gate_record(ledger).await?.ledger_id);
    let RedisTierConfig { limit_redis, limit_timeout, servers, connect_timeout, response_timeout, .. } = config;
    let counters = RedisCounters::start(limit_redis.clone(), format!("{application}:limit"), *limit_timeout);
    let remote = RemoteConfig {
        connect_timeout: *connect_timeout,
        response_timeout: cache.redis_timeout,
        ..RemoteConfig::default()
    };
    let remote = Remote::new(application.clone(), servers.clone(), remote)
        .map_err(|error| StartError::Redis(error.to_string()))?;
    let locks = stampede_lock::Config {
        prefix: format!("{application}:scheduled"),
        connect_timeout: *connect_timeout,
        response_timeout: *response_timeout,
        ..stampede_lock::Config::default()
    };
    let locks = Locks::new(servers.clone(), locks).map_err(|error| StartError::Redis(error.to_string()))?;
    Ok(Services {
        limit_counters: Counters::Redis(counters),
        cache_sharing: Sharing::Redis(remote),
        locks: Some(locks),
    })
}

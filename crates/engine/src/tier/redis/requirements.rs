//! What Redis must be like. Checked with every new connection, because the server may have been replaced, and at intervals, because its
//! clock and its settings may change while it runs.

use std::time::Duration;

use redis::{FromRedisValue, RedisError};
use stampede_core::Timestamp;
use stampede_core::ports::GateRecords;
use stampede_gate::RedisGate;
use stampede_redis::CommandError;

use super::super::{Delivery, StreamConfig};
use super::recovery::NotReady;

/// The first version that keeps loaded scripts neither in its append-only file nor on replicas. With an older one, a server that was
/// restarted or replaced would have the scripts of the gate, and the loss of marks would go unnoticed.
const OLDEST_VERSION: (u32, u32) = (7, 0);
/// Sales begin and end by the clock of Redis, and ids carry that of the ledger.
pub(in crate::tier) const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(1);

/// Checks the server, and returns the number of the connection over which it was checked.
pub(super) async fn check(
    gate: &RedisGate,
    ledger: &(dyn GateRecords + '_),
    assume_noeviction: bool,
) -> Result<u64, NotReady> {
    let server: String = query(gate, &["INFO", "server"]).await?;
    let connection = gate.current_connection();
    let version = field(&server, "redis_version").unwrap_or_default();
    if parse_version(version).is_none_or(|version| version < OLDEST_VERSION) {
        let (major, minor) = OLDEST_VERSION;
        let reason = format!("Redis {version} is too old; {major}.{minor} is needed");
        return Err(NotReady::Unsuitable { case: "Redis is too old", reason });
    }
    if !assume_noeviction {
        check_eviction(gate).await?;
    }
    let before = ledger.now().await?;
    let (seconds, microseconds): (i64, i64) = query(gate, &["TIME"]).await?;
    let after = ledger.now().await?;
    let redis = Timestamp::from_ms(seconds * 1000 + microseconds / 1000);
    if redis < before.minus(MAX_CLOCK_DIFFERENCE) || redis > after.plus(MAX_CLOCK_DIFFERENCE) {
        return Err(wrong_clock(redis.ms() - after.ms()));
    }
    let replication: String = query(gate, &["INFO", "replication"]).await?;
    if field(&replication, "role") != Some("master") {
        return Err(NotReady::Redis("it is a replica".to_owned()));
    }
    // A new connection may lead to another server.
    let is_same = gate.current_connection() == connection;
    connection.filter(|_| is_same).ok_or_else(|| NotReady::Redis("the connection broke".to_owned()))
}

pub(super) fn wrong_clock(ahead_ms: i64) -> NotReady {
    let reason = format!("the clock of Redis is {ahead_ms} ms ahead of the database's; synchronize both (NTP)");
    NotReady::Unsuitable { case: "the clock of Redis is wrong", reason }
}

/// Checks that Redis writes what it holds to disk. Without a queue, or where the settings allow it, it need not: then this is a warning,
/// once for a connection.
pub(super) async fn check_persistence(gate: &RedisGate, delivery: &Delivery, is_new: bool) -> Result<(), NotReady> {
    let persistence: String = query(gate, &["INFO", "persistence"]).await?;
    if writes_append_only_file(&persistence) {
        return Ok(());
    }
    match delivery {
        Delivery::Stream(_, StreamConfig { allow_without_aof: false, .. }) => {
            let reason = "Redis does not write an append-only file (appendonly no), so accepted orders would be lost with it: set \
                appendonly yes, or allow it with queue.allow_without_aof = true";
            return Err(NotReady::Unsuitable {
                case: "Redis does not write an append-only file",
                reason: reason.to_owned(),
            });
        }
        _ if !is_new => {}
        Delivery::Stream(..) => tracing::warn!(
            "Redis does not write an append-only file (appendonly no): when it dies, accepted orders that were not yet recorded are lost"
        ),
        Delivery::Commit | Delivery::RabbitMq(..) => tracing::warn!(
            "Redis does not write an append-only file (appendonly no): when it dies, orders that were admitted and not yet recorded are lost, \
             and their buyers have to try again"
        ),
    }
    Ok(())
}

/// A server that does not say so may not write one.
fn writes_append_only_file(persistence: &str) -> bool {
    field(persistence, "aof_enabled") == Some("1")
}

/// Without an evicted mark, the gate would admit orders that the ledger then rejects, and tell owners that the sale is sold out.
async fn check_eviction(gate: &RedisGate) -> Result<(), NotReady> {
    let answer: Result<Vec<String>, _> = try_query(gate, &["CONFIG", "GET", "maxmemory-policy"]).await;
    match answer {
        Ok(policy) => match policy.get(1).map(String::as_str) {
            Some("noeviction") => Ok(()),
            policy => {
                let policy = policy.unwrap_or("unknown");
                let reason = format!(
                    "Redis evicts keys (maxmemory-policy {policy}), so the gate would forget orders; set it to noeviction"
                );
                Err(NotReady::Unsuitable { case: "Redis evicts keys", reason })
            }
        },
        Err(CommandError::Refused(error)) => Err(NotReady::Unsuitable {
            case: "Redis does not tell its maxmemory-policy",
            reason: format!(
                "Redis does not tell its maxmemory-policy ({error}); if it is noeviction, set redis.assume_noeviction = true"
            ),
        }),
        Err(error) => Err(NotReady::Redis(error.to_string())),
    }
}

async fn query<T: FromRedisValue>(gate: &RedisGate, command: &[&str]) -> Result<T, NotReady> {
    try_query(gate, command).await.map_err(|error| NotReady::Redis(error.to_string()))
}

async fn try_query<T: FromRedisValue>(gate: &RedisGate, command: &[&str]) -> Result<T, CommandError> {
    let mut sent = redis::Cmd::new();
    sent.arg(command);
    let reply = gate.query(sent).await?;
    T::from_redis_value(reply).map_err(|error| CommandError::Unknown(RedisError::from(error)))
}

/// The value of a line `name:value`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.split_once(':').filter(|(key, _)| *key == name)).map(|(_, value)| value.trim())
}

fn parse_version(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_the_server_are_read() {
        assert!(parse_version("7.0.15").unwrap() >= OLDEST_VERSION);
        assert!(parse_version("10.0.0").unwrap() >= OLDEST_VERSION);
        assert!(parse_version("6.2.14").unwrap() < OLDEST_VERSION);
        assert_eq!(parse_version("unknown"), None);
        assert!(writes_append_only_file("# Persistence\r\naof_enabled:1\r\n"));
        assert!(!writes_append_only_file("# Persistence\r\naof_enabled:0\r\n"));
        assert!(!writes_append_only_file("# Persistence\r\nloading:0\r\n"));
        assert_eq!(field("# Server\r\nredis_version:7.0.15\r\nx:1\r\n", "redis_version"), Some("7.0.15"));
    }
}

//! Counts what a version costs: SQL statements by MariaDB's own counter, commands by that of Redis and by those that were sent; and the keys
//! that it leaves in Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisFuture, Value};
use sqlx::MySqlPool;

use crate::error::{Error, Result};
use crate::servers::{Redis, Servers};
use crate::site::Site;

/// A connection to Redis that counts the commands sent. Clones share the connection and the count.
#[derive(Debug, Clone)]
pub struct CountedRedis {
    connection: MultiplexedConnection,
    sent: Arc<AtomicU64>,
}

impl CountedRedis {
    pub(crate) const fn new(connection: MultiplexedConnection, sent: Arc<AtomicU64>) -> Self {
        Self { connection, sent }
    }

    /// Another connection whose commands are counted with those of this one.
    pub fn counting(&self, connection: MultiplexedConnection) -> Self {
        Self { connection, sent: self.sent.clone() }
    }
}

impl ConnectionLike for CountedRedis {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        self.connection.req_packed_command(cmd)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        self.connection.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

/// Counters at one moment; `None` for a server that the version does not need.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    pub sql: Option<u64>,
    pub redis_executed: Option<u64>,
    pub redis_sent: Option<u64>,
}

impl Counters {
    pub(crate) async fn read(servers: &Servers, site: &Site) -> Result<Self> {
        let mut counters = Self::default();
        if site.db().is_ok() {
            counters.sql = Some(executed_statements(&servers.mariadb()?.admin).await?);
        }
        if let Ok(redis) = site.redis() {
            counters.redis_executed = Some(executed_commands(servers.redis()?).await?);
            counters.redis_sent = Some(redis.sent.load(Ordering::Relaxed));
        }
        Ok(counters)
    }

    /// What was counted between the two readings.
    pub fn since(self, before: Self) -> Self {
        let difference = |after: Option<u64>, before: Option<u64>| after?.checked_sub(before?);
        Self {
            // The first reading is a statement too.
            sql: difference(self.sql, before.sql).map(|count| count.saturating_sub(1)),
            redis_executed: difference(self.redis_executed, before.redis_executed),
            redis_sent: difference(self.redis_sent, before.redis_sent),
        }
    }

    /// These counts without those of something that was done so many times.
    pub fn without(self, times: u64, cost: Self) -> Self {
        let rest = |all: Option<u64>, one: Option<u64>| Some(all?.saturating_sub(times * one.unwrap_or(0)));
        Self {
            sql: rest(self.sql, cost.sql),
            redis_executed: rest(self.redis_executed, cost.redis_executed),
            redis_sent: rest(self.redis_sent, cost.redis_sent),
        }
    }
}

/// The statements that MariaDB has executed so far. Reading them is one more.
pub(crate) async fn executed_statements(admin: &MySqlPool) -> Result<u64> {
    let (_, questions): (String, String) =
        sqlx::query_as("SHOW GLOBAL STATUS LIKE 'Questions'").fetch_one(admin).await?;
    questions.parse().map_err(|_| Error::Failed(format!("MariaDB counts {questions:?} statements")))
}

/// The commands that Redis has executed so far, without those of the lab.
pub(crate) async fn executed_commands(redis: &Redis) -> Result<u64> {
    let info: String = redis::cmd("INFO").arg("commandstats").query_async(&mut redis.admin.clone()).await?;
    Ok(calls(&info))
}

/// The sum of all calls in `INFO commandstats`, without those that connect or read the counters.
pub(crate) fn calls(info: &str) -> u64 {
    const NOT_OF_THE_VERSION: &[&str] = &["info", "hello", "client", "config", "flushall", "script"];
    let calls = |line: &str| -> Option<u64> {
        let (name, stats) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let name = name.split('|').next()?;
        let calls = stats.strip_prefix("calls=")?.split(',').next()?.parse().ok()?;
        (!NOT_OF_THE_VERSION.contains(&name)).then_some(calls)
    };
    info.lines().filter_map(calls).sum()
}

/// How many keys of single users or orders there are that never expire. A key with a colon in its name is one of them; those of a whole
/// sale, such as its stock, have a plain name.
pub(crate) async fn lasting_keys(redis: &Redis) -> Result<u64> {
    const NEVER: i64 = -1;
    let mut connection = redis.admin.clone();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*:*").query_async(&mut connection).await?;
    if keys.is_empty() {
        return Ok(0);
    }
    let mut expiries = redis::pipe();
    for key in keys {
        expiries.cmd("PTTL").arg(key);
    }
    let expiries: Vec<i64> = expiries.query_async(&mut connection).await?;
    Ok(expiries.into_iter().filter(|expiry| *expiry == NEVER).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_summed_without_those_of_the_lab() {
        let info = "# Commandstats\r\ncmdstat_get:calls=3,usec=9\r\ncmdstat_client|setinfo:calls=2,usec=1\r\n\
            cmdstat_info:calls=7,usec=3\r\ncmdstat_evalsha:calls=5,usec=8\r\n";
        assert_eq!(calls(info), 8);
    }

    #[test]
    fn repeated_costs_are_left_out() {
        let all = Counters { sql: Some(35), redis_executed: Some(70), redis_sent: None };
        let left = all.without(5, Counters { sql: Some(1), redis_executed: Some(2), redis_sent: Some(1) });
        assert_eq!((left.sql, left.redis_executed, left.redis_sent), (Some(30), Some(60), None));
    }
}

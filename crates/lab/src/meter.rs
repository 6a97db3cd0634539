//! Counts what a version costs: SQL statements by MariaDB's own counter, commands by that of Redis and by those that were sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisFuture, Value};

use crate::error::Result;
use crate::servers::Servers;
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
            let questions: (String, String) =
                sqlx::query_as("SHOW GLOBAL STATUS LIKE 'Questions'").fetch_one(&servers.mariadb()?.admin).await?;
            counters.sql = questions.1.parse().ok();
        }
        if let Ok(redis) = site.redis() {
            let mut admin = servers.redis()?.admin.clone();
            let info: String = redis::cmd("INFO").arg("commandstats").query_async(&mut admin).await?;
            counters.redis_executed = Some(calls(&info));
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
}

/// The sum of all calls in `INFO commandstats`, without those that connect or read the counters.
fn calls(info: &str) -> u64 {
    const NOT_OF_THE_VERSION: &[&str] = &["info", "hello", "client", "config", "flushall", "script"];
    let calls = |line: &str| -> Option<u64> {
        let (name, stats) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let name = name.split('|').next()?;
        let calls = stats.strip_prefix("calls=")?.split(',').next()?.parse().ok()?;
        (!NOT_OF_THE_VERSION.contains(&name)).then_some(calls)
    };
    info.lines().filter_map(calls).sum()
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
}

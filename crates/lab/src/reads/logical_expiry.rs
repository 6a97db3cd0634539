//! An expiry inside the value.
//!
//! Adds: the key never expires; its value says until when it is fresh. A reader that finds an old one returns it, and one of them starts a
//! rebuild in the background. All shops are cached at the start, so what is not in Redis does not exist.
//! Wrong: readers get old values for a while, and everything has to be cached beforehand.
//! Next: what happens if many values expire at the same time.

use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use redis::AsyncCommands as _;
use sqlx::MySqlPool;
use tokio::task::JoinSet;

use super::{QUERY, Reader, hot_missing_expired, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Error, Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/logical-expiry",
    family: Family::Reads,
    expected: Expected::Sound,
    because: "one task rebuilds while the others return the old value",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("logical_expiry.rs"),
    story_zh: "键不过期，过期时间写在值里；读到过期值先返回旧值，由其中一个请求在后台重建。所有数据提前预热，Redis 里没有就是不存在。\n\
        问题：会短暂读到旧值，而且必须预热。\n\
        下一版：大量数据同时过期会怎样。",
    run: |lab, version| Box::pin(hot_missing_expired::<LogicalExpiry>(lab, version)),
};

const EXPIRY_MS: u128 = 200;
const LEASE_MS: u64 = 3_000;

/// `milliseconds|name`.
fn entry(name: &str) -> String {
    format!("{}|{name}", now_ms() + EXPIRY_MS)
}

fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}

/// The lock ends with its lease if this task is lost.
async fn rebuild(db: MySqlPool, mut redis: CountedRedis, id: u64) -> Result<()> {
    let shop: Option<(String,)> = sqlx::query_as(QUERY).bind(id).fetch_optional(&db).await?;
    if let Some((name,)) = shop {
        let _: () = redis.set(key(id), entry(&name)).await?;
    }
    let _: u64 = redis.del(format!("lock:{id}")).await?;
    Ok(())
}

struct LogicalExpiry {
    db: MySqlPool,
    redis: CountedRedis,
    /// Those that were started since the last [`Reader::settle`]: at most one of a shop in each expiry.
    rebuilds: Mutex<JoinSet<Result<()>>>,
}

impl Reader for LogicalExpiry {
    async fn open(site: &Site) -> Result<Self> {
        let (db, mut redis) = (site.db()?, site.redis()?);
        let shops: Vec<(i64, String)> = sqlx::query_as("SELECT id, name FROM shop").fetch_all(&db).await?;
        for (id, name) in shops {
            let _: () = redis.set(key(id.unsigned_abs()), entry(&name)).await?;
        }
        Ok(Self { db, redis, rebuilds: Mutex::default() })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        let mut redis = self.redis.clone();
        let cached: Option<String> = redis.get(key(id)).await?;
        let Some((fresh_until, name)) = cached.as_deref().and_then(|entry| entry.split_once('|')) else {
            return Ok(None);
        };
        if fresh_until.parse().unwrap_or(0) < now_ms() {
            let mut set = redis::cmd("SET");
            set.arg(format!("lock:{id}")).arg(1).arg("NX").arg("PX").arg(LEASE_MS);
            if set.query_async::<Option<String>>(&mut redis).await?.is_some() {
                self.rebuilds.lock().spawn(rebuild(self.db.clone(), redis, id));
            }
        }
        Ok(Some(name.to_owned()))
    }

    async fn settle(&self) -> Result<()> {
        let mut rebuilds = std::mem::take(&mut *self.rebuilds.lock());
        while let Some(rebuilt) = rebuilds.join_next().await {
            rebuilt.map_err(|error| Error::Failed(error.to_string()))??;
        }
        Ok(())
    }
}

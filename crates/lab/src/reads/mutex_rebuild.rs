//! One reader rebuilds, the others wait.
//!
//! Adds: a reader that finds nothing takes a lock, looks again, and loads. The others wait for a moment and read the cache again. Empty values stay.
//! Wrong: readers wait for as long as the database takes.
//! Next: return the old value meanwhile.

use std::time::Duration;

use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QUERY, Reader, hot_missing_expired, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/mutex-rebuild",
    family: Family::Reads,
    expected: Expected::Sound,
    because: "one reader loads, and the others wait for its value",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("mutex_rebuild.rs"),
    story_zh: "未命中时先抢锁，抢到后再看一眼缓存，仍没有才查数据库；没抢到的稍等再读缓存。空值照样缓存。\n\
        问题：数据库多慢，请求就要等多久。\n\
        下一版：重建期间先返回旧值。",
    run: |lab, version| Box::pin(hot_missing_expired::<MutexRebuild>(lab, version)),
};

const EXPIRY_MS: u64 = 200;
const EMPTY_EXPIRY_MS: u64 = 5_000;
const LEASE_MS: u64 = 3_000;
const WAIT: Duration = Duration::from_millis(10);
const COMPARE_AND_DELETE: &str = r"
    if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
    return 0";

struct MutexRebuild {
    db: MySqlPool,
    redis: CountedRedis,
}

impl Reader for MutexRebuild {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, redis: site.redis()? })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        let (mut redis, lock, owner) = (self.redis.clone(), format!("lock:{id}"), rand::random::<u64>());
        loop {
            if let Some(cached) = self.cached(id).await? {
                return Ok(cached);
            }
            let mut set = redis::cmd("SET");
            set.arg(&lock).arg(owner).arg("NX").arg("PX").arg(LEASE_MS);
            if set.query_async::<Option<String>>(&mut redis).await?.is_some() {
                break;
            }
            tokio::time::sleep(WAIT).await;
        }
        let rebuilt = self.rebuild(id).await;
        // Also after an error: the others must not wait for the lease.
        let _: u64 = Script::new(COMPARE_AND_DELETE).key(&lock).arg(owner).invoke_async(&mut redis).await?;
        rebuilt
    }
}

impl MutexRebuild {
    /// The cached value; an empty one says that there is none.
    async fn cached(&self, id: u64) -> Result<Option<Option<String>>> {
        let cached: Option<String> = self.redis.clone().get(key(id)).await?;
        Ok(cached.map(|name| Some(name).filter(|name| !name.is_empty())))
    }

    /// Another reader may have rebuilt it before this one got the lock.
    async fn rebuild(&self, id: u64) -> Result<Option<String>> {
        if let Some(cached) = self.cached(id).await? {
            return Ok(cached);
        }
        let shop: Option<(String,)> = sqlx::query_as(QUERY).bind(id).fetch_optional(&self.db).await?;
        let (name, expiry_ms) = shop.map_or((String::new(), EMPTY_EXPIRY_MS), |(name,)| (name, EXPIRY_MS));
        let _: () = self.redis.clone().pset_ex(key(id), &name, expiry_ms).await?;
        Ok(Some(name).filter(|name| !name.is_empty()))
    }
}

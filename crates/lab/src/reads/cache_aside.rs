//! Plain cache-aside.
//!
//! Adds: a cache in Redis with an expiry. A reader that finds nothing there asks the database and caches the answer.
//! Wrong: what does not exist is not cached, so each such read reaches the database (penetration). When a hot shop expires, everyone who comes
//! before it is cached again asks the database (breakdown).
//! Next: first what a change must do; then the empty values.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, hot_missing_expired, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/cache-aside",
    family: Family::Reads,
    expected: Expected::Flawed(Flaw::Overload),
    because: "only shops that exist are cached, and all readers load an expired one",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("cache_aside.rs"),
    story_zh: "Redis 缓存加过期时间，未命中就查数据库再写缓存。\n\
        问题：不存在的数据不进缓存，每次都打到数据库（穿透）；热点过期的瞬间，所有请求一起查数据库（击穿）。\n\
        下一版：先解决更新时的一致性，再缓存空值。",
    run: |lab, version| Box::pin(hot_missing_expired::<CacheAside>(lab, version)),
};

const EXPIRY_MS: u64 = 200;

struct CacheAside {
    db: MySqlPool,
    redis: CountedRedis,
}

impl Reader for CacheAside {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, redis: site.redis()? })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        let mut redis = self.redis.clone();
        if let Some(name) = redis.get(key(id)).await? {
            return Ok(Some(name));
        }
        let shop: Option<(String,)> = sqlx::query_as(QUERY).bind(id).fetch_optional(&self.db).await?;
        let Some((name,)) = shop else { return Ok(None) };
        let _: () = redis.pset_ex(key(id), &name, EXPIRY_MS).await?;
        Ok(Some(name))
    }
}

//! Cache that there is nothing.
//!
//! Adds: an empty value for what does not exist, with a short expiry. The second read of a missing shop stays in Redis.
//! Wrong: random ids each cost one query and one key. An expired hot shop is still loaded by everyone at once.
//! Next: a Bloom filter refuses ids that cannot exist before anything is asked.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, hot_missing_expired, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/empty-values",
    family: Family::Reads,
    expected: Expected::Flawed(Flaw::Overload),
    because: "an expired shop is loaded by everyone who finds it missing",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("empty_values.rs"),
    story_zh: "不存在的数据也缓存一个空值，短时间过期，第二次就不再查数据库。\n\
        问题：随机 ID 每个都要查一次库、占一个键；热点过期仍会击穿。\n\
        下一版：布隆过滤器，不可能存在的 ID 直接拒绝。",
    run: |lab, version| Box::pin(hot_missing_expired::<EmptyValues>(lab, version)),
};

const EXPIRY_MS: u64 = 200;
const EMPTY_EXPIRY_MS: u64 = 5_000;

struct EmptyValues {
    db: MySqlPool,
    redis: CountedRedis,
}

impl Reader for EmptyValues {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, redis: site.redis()? })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        let mut redis = self.redis.clone();
        let cached: Option<String> = redis.get(key(id)).await?;
        if let Some(name) = cached {
            return Ok(Some(name).filter(|name| !name.is_empty()));
        }
        let shop: Option<(String,)> = sqlx::query_as(QUERY).bind(id).fetch_optional(&self.db).await?;
        let (name, expiry_ms) = shop.map_or((String::new(), EMPTY_EXPIRY_MS), |(name,)| (name, EXPIRY_MS));
        let _: () = redis.pset_ex(key(id), &name, expiry_ms).await?;
        Ok(Some(name).filter(|name| !name.is_empty()))
    }
}

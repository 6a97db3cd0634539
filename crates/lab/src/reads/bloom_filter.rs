//! A Bloom filter in front.
//!
//! Adds: a filter with all ids in a few bits each. What it does not have does not exist, and neither Redis nor the database is asked.
//! Wrong: a new shop must be added to the filter before it is read. An expired hot shop is still loaded by everyone at once.
//! Next: one reader loads, the others wait.

use fastbloom::BloomFilter;
use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, hot_missing_expired, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/bloom-filter",
    family: Family::Reads,
    expected: Expected::Flawed(Flaw::Overload),
    because: "an expired shop is loaded by everyone who finds it missing",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("bloom_filter.rs"),
    story_zh: "布隆过滤器用很少的内存记住所有 ID，过滤器里没有的一定不存在，Redis 和数据库都不用问。\n\
        问题：新增数据要先进过滤器；热点过期仍会击穿。\n\
        下一版：只让一个请求重建缓存，其他的等待。",
    run: |lab, version| Box::pin(hot_missing_expired::<Filtered>(lab, version)),
};

const EXPIRY_MS: u64 = 200;
const FALSE_POSITIVES: f64 = 0.01;

struct Filtered {
    db: MySqlPool,
    redis: CountedRedis,
    filter: BloomFilter,
}

impl Reader for Filtered {
    async fn open(site: &Site) -> Result<Self> {
        let db = site.db()?;
        let ids: Vec<(i64,)> = sqlx::query_as("SELECT id FROM shop").fetch_all(&db).await?;
        let ids: Vec<u64> = ids.into_iter().map(|(id,)| id.unsigned_abs()).collect();
        let filter = BloomFilter::with_false_pos(FALSE_POSITIVES).items(ids.iter());
        Ok(Self { db, redis: site.redis()?, filter })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        if !self.filter.contains(&id) {
            return Ok(None);
        }
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

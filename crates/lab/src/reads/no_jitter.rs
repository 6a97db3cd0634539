//! The same expiry for everything.
//!
//! Adds: a warm-up. All shops are cached before the crowd comes.
//! Wrong: all of them expire at the same time, and the database gets all of their queries at once (avalanche).
//! Next: a random part in each expiry.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, expiry_of_all, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/no-jitter",
    family: Family::Reads,
    expected: Expected::Flawed(Flaw::Overload),
    because: "all of them have the same expiry",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("no_jitter.rs"),
    story_zh: "活动前预热，把所有店铺一起写进缓存。\n\
        问题：过期时间相同，到点一起失效，查询全部涌向数据库（雪崩）。\n\
        下一版：过期时间加随机数。",
    run: |lab, version| Box::pin(expiry_of_all::<NoJitter>(lab, version)),
};

const EXPIRY_MS: u64 = 2_000;

struct NoJitter {
    db: MySqlPool,
    redis: CountedRedis,
}

impl Reader for NoJitter {
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

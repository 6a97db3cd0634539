//! A random part in each expiry.
//!
//! Adds: the expiry is 2 s give or take a fifth, so that shops that were cached together expire apart.
//! Wrong: every read still goes to Redis over the network.
//! Next: a second level in the process.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, expiry_of_all, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/jitter",
    family: Family::Reads,
    expected: Expected::Sound,
    because: "each has a random part in its expiry",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("jitter.rs"),
    story_zh: "过期时间在 2 秒上下浮动五分之一，同时写入的数据不会同时过期。\n\
        问题：每次读取仍要走网络访问 Redis。\n\
        下一版：进程内再加一级缓存。",
    run: |lab, version| Box::pin(expiry_of_all::<Jitter>(lab, version)),
};

const EXPIRY_MS: u64 = 2_000;
const JITTER_MS: u64 = 400;

struct Jitter {
    db: MySqlPool,
    redis: CountedRedis,
}

impl Reader for Jitter {
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
        let expiry_ms = rand::random_range(EXPIRY_MS - JITTER_MS..=EXPIRY_MS + JITTER_MS);
        let _: () = redis.pset_ex(key(id), &name, expiry_ms).await?;
        Ok(Some(name))
    }
}

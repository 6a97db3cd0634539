//! Ids by a counter in Redis.
//!
//! Adds: ids that are unique over all nodes: 31 bits of seconds since 2022 and 32 bits of a counter in Redis, one per day in UTC, which
//! expires when no node can use it any more.
//! Wrong: every id is a round trip to Redis.
//! Next: a node takes numbers in blocks.

use std::time::{SystemTime, UNIX_EPOCH};

use super::{IdMaker, make_ids};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/redis-counter",
    family: Family::Limits,
    expected: Expected::Sound,
    because: "Redis never returns a number twice",
    needs: &[ServerKind::Redis],
    source: include_str!("redis_counter.rs"),
    story_zh: "高 31 位是自 2022 年起的秒数，低 32 位是 Redis 里按 UTC 日期分键的自增计数（键会过期），所有节点唯一。\n\
        问题：每个 ID 都要往返一次 Redis。\n\
        下一版：一次取一段号。",
    run: |lab, version| Box::pin(make_ids::<RedisCounter>(lab, version)),
};

/// 2022-01-01 in UTC.
const BEGIN_S: u64 = 1_640_995_200;
const DAY_S: u64 = 24 * 60 * 60;
/// How long a counter is kept after its last id: long enough for a node whose clock is late.
const EXPIRY_S: i64 = 2 * 24 * 60 * 60;

struct RedisCounter {
    redis: CountedRedis,
}

impl IdMaker for RedisCounter {
    async fn open(site: &Site, _: u64) -> Result<Self> {
        Ok(Self { redis: site.redis()? })
    }

    async fn next(&self) -> Result<u64> {
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let key = format!("ids:{}", now_s / DAY_S);
        let mut next = redis::pipe();
        next.incr(&key, 1).expire(&key, EXPIRY_S).ignore();
        let (count,): (u64,) = next.query_async(&mut self.redis.clone()).await?;
        Ok((now_s - BEGIN_S) << 32 | count)
    }
}

//! A sliding window in Redis.
//!
//! Adds: a sorted set per user with the times of the last requests, on the clock of Redis. Above the limit, a request goes no further. The
//! key expires with its window.
//! Wrong: every request still costs a call of Redis, and the set holds one entry per request.
//! Next: `stampede-limit` counts in two numbers per user, asks Redis in batches, and lets requests through if Redis is away.

use redis::{AsyncCommands as _, Script};

use super::{LIMIT, one_user_floods};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/sliding-window",
    family: Family::Limits,
    expected: Expected::Sound,
    because: "Redis counts the requests of each user in the last second, by its own clock",
    needs: &[ServerKind::Redis],
    source: include_str!("sliding_window.rs"),
    story_zh: "每个用户一个有序集合，记录最近请求的时间（用 Redis 自己的时钟），超限就不再往后走；键随窗口过期。\n\
        问题：每个请求仍要访问一次 Redis，集合里每个请求占一个元素。\n\
        下一步：stampede-limit 每个用户只存两个数，成批访问 Redis，Redis 不可用时放行。",
    run: |lab, version| Box::pin(one_user_floods::<SlidingWindow>(lab, version)),
};

const CHECK: &str = r"
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - 1000000)
    if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
    redis.call('ZADD', KEYS[1], now, now .. ':' .. ARGV[2])
    redis.call('PEXPIRE', KEYS[1], 1000)
    return 1";

struct SlidingWindow {
    redis: CountedRedis,
}

impl Shop for SlidingWindow {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()? })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let (check, mut redis) = (Script::new(CHECK), self.redis.clone());
        // Two requests in the same microsecond are two members.
        let member = rand::random::<u64>();
        if !check.key(format!("limit:{user}")).arg(LIMIT).arg(member).invoke_async(&mut redis).await? {
            return Ok(Answer::Busy);
        }
        let _: u64 = redis.incr("served", 1).await?;
        Ok(Answer::Bought)
    }
}

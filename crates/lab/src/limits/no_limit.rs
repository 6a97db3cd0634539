//! No limit.
//!
//! Adds: nothing. Every request of every user is served.
//! Wrong: one user with a script takes as much of the servers as everyone else together.
//! Next: a sliding window in Redis counts the requests of each user.

use redis::AsyncCommands as _;

use super::one_user_floods;
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/no-limit",
    family: Family::Limits,
    expected: Expected::Flawed(Flaw::Overload),
    because: "nothing counts the requests of a user",
    needs: &[ServerKind::Redis],
    source: include_str!("no_limit.rs"),
    story_zh: "没有限流，谁的请求都处理。\n\
        问题：一个人写个脚本，就能占掉其他所有人的资源。\n\
        下一版：用 Redis 滑动窗口统计每个用户的请求数。",
    run: |lab, version| Box::pin(one_user_floods::<NoLimit>(lab, version)),
};

struct NoLimit {
    redis: CountedRedis,
}

impl Shop for NoLimit {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()? })
    }

    async fn buy(&self, _: u64) -> Result<Answer> {
        // What a request costs behind the limit.
        let _: u64 = self.redis.clone().incr("served", 1).await?;
        Ok(Answer::Bought)
    }
}

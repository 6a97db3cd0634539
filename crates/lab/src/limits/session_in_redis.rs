//! The session in Redis.
//!
//! Adds: every node finds the session, and each request renews its expiry.
//! Wrong: every request costs a call of Redis, forged tokens too, and a Redis that loses its memory logs everyone out.
//! Next: tokens of Stampede are signed, so that forged ones are refused locally, and sessions are in the ledger as well.

use redis::AsyncCommands as _;

use super::{Sessions, two_nodes};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/session-in-redis",
    family: Family::Limits,
    expected: Expected::Sound,
    because: "all nodes read the session from Redis",
    needs: &[ServerKind::Redis],
    source: include_str!("session_in_redis.rs"),
    story_zh: "会话存入 Redis，所有节点都能读到，每次请求顺便续期。\n\
        问题：每个请求（包括伪造的令牌）都要访问 Redis；Redis 丢数据，所有人都被登出。\n\
        下一步：Stampede 的令牌带签名，伪造的在本地就拒绝，会话同时记在账本里。",
    run: |lab, version| Box::pin(two_nodes::<InRedis>(lab, version)),
};

const EXPIRY_S: u64 = 30 * 60;

struct InRedis {
    redis: CountedRedis,
}

impl Sessions for InRedis {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()? })
    }

    async fn log_in(&self, user: u64) -> Result<String> {
        let token = format!("{:032x}", rand::random::<u128>());
        let _: () = self.redis.clone().set_ex(format!("session:{token}"), user, EXPIRY_S).await?;
        Ok(token)
    }

    async fn user(&self, token: &str) -> Result<Option<u64>> {
        let mut renew = redis::cmd("GETEX");
        renew.arg(format!("session:{token}")).arg("EX").arg(EXPIRY_S);
        Ok(renew.query_async(&mut self.redis.clone()).await?)
    }
}

//! No cache of the sell-out.
//!
//! Adds: nothing. Every request asks Redis, also long after the last item is gone.
//! Wrong: most of the crowd comes after the sell-out, and all of it reaches Redis for the same answer.
//! Next: each node remembers that the sale is sold out.

use redis::{AsyncCommands as _, Script};

use super::{SoldOutShop, sell_out_and_top_up};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "sold-out/none",
    family: Family::SoldOut,
    expected: Expected::Flawed(Flaw::Overload),
    because: "every refused request asks Redis",
    needs: &[ServerKind::Redis],
    source: include_str!("none.rs"),
    story_zh: "没有任何缓存，售罄之后每个请求仍然访问 Redis。\n\
        问题：秒杀的绝大多数请求都在售罄之后到达，全部压在 Redis 上，只为得到同一个回答。\n\
        下一版：每个节点在本地记住已售罄。",
    run: |lab, version| Box::pin(sell_out_and_top_up::<NoCache>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

struct NoCache {
    redis: CountedRedis,
}

impl Shop for NoCache {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        Ok(Self { redis })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let admitted: u8 = admit.key("stock").key("buyers").arg(user).invoke_async(&mut self.redis.clone()).await?;
        match admitted {
            0 => Ok(Answer::Bought),
            1 => Ok(Answer::SoldOut),
            _ => Ok(Answer::AlreadyBought),
        }
    }
}

impl SoldOutShop for NoCache {
    async fn top_up(&self, stock: u64) -> Result<()> {
        let mut redis = self.redis.clone();
        let _: u64 = redis.incr("stock", stock).await?;
        Ok(())
    }
}

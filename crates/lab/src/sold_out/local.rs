//! A local mark per node.
//!
//! Adds: a node that was told "sold out" by Redis remembers it and refuses by itself. Refusals cost nothing.
//! Wrong: the mark is in one process. If stock is added or an order is cancelled at another node, this one goes on refusing.
//! Next: nodes tell each other, and a mark expires.

use std::sync::atomic::{AtomicBool, Ordering};

use redis::{AsyncCommands as _, Script};

use super::{SoldOutShop, sell_out_and_top_up};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "sold-out/local",
    family: Family::SoldOut,
    expected: Expected::Flawed(Flaw::Undersold),
    because: "nobody tells the other node that there is stock again",
    needs: &[ServerKind::Redis],
    source: include_str!("local.rs"),
    story_zh: "节点从 Redis 得知售罄后在本地做标记，之后直接拒绝，不再访问 Redis。\n\
        问题：标记只在自己进程里。别的节点补了库存或退了单，这个节点还在拒绝，少卖。\n\
        下一版：节点之间广播，并给标记设过期时间。",
    run: |lab, version| Box::pin(sell_out_and_top_up::<Local>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

struct Local {
    redis: CountedRedis,
    sold_out: AtomicBool,
}

impl Shop for Local {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        Ok(Self { redis, sold_out: AtomicBool::new(false) })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        if self.sold_out.load(Ordering::Relaxed) {
            return Ok(Answer::SoldOut);
        }
        let admit = Script::new(ADMIT);
        let admitted: u8 = admit.key("stock").key("buyers").arg(user).invoke_async(&mut self.redis.clone()).await?;
        match admitted {
            0 => Ok(Answer::Bought),
            1 => {
                self.sold_out.store(true, Ordering::Relaxed);
                Ok(Answer::SoldOut)
            }
            _ => Ok(Answer::AlreadyBought),
        }
    }
}

impl SoldOutShop for Local {
    async fn top_up(&self, stock: u64) -> Result<()> {
        let mut redis = self.redis.clone();
        let _: u64 = redis.incr("stock", stock).await?;
        self.sold_out.store(false, Ordering::Relaxed);
        Ok(())
    }
}

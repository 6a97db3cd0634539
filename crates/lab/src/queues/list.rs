//! A Redis list as the queue.
//!
//! Adds: the script pushes the order to a list in the same step in which it deducts. The list survives the process.
//! Wrong: `BRPOP` removes the order before it is written. A node that dies in between takes it along.
//! Next: the order moves to a second list, and leaves that one only after the commit.

use std::sync::Arc;

use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, crash_and_load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::{Site, connect};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/list",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Lost),
    because: "an order that was taken from the list is nowhere until it is committed",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("list.rs"),
    story_zh: "脚本在扣减的同一步把订单推进 Redis List，进程死了队列还在。\n\
        问题：BRPOP 取出时订单就从列表里消失了，取出后、写库前宕机，这一单就丢了。\n\
        下一版：取出时移到“处理中”列表，提交之后才删除。",
    run: |lab, version| Box::pin(crash_and_load::<List>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    redis.call('LPUSH', KEYS[3], ARGV[1])
    return 0";

struct List {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Shop for List {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").key("queue").arg(user).invoke_async(&mut redis).await?;
        Ok(answer(admitted))
    }
}

impl QueuedShop for List {
    async fn work(self: Arc<Self>) -> Result<()> {
        let mut blocking = self.redis.counting(connect(&self.site.redis_client()?).await?);
        loop {
            let taken: Option<(String, u64)> = blocking.brpop("queue", 1.0).await?;
            let Some((_, user)) = taken else { continue };
            self.site.kill.pass().await;
            sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
        }
    }

    async fn queued(&self) -> Result<u64> {
        Ok(self.redis.clone().llen("queue").await?)
    }
}

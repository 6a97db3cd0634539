//! A Redis list with a list of orders in progress.
//!
//! Adds: `BLMOVE` moves the order to a second list, and it leaves that list only after the commit. A node that starts puts back what a dead
//! one has left there. The order id is the primary key, so that an order that is written twice stays one.
//! Wrong: one reader. A second node that starts would take the orders in progress away from the first.
//! Next: pub/sub reaches several readers; the stream with a group does that without losing anything.

use std::sync::Arc;

use redis::Direction;
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, crash_and_load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::{Site, connect};
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/processing-list",
    family: Family::Queues,
    expected: Expected::Sound,
    because: "an order stays in one of the lists until it is committed, and writing it twice has no effect",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("processing_list.rs"),
    story_zh: "用 BLMOVE 把订单移到“处理中”列表，提交后才删除；节点启动时先把上一个节点遗留的订单放回队列。\
        订单号是主键，重复写入也只有一单。\n\
        问题：只适合单个消费者，第二个节点启动会把别人处理中的订单拿走。\n\
        下一版：发布订阅可以有多个消费者；既多消费者又不丢的是带消费组的 Stream。",
    run: |lab, version| Box::pin(crash_and_load::<ProcessingList>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    redis.call('LPUSH', KEYS[3], ARGV[1])
    return 0";

struct ProcessingList {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Shop for ProcessingList {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        while redis
            .lmove::<_, _, Option<u64>>("processing", "queue", Direction::Left, Direction::Right)
            .await?
            .is_some()
        {}
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").key("queue").arg(user).invoke_async(&mut redis).await?;
        Ok(answer(admitted))
    }
}

impl QueuedShop for ProcessingList {
    async fn work(self: Arc<Self>) -> Result<()> {
        let mut blocking = self.redis.counting(connect(&self.site.redis_client()?).await?);
        loop {
            let (from, to) = (Direction::Right, Direction::Left);
            let taken: Option<u64> = blocking.blmove("queue", "processing", from, to, 1.0).await?;
            let Some(user) = taken else { continue };
            self.site.kill.pass().await;
            let insert = "INSERT INTO orders (id, user_id) VALUES (?, ?) ON DUPLICATE KEY UPDATE id = id";
            sqlx::query(insert).bind(user).bind(user).execute(&self.db).await?;
            self.site.kill_after_commit.pass().await;
            let _: u64 = blocking.lrem("processing", 1, user).await?;
        }
    }

    async fn queued(&self) -> Result<u64> {
        let (waiting, processing): (u64, u64) =
            redis::pipe().llen("queue").llen("processing").query_async(&mut self.redis.clone()).await?;
        Ok(waiting + processing)
    }
}

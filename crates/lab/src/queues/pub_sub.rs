//! Redis pub/sub as the queue.
//!
//! Adds: several readers. Every node that subscribes gets every message.
//! Wrong: Redis keeps no message. What is published while no node listens, or lies in the buffer of one that dies, is gone.
//! Next: a stream keeps its messages.

use std::sync::Arc;

use futures_util::StreamExt as _;
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, crash_and_load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/pub-sub",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Lost),
    because: "a message is sent once to those who listen, and kept nowhere",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("pub_sub.rs"),
    story_zh: "用发布订阅传递订单，支持多个消费者。\n\
        问题：Redis 不保存消息，没人订阅时发布的、或者滞留在已宕机节点缓冲区里的订单全部丢失。\n\
        下一版：Stream 会保存消息。",
    run: |lab, version| Box::pin(crash_and_load::<PubSub>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    redis.call('PUBLISH', KEYS[3], ARGV[1])
    return 0";

struct PubSub {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Shop for PubSub {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").key("orders").arg(user).invoke_async(&mut redis).await?;
        Ok(answer(admitted))
    }
}

impl QueuedShop for PubSub {
    async fn work(self: Arc<Self>) -> Result<()> {
        let mut subscription = self.site.redis_client()?.get_async_pubsub().await?;
        subscription.subscribe("orders").await?;
        let mut messages = subscription.on_message();
        while let Some(message) = messages.next().await {
            let user: u64 = message.get_payload()?;
            self.site.kill.pass().await;
            sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
        }
        Ok(())
    }

    async fn is_listening(&self) -> Result<bool> {
        let mut redis = self.redis.clone();
        let (_, listeners): (String, u64) =
            redis::cmd("PUBSUB").arg("NUMSUB").arg("orders").query_async(&mut redis).await?;
        Ok(listeners > 0)
    }

    async fn queued(&self) -> Result<u64> {
        Ok(0)
    }
}

//! A Redis stream with a consumer group.
//!
//! Adds: the group keeps what was delivered and not acknowledged. A node acknowledges after the commit, and begins with what is pending.
//! The order id is the primary key, so that an order that is written twice stays one.
//! Wrong: the queue is as durable as Redis. With an append-only file that is synced once a second, a power cut loses a second.
//! Next: RabbitMQ writes messages to disk before it confirms them, if it is asked to.

use std::sync::Arc;

use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, crash_and_load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::{Site, connect};
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/stream-group",
    family: Family::Queues,
    expected: Expected::Sound,
    because: "an order stays pending until it is committed and acknowledged, and writing it twice has no effect",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("stream_group.rs"),
    story_zh: "消费组记录已投递未确认的消息：提交之后才 XACK，节点启动先处理待确认列表。订单号是主键，重复写入也只有一单。\n\
        问题：可靠性取决于 Redis 的持久化，每秒刷盘时断电会丢一秒的数据。\n\
        下一版：RabbitMQ 可以先落盘再确认。",
    run: |lab, version| Box::pin(crash_and_load::<StreamGroup>(lab, version)),
};

/// An id, and one field with its value.
type Entry = (String, (String, u64));

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    redis.call('XADD', KEYS[3], '*', 'user', ARGV[1])
    return 0";

struct StreamGroup {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Shop for StreamGroup {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let mut create = redis::cmd("XGROUP");
        create.arg(&["CREATE", "orders", "writers", "0", "MKSTREAM"]);
        match create.exec_async(&mut redis).await {
            Err(error) if error.code() != Some("BUSYGROUP") => return Err(error.into()),
            _ => {}
        }
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").key("orders").arg(user).invoke_async(&mut redis).await?;
        Ok(answer(admitted))
    }
}

impl QueuedShop for StreamGroup {
    async fn work(self: Arc<Self>) -> Result<()> {
        let mut blocking = self.redis.counting(connect(&self.site.redis_client()?).await?);
        // First what was delivered to this consumer before, then what is new.
        let mut from = "0";
        loop {
            let mut read = redis::cmd("XREADGROUP");
            read.arg(&["GROUP", "writers", "node", "COUNT", "16", "BLOCK", "1000", "STREAMS", "orders", from]);
            let read: Option<Vec<(String, Vec<Entry>)>> = read.query_async(&mut blocking).await?;
            let entries: Vec<_> = read.into_iter().flatten().flat_map(|(_, entries)| entries).collect();
            if entries.is_empty() {
                from = ">";
            }
            for (id, (_, user)) in entries {
                self.site.kill.pass().await;
                let insert = "INSERT INTO orders (id, user_id) VALUES (?, ?) ON DUPLICATE KEY UPDATE id = id";
                sqlx::query(insert).bind(user).bind(user).execute(&self.db).await?;
                self.site.kill_after_commit.pass().await;
                let mut done = redis::pipe();
                done.cmd("XACK").arg(&["orders", "writers", &id]).cmd("XDEL").arg(&["orders", &id]);
                done.exec_async(&mut blocking).await?;
            }
        }
    }

    async fn queued(&self) -> Result<u64> {
        // Acknowledged entries are deleted.
        Ok(redis::cmd("XLEN").arg("orders").query_async(&mut self.redis.clone()).await?)
    }
}

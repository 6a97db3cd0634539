//! RabbitMQ, acknowledged on delivery.
//!
//! Adds: a durable queue, persistent messages and publisher confirms. The buyer is answered after the broker has the message on disk.
//! Wrong: the consumer acknowledges on delivery. Orders that it has received and not yet written are lost if it dies.
//! Next: the consumer acknowledges by hand, and an idempotency key in Redis keeps repeated messages apart.

use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection};
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, crash_and_load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/rabbitmq-early-ack",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Lost),
    because: "an order counts as done before it is committed",
    needs: &[ServerKind::MariaDb, ServerKind::Redis, ServerKind::RabbitMq],
    source: include_str!("rabbitmq_early_ack.rs"),
    story_zh: "队列持久化、消息持久化，并等待发送方确认，落盘之后才应答用户。\n\
        问题：消费者一收到就确认（自动 ack），收到但还没写库的订单会随进程一起丢失。\n\
        下一版：手动确认，并用 Redis 里的幂等键防止重复消费。",
    run: |lab, version| Box::pin(crash_and_load::<EarlyAck>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

struct EarlyAck {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
    channel: Channel,
    _connection: Connection,
}

impl EarlyAck {
    async fn publish(&self, user: u64) -> Result<()> {
        let (queue, message) = (self.site.queue.as_str(), user.to_string());
        let options = BasicPublishOptions::default();
        let confirm = self
            .channel
            .basic_publish(
                "".into(),
                queue.into(),
                options,
                message.as_bytes(),
                BasicProperties::default().with_delivery_mode(2),
            )
            .await?;
        confirm.await?;
        Ok(())
    }
}

impl Shop for EarlyAck {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let connection = site.rabbitmq().await?;
        let channel = connection.create_channel().await?;
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(site.queue.as_str().into(), durable, FieldTable::default()).await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { db: site.db()?, redis, site: site.clone(), channel, _connection: connection })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").arg(user).invoke_async(&mut redis).await?;
        if admitted == 0 {
            self.publish(user).await?;
        }
        Ok(answer(admitted))
    }
}

impl QueuedShop for EarlyAck {
    async fn work(self: Arc<Self>) -> Result<()> {
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let queue = self.site.queue.as_str();
        let mut orders = self.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
        while let Some(order) = orders.next().await {
            let order = order?;
            let user: u64 = String::from_utf8_lossy(&order.data).parse().unwrap_or_default();
            self.site.kill.pass().await;
            sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
        }
        Ok(())
    }

    async fn queued(&self) -> Result<u64> {
        let passive = QueueDeclareOptions { passive: true, durable: true, ..Default::default() };
        let queue = self.channel.queue_declare(self.site.queue.as_str().into(), passive, FieldTable::default()).await?;
        Ok(queue.message_count().into())
    }
}

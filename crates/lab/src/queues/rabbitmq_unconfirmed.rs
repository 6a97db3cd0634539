//! RabbitMQ without confirms or persistence.
//!
//! Adds: a message broker, which has queues, acknowledgements and several consumers, and takes the load off Redis.
//! Wrong: the queue and its messages are in the memory of the broker, and the publisher does not wait for a confirmation. If the broker dies,
//! the orders are gone.
//! Next: a durable queue, persistent messages, and publisher confirms.

use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection};
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, broker_crash, load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/rabbitmq-unconfirmed",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Lost),
    because: "messages in memory die with the broker, and nothing had confirmed them",
    needs: &[ServerKind::MariaDb, ServerKind::Redis, ServerKind::RabbitMq],
    source: include_str!("rabbitmq_unconfirmed.rs"),
    story_zh: "引入 RabbitMQ：有队列、有确认、支持多消费者，还为 Redis 减压。\n\
        问题：队列和消息都只在 Broker 内存里，发送方也不等确认，Broker 一死订单就没了。\n\
        下一版：队列持久化、消息持久化、发送方确认。",
    run: |lab, version| Box::pin(run(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    broker_crash::<Unconfirmed>(lab, version, &mut measured).await?;
    load::<Unconfirmed>(lab, version, &mut measured).await?;
    Ok(measured)
}

struct Unconfirmed {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
    channel: Channel,
    _connection: Connection,
}

impl Unconfirmed {
    async fn publish(&self, user: u64) -> Result<()> {
        let (queue, message) = (self.site.queue.as_str(), user.to_string());
        let options = BasicPublishOptions::default();
        self.channel
            .basic_publish("".into(), queue.into(), options, message.as_bytes(), BasicProperties::default())
            .await?;
        Ok(())
    }
}

impl Shop for Unconfirmed {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let connection = site.rabbitmq().await?;
        let channel = connection.create_channel().await?;
        let durable = QueueDeclareOptions { durable: false, ..Default::default() };
        channel.queue_declare(site.queue.as_str().into(), durable, FieldTable::default()).await?;
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

impl QueuedShop for Unconfirmed {
    async fn work(self: Arc<Self>) -> Result<()> {
        let options = BasicConsumeOptions { no_ack: false, ..Default::default() };
        let queue = self.site.queue.as_str();
        let mut orders = self.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
        while let Some(order) = orders.next().await {
            let order = order?;
            let user: u64 = String::from_utf8_lossy(&order.data).parse().unwrap_or_default();
            self.site.kill.pass().await;
            sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
            order.ack(BasicAckOptions::default()).await?;
        }
        Ok(())
    }

    async fn queued(&self) -> Result<u64> {
        let passive = QueueDeclareOptions { passive: true, durable: false, ..Default::default() };
        let queue = self.channel.queue_declare(self.site.queue.as_str().into(), passive, FieldTable::default()).await?;
        Ok(queue.message_count().into())
    }
}

//! RabbitMQ with an idempotency key that is deleted before the retry.
//!
//! Adds: the acknowledgement follows the insertion. A key in Redis marks an order as handled, so that a repeated message has no effect. If the
//! insertion fails, the key is deleted and the message is sent again.
//! Wrong: an insertion that timed out may have been done. Without the key, the retry inserts the order a second time. A node that dies between
//! the key and the insertion loses the order, because the next node finds the key. And the key of every order stays in Redis for good.
//! Next: the order id is the primary key. The database knows what it has, and a retry needs no key.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection};
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;
use tokio::time::timeout;

use super::{Crash, QueuedShop, answer, crash, drain, load, order_of_crash, start};
use crate::driver::{Answer, Crowd, Shop, judge, send};
use crate::meter::CountedRedis;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/rabbitmq-key-deleted",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "an insertion that timed out and was done anyway is repeated without its key",
    needs: &[ServerKind::MariaDb, ServerKind::Redis, ServerKind::RabbitMq],
    source: include_str!("rabbitmq_key_deleted.rs"),
    story_zh: "写库之后才手动确认；用 Redis 幂等键标记已处理的订单，重复消息不再生效；写库失败就删除幂等键并重发消息。\n\
        问题：超时不等于失败，那次写入可能已经成功。幂等键一删，重试就写出第二单；\
        节点若死在设键之后、写库之前，下一个节点看到幂等键就直接确认，这一单就丢了；而没删的幂等键永远留在 Redis 里。\n\
        下一版：订单号做主键，由数据库判断有没有写过，重试不再依赖幂等键。",
    run: |lab, version| Box::pin(run(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

/// How long the worker waits for the database.
const INSERT_TIMEOUT: Duration = Duration::from_millis(300);
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the late insertion and the repeated one may take.
const QUIET: Duration = Duration::from_secs(10);

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    slow_insertion(lab, version, &mut measured).await?;
    crash::<KeyDeleted>(lab, version, Crash::BeforeCommit, order_of_crash(lab), &mut measured).await?;
    load::<KeyDeleted>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// The database is slow once: the worker gives up waiting, and the insertion is done nevertheless.
async fn slow_insertion(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let crowd = Crowd { buyers: 1, tries: 1, stock: 1 };
    let mut site = lab.site(version, crowd.stock, RacePoint::open()).await?;
    site.before_retry = RacePoint::within(2, LOCK_TIMEOUT);
    let mut other = site.db()?.acquire().await?.detach();
    sqlx::query("LOCK TABLES orders WRITE").execute(&mut other).await?;
    let mut node = start::<KeyDeleted>(&site).await?;
    let answers = send(&node.shop, crowd, lab.seed).await?;
    site.before_retry.arrived(1).await;
    sqlx::query("UNLOCK TABLES").execute(&mut other).await?;
    drain(&mut node, &site, 1, QUIET).await?;
    site.before_retry.pass().await;
    // One order too many, if it comes.
    drain(&mut node, &site, 2, QUIET).await?;
    judge(&site, crowd, &answers, measured).await?;
    node.kill().await;
    site.close().await;
    Ok(())
}

struct KeyDeleted {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
    channel: Channel,
    _connection: Connection,
}

impl KeyDeleted {
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

    /// Inserts the order unless its key says that it was handled.
    async fn handle(&self, user: u64) -> Result<bool> {
        let (mut redis, key) = (self.redis.clone(), format!("handled:{user}"));
        if !redis.set_nx(&key, 1).await? {
            return Ok(true);
        }
        self.site.kill.pass().await;
        let insert = sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db);
        if timeout(INSERT_TIMEOUT, insert).await.is_ok_and(|inserted| inserted.is_ok()) {
            return Ok(true);
        }
        let _: u64 = redis.del(&key).await?;
        self.site.before_retry.pass().await;
        Ok(false)
    }
}

impl Shop for KeyDeleted {
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

impl QueuedShop for KeyDeleted {
    async fn work(self: Arc<Self>) -> Result<()> {
        let options = BasicConsumeOptions { no_ack: false, ..Default::default() };
        let queue = self.site.queue.as_str();
        let mut orders = self.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
        while let Some(order) = orders.next().await {
            let order = order?;
            let user: u64 = String::from_utf8_lossy(&order.data).parse().unwrap_or_default();
            if !self.handle(user).await? {
                self.publish(user).await?;
            }
            order.ack(BasicAckOptions::default()).await?;
        }
        Ok(())
    }

    async fn queued(&self) -> Result<u64> {
        let passive = QueueDeclareOptions { passive: true, durable: true, ..Default::default() };
        let queue = self.channel.queue_declare(self.site.queue.as_str().into(), passive, FieldTable::default()).await?;
        Ok(queue.message_count().into())
    }
}

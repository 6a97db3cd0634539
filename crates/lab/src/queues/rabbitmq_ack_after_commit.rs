//! RabbitMQ, acknowledged after the commit, with an outbox.
//!
//! Adds: the script notes the order in an outbox in the same step in which it deducts, and the entry goes once the broker has confirmed the
//! message; a node that starts sends what is left. The consumer acknowledges after the commit. The order id is the primary key.
//! Wrong: nothing is lost or doubled, but after the sell-out every request still costs a call of Redis.
//! Next: the family sold-out refuses them in the process. The tier queued of Stampede is built like this, in batches.

use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection};
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{QueuedShop, answer, broker_crash, crash_and_load, drain, quiet, start};
use crate::driver::{Answer, Crowd, Shop, judge, send};
use crate::kill::KillPoint;
use crate::meter::CountedRedis;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Error, Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/rabbitmq-ack-after-commit",
    family: Family::Queues,
    expected: Expected::Sound,
    because: "an order is in the outbox, in the queue or in the database at any time, and writing it twice has no effect",
    needs: &[ServerKind::MariaDb, ServerKind::Redis, ServerKind::RabbitMq],
    source: include_str!("rabbitmq_ack_after_commit.rs"),
    story_zh: "脚本在扣减的同一步写入发件箱（outbox），Broker 确认后才删除，节点启动时补发剩下的；消费者提交之后才确认；订单号是主键。\n\
        问题：不丢也不重，但售罄之后每个请求仍要访问一次 Redis。\n\
        下一步：“售罄缓存”在进程内直接拒绝。Stampede 的 queued 就是这样做的，并且成批处理。",
    run: |lab, version| Box::pin(run(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    redis.call('SADD', KEYS[3], ARGV[1])
    return 0";

const PREFETCH: u16 = 64;

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = crash_and_load::<AckAfterCommit>(lab, version).await?;
    crash_before_publish(lab, version, &mut measured).await?;
    broker_crash::<AckAfterCommit>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// A node dies after the script has admitted a buyer and before the broker has the order. The node that starts next publishes it.
async fn crash_before_publish(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    const USER: u64 = 1;
    let crowd = Crowd { buyers: 1, tries: 1, stock: 1 };
    let mut site = lab.site(version, crowd.stock, RacePoint::open()).await?;
    site.kill_before_publish = KillPoint::at(1);
    let dying = AckAfterCommit::open(&site).await?;
    let buying = tokio::spawn(async move { dying.buy(USER).await });
    site.kill_before_publish.reached().await?;
    buying.abort();
    // The result is that it was cancelled.
    let _ = buying.await;
    measured.killed();

    site.kill_before_publish = KillPoint::never();
    let mut node = start::<AckAfterCommit>(&site).await?;
    // The buyer, who got no answer, tries again.
    let mut answers = send(&node.shop, crowd, lab.seed).await?;
    if !answers.given.contains_key(&Answer::AlreadyBought) {
        return Err(Error::Failed("the node died before the script had admitted the buyer".to_owned()));
    }
    // This answer confirms the order too.
    answers.bought.insert(USER);
    drain(&mut node, &site, 1, quiet(version)).await?;
    judge(&site, crowd, &answers, measured).await?;
    let unsent: u64 = site.redis()?.scard("outbox").await?;
    measured.count(Flaw::Leaked, unsent, |count| format!("confirmed messages that are still in the outbox: {count}"));
    node.kill().await;
    site.close().await;
    Ok(())
}

struct AckAfterCommit {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
    channel: Channel,
    _connection: Connection,
}

impl AckAfterCommit {
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
        if confirm.await?.is_ack() {
            let _: u64 = self.redis.clone().srem("outbox", user).await?;
        }
        Ok(())
    }
}

impl Shop for AckAfterCommit {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let connection = site.rabbitmq().await?;
        let channel = connection.create_channel().await?;
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(site.queue.as_str().into(), durable, FieldTable::default()).await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let shop = Self { db: site.db()?, redis, site: site.clone(), channel, _connection: connection };
        let unsent: Vec<u64> = shop.redis.clone().smembers("outbox").await?;
        for user in unsent {
            shop.publish(user).await?;
        }
        Ok(shop)
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").key("outbox").arg(user).invoke_async(&mut redis).await?;
        if admitted == 0 {
            self.site.kill_before_publish.pass().await;
            self.publish(user).await?;
        }
        Ok(answer(admitted))
    }
}

impl QueuedShop for AckAfterCommit {
    async fn work(self: Arc<Self>) -> Result<()> {
        let options = BasicConsumeOptions { no_ack: false, ..Default::default() };
        let queue = self.site.queue.as_str();
        self.channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
        let mut orders = self.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
        while let Some(order) = orders.next().await {
            let order = order?;
            let user: u64 = String::from_utf8_lossy(&order.data).parse().unwrap_or_default();
            self.site.kill.pass().await;
            let insert = "INSERT INTO orders (id, user_id) VALUES (?, ?) ON DUPLICATE KEY UPDATE id = id";
            sqlx::query(insert).bind(user).bind(user).execute(&self.db).await?;
            self.site.kill_after_commit.pass().await;
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

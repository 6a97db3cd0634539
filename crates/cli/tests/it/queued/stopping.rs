//! A consumer is stopped in the middle of a batch.

use sqlx::Connection as _;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::outbox;
use super::rabbitmq::{BROKER, rows};
use super::runs::Queue;
use super::stuck::{accept, lock_sale};
use crate::shared::{Nodes, entries};
use crate::shop::{Kind, Shop};

/// The orders that a consumer has begun to record.
async fn begun(consumer: &Shop) -> usize {
    counter(consumer, "stampede_queue_consumed_orders_total").await
}

#[expect(clippy::cast_sign_loss, reason = "a counter is not negative")]
async fn counter(shop: &Shop, name: &str) -> usize {
    shop.metric(name).await as usize
}

/// How many connections of all processes listen for messages.
fn subscribers(nodes: &Nodes) -> usize {
    redis::ask(nodes.redis.port(), &["client", "list", "type", "pubsub"]).unwrap().lines().count()
}

/// SIGTERM while a batch is being recorded: the consumer finishes and settles this batch, and ends with 0. The next consumer gets the
/// orders that were not begun, and no other.
async fn consumer_finishes_its_batch(queue: Queue<'_>, kind: Kind) {
    let nodes = queue.start(kind, 1);
    let buyers = nodes.shops[0].log_in(0, 6).await;
    let sale = nodes.create_sale(6).await;
    let history = Recorder::default();
    // The orders of the demonstration data are recorded first.
    let demonstration = counter(&nodes.shops[0], "stampede_outbox_orders_total").await;
    let consumers = queue.consumers(&nodes, 1);
    until("the queue is empty", async || begun(&consumers.shops[0]).await == demonstration).await;
    consumers.stop();

    let lock = lock_sale(&nodes, sale).await;
    accept(&nodes, &history, sale, &buyers[..3]).await;
    let mut stopped = queue.consumers(&nodes, 1);
    let consumer = &mut stopped.shops[0];
    until("a batch is being recorded", async || begun(consumer).await > 0).await;
    accept(&nodes, &history, sale, &buyers[3..]).await;
    let of_batch = begun(consumer).await;
    assert!((1..=3).contains(&of_batch), "one batch of a sale at a time: {of_batch}");
    let before = subscribers(&nodes);
    consumer.process.signal("TERM").unwrap();
    // The consumer reads nothing more after this, so that what it records from here on is its batch.
    until("the consumer is stopping", async || subscribers(&nodes) < before).await;
    assert_eq!(consumer.process.try_wait().unwrap(), None, "it waits for its batch");
    assert_eq!(rows(&nodes, sale).await, 0);
    lock.close().await.unwrap();
    let status = consumer.process.wait(std::time::Duration::from_secs(30)).unwrap();
    assert_eq!(status.code(), Some(0));

    assert_eq!(rows(&nodes, sale).await, of_batch, "the batch is recorded, and nothing else");
    if matches!(queue, Queue::Stream) {
        assert_eq!(entries(&nodes.redis, &outbox(sale)), 6 - of_batch as u64, "the batch is settled");
        let key = redis::ask(nodes.redis.port(), &["keys", &outbox(sale)]).unwrap();
        let pending = redis::ask(nodes.redis.port(), &["xpending", key.trim(), "ledger"]).unwrap();
        assert_eq!(pending.lines().next(), Some("0"), "nothing has to be claimed: {pending}");
    }
    let next = queue.consumers(&nodes, 1);
    until("the rest is recorded", async || rows(&nodes, sale).await == 6).await;
    until("the queue is empty", async || queue.is_idle(&nodes, sale, 6).await).await;
    assert_eq!(begun(&next.shops[0]).await, 6 - of_batch, "nothing of the batch is delivered again");
    assert_eq!(nodes.verify(&history, sale).await, 6);
    next.stop();
}

async fn consumer_of_a_stream_finishes_its_batch(kind: Kind) {
    consumer_finishes_its_batch(Queue::Stream, kind).await;
}

async fn consumer_of_a_broker_finishes_its_batch(kind: Kind) {
    consumer_finishes_its_batch(Queue::RabbitMq(&BROKER), kind).await;
}

on_each_database!(
    @module on_mariadb, MariaDb,
    consumer_of_a_stream_finishes_its_batch,
    consumer_of_a_broker_finishes_its_batch
);

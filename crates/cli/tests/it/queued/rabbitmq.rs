//! The tier `queued` with RabbitMQ: the node that admits orders publishes them, and consumers get them from the broker.
//!
//! Tests share one broker, on which each has queues of its own, unless the broker is what fails.

use std::process::Command;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use stampede_core::{OrderId, SaleId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_queue::Payload;
use stampede_queue::message::decode;
use stampede_testkit::{Server, count, rabbitmq, redis, until};

use super::runs::{self, Queue};
use super::stories::dead_letters_command;
use super::stuck::accept;
use super::{Consumers, outbox};
use crate::quarantine::{accept_orders_again, execute, quarantine, reject_orders_of};
use crate::shared::{Nodes, demo_starts_and_stops_everything, entries, refused, storm};
use crate::shop::{Kind, Shop, Storage, TOKEN};

/// Ends with the process.
pub static BROKER: LazyLock<Server> = LazyLock::new(|| rabbitmq::start().unwrap());

pub(super) const PARTITIONS: u16 = 3;
/// The pause between two attempts of a buyer.
const PACE: Duration = Duration::from_millis(50);

/// A node that serves buyers and records orders.
pub fn with_broker(port: u16) -> impl Fn(Command) -> Command {
    move |mut command| {
        command.env("STAMPEDE__TIER", "queued").env("STAMPEDE__QUEUE__KIND", "rabbitmq");
        command.env("STAMPEDE__RABBITMQ__URL", rabbitmq::url(port));
        command.env("STAMPEDE__RABBITMQ__PARTITIONS", PARTITIONS.to_string());
        command
    }
}

/// A node that serves buyers and records nothing.
pub(super) fn without_consumer(port: u16) -> impl Fn(usize, Command) -> Command {
    move |_, command| {
        let mut command = with_broker(port)(command);
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command
    }
}

/// Nodes without consumers. Their Redis writes nothing to disk: what was accepted is in the broker.
pub(super) fn start(kind: Kind, nodes: usize, broker: &Server) -> Nodes {
    Nodes::start_on(kind, redis::start().unwrap(), nodes, without_consumer(broker.port()))
}

pub(super) fn consumers(nodes: &Nodes, count: usize, broker: &Server) -> Consumers {
    Consumers::start_with(nodes, count, with_broker(broker.port()))
}

/// A channel that bypasses the system, and the name of its exchange.
pub(super) async fn channel(nodes: &Nodes, broker: &Server) -> (Connection, Channel, String) {
    let url = rabbitmq::url(broker.port());
    let connection = Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let keys = redis::ask(nodes.redis.port(), &["keys", "stampede:*:rebuild"]).unwrap();
    let ledger = keys.trim().strip_prefix("stampede:").unwrap().strip_suffix(":rebuild").unwrap().to_owned();
    (connection, channel, format!("stampede.{ledger}"))
}

/// Publishes to the partition, or to the dead-letter queue, with this routing key.
pub(super) async fn publish(channel: &Channel, exchange: &str, key: &str, bytes: &[u8]) {
    let properties = BasicProperties::default().with_delivery_mode(2);
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let sending = channel.basic_publish(exchange.into(), key.into(), options, bytes, properties);
    assert!(sending.await.unwrap().await.unwrap().is_ack());
}

/// Takes all messages out of the queue.
pub(super) async fn take_all(channel: &Channel, exchange: &str) -> Vec<(u16, Vec<u8>)> {
    let mut taken = Vec::new();
    for partition in 0..PARTITIONS {
        let queue = format!("{exchange}.orders.{partition}");
        while let Some(message) = channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await.unwrap() {
            channel.basic_ack(message.delivery.delivery_tag, BasicAckOptions::default()).await.unwrap();
            taken.push((partition, message.delivery.data));
        }
    }
    taken
}

/// The number of orders in a message.
fn orders_in(bytes: &[u8]) -> usize {
    match decode(bytes.to_vec()) {
        Payload::Batch(batch) => batch.orders.len(),
        Payload::Marker(_) | Payload::Undecodable { .. } => 0,
    }
}

/// The number of rows of a sale.
pub(super) async fn rows(nodes: &Nodes, sale: SaleId) -> usize {
    let path = format!("/admin/v1/sales/{sale}/orders?limit=10000");
    let page = nodes.shops[0].client().await.get(&path, TOKEN).await.unwrap().json();
    page["orders"].as_array().unwrap().len()
}

async fn three_nodes_and_two_consumers_sell_exactly_the_stock(kind: Kind) {
    runs::three_nodes_and_two_consumers_sell_exactly_the_stock(Queue::RabbitMq(&BROKER), kind).await;
}

async fn one_user_gets_one_order(kind: Kind) {
    runs::one_user_gets_one_order(Queue::RabbitMq(&BROKER), kind).await;
}

async fn an_accepted_order_is_visible_on_every_node(kind: Kind) {
    runs::an_accepted_order_is_visible_on_every_node(Queue::RabbitMq(&BROKER), kind).await;
}

async fn buyers_can_wait_for_the_ledger(kind: Kind) {
    runs::buyers_can_wait_for_the_ledger(Queue::RabbitMq(&BROKER), kind).await;
}

async fn watchers_share_their_queries(kind: Kind) {
    runs::watchers_share_their_queries(Queue::RabbitMq(&BROKER), kind).await;
}

async fn survives_a_node_that_dies_after_the_admission(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::RabbitMq(&BROKER), kind, "buy.admitted").await;
}

async fn survives_a_node_that_dies_after_publishing(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::RabbitMq(&BROKER), kind, "queue.published").await;
}

async fn survives_a_node_that_dies_before_settling(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::RabbitMq(&BROKER), kind, "outbox.settle").await;
}

async fn survives_a_consumer_that_dies_before_the_commit(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::RabbitMq(&BROKER), kind, "record.inserted").await;
}

async fn survives_a_consumer_that_dies_after_the_commit(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::RabbitMq(&BROKER), kind, "record.committed").await;
}

async fn survives_a_consumer_that_dies_before_the_acknowledgement(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::RabbitMq(&BROKER), kind, "queue.ack").await;
}

/// Half of all messages are delivered twice and in another order, and all of them once more after orders were cancelled: nothing is
/// recorded twice, and a cancelled order stays cancelled. Bytes that are no message become a dead letter.
async fn repeated_and_unreadable_messages_do_no_harm(kind: Kind) {
    for seed in 0..count(5, 1) {
        let mut rng = StdRng::seed_from_u64(seed);
        let nodes = start(kind, 2, &BROKER);
        let everyone = nodes.shops[0].log_in(0, 40).await;
        let sale = nodes.create_sale(20).await;
        let history = Arc::new(Recorder::default());
        // A few at a time, so that there are several messages.
        for some in everyone.chunks(5) {
            nodes.storm(&history, sale, some, 1).await;
        }
        let (_connection, channel, exchange) = channel(&nodes, &BROKER).await;
        let taken = take_all(&channel, &exchange).await;
        assert!(taken.len() >= 4, "{} messages", taken.len());
        let mut again = taken.clone();
        again.extend(taken.iter().filter(|_| rng.random_bool(0.5)).cloned());
        again.push((0, b"\xffnot a message".to_vec()));
        again.shuffle(&mut rng);
        for (partition, bytes) in &again {
            publish(&channel, &exchange, &partition.to_string(), bytes).await;
        }
        let consumers = consumers(&nodes, 1, &BROKER);
        until("the orders are recorded", async || rows(&nodes, sale).await == 20).await;
        let cancelled: Vec<_> = history.ended().into_iter().filter(|attempt| attempt.order.is_some()).take(3).collect();
        let mut client = nodes.shops[1].client().await;
        for attempt in &cancelled {
            let buyer = everyone.iter().find(|buyer| buyer.id == attempt.user).unwrap();
            history.cancel(&mut client, sale, buyer, attempt.order.unwrap()).await;
        }
        for (partition, bytes) in &taken {
            publish(&channel, &exchange, &partition.to_string(), bytes).await;
        }
        let delivered = again.iter().chain(&taken).map(|(_, bytes)| orders_in(bytes)).sum::<usize>();
        until("everything is delivered", async || {
            consumers.shops[0].metric("stampede_queue_consumed_orders_total").await >= delivered as f64
        })
        .await;
        // It finishes what it has begun, and acknowledges it.
        consumers.stop();
        assert_eq!(take_all(&channel, &exchange).await, Vec::new(), "nothing is delivered again");
        let live = nodes.verify(&history, sale).await;
        assert!((17..20).contains(&live), "{live} of 20 are left");
        let letters = nodes.shops[0].client().await.get("/admin/v1/dead-letters", TOKEN).await.unwrap().json();
        assert_eq!(letters["dead_letters"].as_array().unwrap().len(), 1, "{letters}");
        let id = letters["dead_letters"][0]["id"].as_str().unwrap();
        let (done, text) = dead_letters_command(&nodes.shops[0], &["show", id]);
        assert!(done && text.contains("ff6e6f742061206d657373616765"), "{text}");
        let (done, text) = dead_letters_command(&nodes.shops[0], &["discard", id]);
        assert!(done && text.contains("discarded"), "{text}");
    }
}

/// Messages that an older version could not read are recorded after the update, when they are retried.
async fn readable_dead_letters_are_recorded(kind: Kind) {
    let nodes = start(kind, 1, &BROKER);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, &buyers).await;
    let (_connection, channel, exchange) = channel(&nodes, &BROKER).await;
    let is_of_sale = |bytes: &[u8]| matches!(decode(bytes.to_vec()), Payload::Batch(batch) if batch.sale == sale);
    for (partition, bytes) in take_all(&channel, &exchange).await {
        let key = if is_of_sale(&bytes) { "dead-letters".to_owned() } else { partition.to_string() };
        publish(&channel, &exchange, &key, &bytes).await;
    }
    let consumers = consumers(&nodes, 1, &BROKER);
    runs::retried_dead_letters_are_recorded(&nodes, sale).await;
    assert_eq!(nodes.verify(&history, sale).await, 2);
    consumers.stop();
}

/// An owner whose order was never published asks again after the end of the sale: it is recorded with a time of its sale.
async fn order_of_an_owner_who_asks_after_the_end_has_a_time_of_its_sale(kind: Kind) {
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 1, |n, command| {
        let mut command = without_consumer(BROKER.port())(n, command);
        // It would record the order from its mark.
        command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let (history, other) = (Recorder::default(), nodes.create_sale(1).await);
    let mut client = nodes.shops[0].client().await;
    let bought = Recorder::default().buy(&mut client, other, &buyers[0]).await.order.unwrap();
    let order = OrderId::new(bought.get() + 1).unwrap();
    let sale = nodes.create_ended_sale_with_mark(buyers[1].id, order).await;
    let mine = history.buy(&mut client, sale, &buyers[1]).await;
    assert_eq!((mine.response, mine.order), (Response::Pending, Some(order)));
    let consumers = consumers(&nodes, 1, &BROKER);
    until("the order is recorded", async || rows(&nodes, sale).await == 1).await;
    assert_eq!(nodes.verify(&history, sale).await, 1);
    consumers.stop();
}

/// Redis loses everything: what the broker has confirmed is recorded before the sale is opened again.
async fn accepted_orders_survive_an_empty_redis(kind: Kind) {
    for _ in 0..count(50, 1) {
        let nodes = start(kind, 2, &BROKER);
        let everyone = nodes.shops[0].log_in(0, 60).await;
        let sale = nodes.create_sale(25).await;
        let history = Arc::new(Recorder::default());
        nodes.storm(&history, sale, &everyone[..15], 1).await;
        assert!(history.count(Response::Pending) >= 15);
        let load = {
            let addresses: Vec<_> = nodes.shops.iter().map(|shop| shop.address).collect();
            let (history, some) = (history.clone(), everyone[15..40].to_vec());
            tokio::spawn(async move { storm(&addresses, &history, sale, &some, 2).await })
        };
        nodes.redis.kill().unwrap();
        nodes.redis.restart().unwrap();
        load.await.unwrap();
        until("the sale goes on", async || {
            let response = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[59]).await.response;
            response != Response::Unknown
        })
        .await;
        let _consumers = consumers(&nodes, 1, &BROKER);
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 25);
    }
}

/// Redis loses everything while an order is in the queue that the database rejects: the rebuild does not wait for it, and the order keeps
/// its stock in quarantine until an operator retries it.
async fn rejected_order_does_not_hold_up_a_rebuild(kind: Kind) {
    let nodes = start(kind, 1, &BROKER);
    let everyone = nodes.shops[0].log_in(0, 6).await;
    let sale = nodes.create_sale(4).await;
    let history = Arc::new(Recorder::default());
    execute(kind, &nodes.storages[0], &reject_orders_of(kind, &[everyone[0].id])).await;
    nodes.storm(&history, sale, &everyone[..3], 1).await;
    assert_eq!(history.count(Response::Pending), 3);
    nodes.redis.kill().unwrap();
    nodes.redis.restart().unwrap();
    until("the order is in quarantine", async || quarantine(&nodes.shops[0]).await.len() == 1).await;
    nodes.wait_until_open(sale).await;
    let mut client = nodes.shops[0].client().await;
    until("the last one is sold", async || {
        matches!(history.buy(&mut client, sale, &everyone[3]).await.response, Response::Pending | Response::Already)
    })
    .await;
    assert_eq!(history.buy(&mut client, sale, &everyone[4]).await.response, Response::SoldOut, "its stock is taken");
    let _consumers = consumers(&nodes, 1, &BROKER);
    execute(kind, &nodes.storages[0], accept_orders_again(kind)).await;
    let id = quarantine(&nodes.shops[0]).await[0]["id"].as_str().unwrap().to_owned();
    let retried = nodes.shops[0].admin(&format!("quarantine/{id}/retry"), &Value::Null).await;
    assert_eq!((retried.status.as_u16(), retried.text("outcome").as_str()), (200, "recorded"));
    assert_eq!(nodes.verify(&history, sale).await, 4);
}

/// The broker is killed under load and is away for a while: the sale goes on to the bound of the outbox without confirming anything, then
/// buyers are refused, and what was admitted is recorded when the broker is back. A node that starts meanwhile says why it is not ready.
async fn sale_survives_a_broker_that_is_away(kind: Kind) {
    /// Entries of the outbox.
    const BOUND: u64 = 8;
    let broker = rabbitmq::start().unwrap();
    let change = |n: usize, command: Command| {
        let mut command = without_consumer(broker.port())(n, command);
        command.env("STAMPEDE__QUEUE__MAX_BATCHES", BOUND.to_string());
        command
    };
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 2, change);
    let everyone = nodes.shops[0].log_in(0, 80).await;
    for _ in 0..count(5, 1) {
        let consumers = consumers(&nodes, 1, &broker);
        let sale = nodes.create_sale(40).await;
        let history = Arc::new(Recorder::default());
        let load = {
            let addresses: Vec<_> = nodes.shops.iter().map(|shop| shop.address).collect();
            let (history, some) = (history.clone(), everyone[..20].to_vec());
            tokio::spawn(async move { storm(&addresses, &history, sale, &some, 1).await })
        };
        until("orders are accepted", async || history.count(Response::Pending) > 0).await;
        broker.kill().unwrap();
        let killed_at = Instant::now();
        load.await.unwrap();
        let confirmed = history.count(Response::Pending);
        for buyer in &everyone[20..40] {
            let attempt = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await;
            assert_eq!(attempt.response, Response::Unknown, "nothing is confirmed without the broker");
        }
        assert_eq!(history.count(Response::Pending), confirmed);
        assert_eq!(entries(&nodes.redis, &outbox(sale)), BOUND, "each of them was admitted until the outbox was full");
        // So it stays for as long as the broker is away. This buyer has no order; an owner gets `outcome_unknown`.
        let (mut client, path) = (nodes.shops[1].client().await, format!("/v1/sales/{sale}/orders"));
        let away = Duration::from_secs(count(60, 2));
        loop {
            let refused = client.post(&path, &everyone[60].token, &Value::Null).await.unwrap();
            let answer = (refused.status.as_u16(), refused.text("code"), refused.header("retry-after").to_owned());
            assert_eq!(answer, (503, "busy".to_owned(), "1".to_owned()));
            if killed_at.elapsed() >= away {
                break;
            }
            tokio::time::sleep(PACE).await;
        }
        assert_eq!(entries(&nodes.redis, &outbox(sale)), BOUND);
        let storage = Storage::with(Some(nodes.storages[0].url()));
        let mut late = without_consumer(broker.port())(0, nodes.node(&storage));
        late.env("STAMPEDE__RABBITMQ__CONNECT_TIMEOUT_MS", "1000")
            .env("STAMPEDE__QUEUE__MAX_BATCHES", BOUND.to_string());
        let late = Shop::run(late);
        let ready = async || late.client().await.get("/readyz", "").await.unwrap();
        let reply = ready().await;
        let body = String::from_utf8(reply.body.to_vec()).unwrap();
        assert!(reply.status == 503 && body.contains("RabbitMQ cannot be used"), "{} {body}", reply.status);
        broker.restart().unwrap();
        until("the node is ready", async || ready().await.status == 200).await;
        until("the outbox is published", async || entries(&nodes.redis, &outbox(sale)) == 0).await;
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 40);
        assert!(late.stop().success());
        consumers.stop();
    }
}

/// Redis is empty afterwards.
async fn accepted_orders_survive_the_death_of_everything(kind: Kind) {
    let broker = rabbitmq::start().unwrap();
    runs::accepted_orders_survive_the_death_of_everything(Queue::RabbitMq(&broker), kind, count(5, 1)).await;
}

async fn selling_goes_on_while_the_database_is_away(kind: Kind) {
    runs::selling_goes_on_while_the_database_is_away(Queue::RabbitMq(&BROKER), kind).await;
}

async fn owners_are_refused_at_once_while_the_database_hangs(kind: Kind) {
    runs::owners_are_refused_at_once_while_the_database_hangs(Queue::RabbitMq(&BROKER), kind).await;
}

/// Processes with other settings of the queue are refused, and a password is shown nowhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_settings_of_the_queue_are_refused() {
    let nodes = start(Kind::Postgres, 1, &BROKER);
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let other = |name: &str, value: &str| {
        let mut command = with_broker(BROKER.port())(nodes.node(&storage));
        command.env(name, value);
        refused(command)
    };
    let error = other("STAMPEDE__RABBITMQ__PARTITIONS", "4");
    assert!(error.contains("rabbitmq.partitions = 3"), "{error}");
    let error = other("STAMPEDE__QUEUE__ACCEPT_WITHIN_MS", "1999");
    assert!(error.contains("queue.accept_within_ms = 2000"), "{error}");
    let error = other("STAMPEDE__RABBITMQ__QUEUE_TYPE", "quorum");
    assert!(error.contains("was declared otherwise") && error.contains("x-queue-type"), "{error}");
    let error = other("STAMPEDE__RABBITMQ__URL", "");
    assert!(error.contains("set --amqp"), "{error}");
    let mut wrong = with_broker(BROKER.port())(nodes.node(&storage));
    wrong.args(["--amqp", &format!("amqp://guest:a-secret-word@127.0.0.1:{}", BROKER.port())]);
    // The client library logs every frame at this level.
    wrong.env("STAMPEDE__LOG__LEVEL", "trace,lapin=trace");
    let error = refused(wrong);
    assert!(error.contains("RabbitMQ refused access") && !error.contains("a-secret-word"), "{error}");
    let mut show = Command::new(env!("CARGO_BIN_EXE_stampede"));
    show.args(["config", "show", "--amqp", "amqp://user:a-secret-word@host/v"]);
    let shown = String::from_utf8(show.output().unwrap().stdout).unwrap();
    assert!(shown.contains("amqp://***@host/v") && !shown.contains("a-secret-word"), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_sells_and_leaves_nothing_behind() {
    demo_starts_and_stops_everything(&["--tier", "queued", "--queue", "rabbitmq"], 3, 202).await;
}

#[test]
fn load_test_finds_no_violation() {
    runs::load_test_finds_no_violation(&["--queue", "rabbitmq"]);
}

#[test]
fn drain_is_compared_with_raw_inserts() {
    runs::drain_is_compared_with_raw_inserts(&["--queue", "rabbitmq", "--database", "mariadb"]);
}

on_each_database!(
    servers: three_nodes_and_two_consumers_sell_exactly_the_stock,
    survives_a_node_that_dies_after_the_admission,
    survives_a_consumer_that_dies_before_the_commit,
    survives_a_consumer_that_dies_before_the_acknowledgement
);

on_each_database!(
    @module on_postgres, Postgres,
    one_user_gets_one_order,
    watchers_share_their_queries,
    buyers_can_wait_for_the_ledger,
    survives_a_node_that_dies_after_publishing,
    survives_a_consumer_that_dies_after_the_commit,
    repeated_and_unreadable_messages_do_no_harm,
    readable_dead_letters_are_recorded,
    order_of_an_owner_who_asks_after_the_end_has_a_time_of_its_sale,
    rejected_order_does_not_hold_up_a_rebuild,
    accepted_orders_survive_the_death_of_everything
);

on_each_database!(
    @module on_mariadb, MariaDb,
    an_accepted_order_is_visible_on_every_node,
    survives_a_node_that_dies_before_settling,
    survives_a_consumer_that_dies_after_the_commit,
    accepted_orders_survive_an_empty_redis,
    sale_survives_a_broker_that_is_away,
    owners_are_refused_at_once_while_the_database_hangs,
    selling_goes_on_while_the_database_is_away
);

//! The tier `queued`: several node processes, one gate in Redis whose outbox is the queue, and consumers that record the orders.
//!
//! - [`runs`]: what every queue passes; [`checks`]: `stampede check` while orders wait in the queue
//! - [`rabbitmq`]: with RabbitMQ as the queue; [`rabbitmq_tls`]: over TLS; [`returned`]: it returns messages; [`late_confirms`]: it confirms
//!   messages too late; [`late_messages`]: messages of sales that the gate or the ledger does not have any more
//! - [`streams`]: entries of the outbox that are delivered twice or cannot be read, an outbox that is full, lost, or read again after
//!   a crash; [`late_admissions`]: Redis answers too late
//! - [`stopping`]: a consumer is stopped in the middle of a batch; [`readiness`]: what `/readyz` says without the database
//! - [`stuck`]: the database records nothing of one sale; [`poison`]: it rejects single orders
//! - [`tier_changes`]: another tier is started while orders are in the queue
//! - [`rebuilds`]: the gate is rebuilt while orders are in the queue; [`stories`]: what a simpler protocol would do wrong

mod checks;
mod late_admissions;
mod late_confirms;
mod late_messages;
mod poison;
pub mod rabbitmq;
mod rabbitmq_tls;
mod readiness;
mod rebuilds;
mod returned;
mod runs;
mod stopping;
mod stories;
mod streams;
mod stuck;
mod tier_changes;

use std::cell::RefCell;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Process, Server, count, redis, until};

use self::runs::Queue;
use crate::shared::{Nodes, demo_starts_and_stops_everything, refused};
use crate::shop::{Kind, Shop, Storage, TOKEN, command};

/// A node that serves buyers and records nothing.
fn without_consumer(command: Command) -> Command {
    let mut command = queued(command);
    command.env("STAMPEDE__QUEUE__CONSUME", "false");
    command
}

/// A node that serves buyers and records orders.
fn queued(mut command: Command) -> Command {
    command.env("STAMPEDE__TIER", "queued");
    command
}

/// Nodes without consumers, on a Redis that writes every command to disk before it answers.
fn start(kind: Kind, nodes: usize) -> Nodes {
    Nodes::start_on(kind, redis::start_durable().unwrap(), nodes, |_, command| without_consumer(command))
}

/// The command of a process that records orders.
fn consumer_command(storage: &Storage, redis: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["work", "--tier", "queued", "--listen", "127.0.0.1:0", "--redis", redis]);
    command.args(["--database", &storage.url(), "--data-dir"]).arg(storage.path());
    command.env("STAMPEDE_ADMIN_TOKEN", TOKEN).env("STAMPEDE__LOG__LEVEL", "error");
    command
}

/// Processes that record orders, each with a data directory.
struct Consumers {
    shops: Vec<Shop>,
    _storages: Vec<Storage>,
}

impl Consumers {
    fn start(nodes: &Nodes, count: usize) -> Self {
        Self::start_with(nodes, count, |command| command)
    }

    /// Starts processes whose commands are changed by `change`.
    fn start_with(nodes: &Nodes, count: usize, change: impl Fn(Command) -> Command) -> Self {
        let storages: Vec<_> = (0..count).map(|_| Storage::with(Some(nodes.storages[0].url()))).collect();
        let redis = redis::url(nodes.redis.port());
        let run = |storage| Shop::run(change(consumer_command(storage, &redis)));
        let shops = storages.iter().map(run).collect();
        Self { shops, _storages: storages }
    }

    fn stop(self) {
        for shop in self.shops {
            assert!(shop.stop().success());
        }
    }
}

fn outbox(sale: SaleId) -> String {
    format!("stampede:*:{{{sale}}}:out")
}

async fn three_nodes_and_two_consumers_sell_exactly_the_stock(kind: Kind) {
    runs::three_nodes_and_two_consumers_sell_exactly_the_stock(Queue::Stream, kind).await;
}

async fn one_user_gets_one_order(kind: Kind) {
    runs::one_user_gets_one_order(Queue::Stream, kind).await;
}

async fn an_accepted_order_is_visible_on_every_node(kind: Kind) {
    runs::an_accepted_order_is_visible_on_every_node(Queue::Stream, kind).await;
}

/// The address of a Redis with a user who may not subscribe.
fn without_subscription(redis: &Server) -> String {
    let port = redis.port();
    redis::ask(port, &["acl", "setuser", "deaf", "on", ">word", "~*", "&*", "+@all", "-subscribe"]).unwrap();
    format!("redis://deaf:word@127.0.0.1:{port}/")
}

/// A process that records orders finds new sales in the ledger if it hears nothing of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_of_new_sales_are_recorded_by_a_consumer_that_hears_nothing() {
    const WITHIN: Duration = Duration::from_secs(10);
    let nodes = start(Kind::Postgres, 1);
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let consumer = Shop::run(consumer_command(&storage, &without_subscription(&nodes.redis)));
    let refusals = || redis::ask(nodes.redis.port(), &["acl", "log"]).unwrap();
    until("it may not subscribe", async || refusals().contains("deaf")).await;
    let buyers = nodes.shops[0].log_in(0, 3).await;
    for _ in 0..2 {
        let (sale, history) = (nodes.create_sale(3).await, Arc::new(Recorder::default()));
        nodes.storm(&history, sale, &buyers, 1).await;
        assert_eq!(history.count(Response::Pending), 3);
        let took = until("the orders are recorded", async || rabbitmq::rows(&nodes, sale).await == 3).await;
        assert!(took < WITHIN, "{took:?}");
        assert_eq!(nodes.verify(&history, sale).await, 3);
    }
    assert!(consumer.stop().success());
}

/// An order of a sale that was created a moment ago is found on a node that has not heard of the sale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_accepted_order_of_a_new_sale_is_visible_on_every_node() {
    let nodes = start(Kind::Postgres, 1);
    // This node reads the ledger once a second, and hears nothing in between.
    let redis = without_subscription(&nodes.redis);
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut second = without_consumer(command(&storage));
    second.args(["--redis", &redis]);
    let second = Shop::run(second);
    let buyer = second.log_in(0, 1).await.remove(0);
    let (mut client, mut watching) = (second.client().await, Vec::new());
    // A few, because the node may read the ledger at this very moment.
    for n in 0..6 {
        let sale = nodes.shops[0].create_sale(1).await;
        let path = format!("/v1/sales/{sale}/orders");
        let accepted = nodes.shops[0].client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
        assert_eq!(accepted.status, 202, "{accepted:?}");
        let location = accepted.header("location").to_owned();
        if n % 2 == 0 {
            let shown = client.get(&location, &buyer.token).await.unwrap();
            assert_eq!((shown.status.as_u16(), shown.text("status")), (200, "pending".to_owned()), "{shown:?}");
            continue;
        }
        let (address, token) = (second.address, buyer.token.clone());
        let watch = tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            client.get(&location.replace('?', "/events?"), &token).await.unwrap()
        });
        let is_watched = async || second.metric("stampede_queue_watched_orders").await > watching.len() as f64;
        until("the order is watched", async || watch.is_finished() || is_watched().await).await;
        watching.push(watch);
    }
    let unknown = client.get("/v1/orders/12345?sale=54321", &buyer.token).await.unwrap();
    assert_eq!((unknown.status.as_u16(), unknown.text("code")), (404, "no_such_order".to_owned()));
    let _consumers = Consumers::start(&nodes, 1);
    for watch in watching {
        let stream = String::from_utf8(watch.await.unwrap().body.to_vec()).unwrap();
        assert!(stream.contains("pending") && stream.contains("unpaid"), "{stream}");
    }
}

async fn watchers_share_their_queries(kind: Kind) {
    runs::watchers_share_their_queries(Queue::Stream, kind).await;
}

async fn buyers_can_wait_for_the_ledger(kind: Kind) {
    runs::buyers_can_wait_for_the_ledger(Queue::Stream, kind).await;
}

/// Orders are cancelled as soon as they are accepted, and bought again.
async fn accepted_orders_can_be_cancelled(kind: Kind) {
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 2, |_, command| queued(command));
    let buyers = nodes.shops[0].log_in(0, 6).await;
    let sale = nodes.create_sale(3).await;
    let history = Arc::new(Recorder::default());
    let tasks: Vec<_> = buyers
        .into_iter()
        .enumerate()
        .map(|(n, buyer)| {
            let (history, addresses) = (history.clone(), [nodes.shops[0].address, nodes.shops[1].address]);
            tokio::spawn(async move {
                let mut clients = Vec::new();
                for address in addresses {
                    clients.push(stampede_testkit::Client::connect(address).await.unwrap());
                }
                for round in 0..count(100, 6) as usize {
                    let bought = history.buy(&mut clients[(n + round) % 2], sale, &buyer).await;
                    let Some(order) = bought.order.filter(|_| bought.response.is_confirmation()) else {
                        assert_eq!(bought.response, Response::SoldOut);
                        continue;
                    };
                    let cancelled = history.cancel(&mut clients[(n + round + 1) % 2], sale, &buyer, order).await;
                    assert_eq!(cancelled.response, Response::Cancelled);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(history.count(Response::Pending) > 6);
    assert_eq!(nodes.verify(&history, sale).await, 0, "every order was cancelled");
}

async fn survives_a_node_that_dies_after_the_admission(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::Stream, kind, "buy.admitted").await;
}

async fn survives_a_consumer_that_dies_before_the_commit(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::Stream, kind, "record.inserted").await;
}

async fn survives_a_consumer_that_dies_after_the_commit(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::Stream, kind, "record.committed").await;
}

async fn survives_a_consumer_that_dies_before_settling(kind: Kind) {
    runs::survives_a_process_that_dies_at(Queue::Stream, kind, "outbox.settle").await;
}

async fn accepted_orders_survive_the_death_of_everything(kind: Kind) {
    runs::accepted_orders_survive_the_death_of_everything(Queue::Stream, kind, count(50, 1)).await;
}

/// Redis loses the queue, but not the marks; or the marks, but not the queue: no accepted order is lost.
async fn accepted_orders_survive_the_loss_of_one_key(kind: Kind) {
    for lost in ["out", "live", "sale"] {
        let nodes = start(kind, 2);
        let everyone = nodes.shops[0].log_in(0, 30).await;
        let sale = nodes.create_sale(15).await;
        let history = Arc::new(Recorder::default());
        nodes.storm(&history, sale, &everyone[..10], 1).await;
        assert_eq!(history.count(Response::Pending), 20, "ten orders, each named twice");
        let key = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:{lost}")]).unwrap();
        redis::ask(nodes.redis.port(), &["del", key.trim()]).unwrap();
        let _consumers = Consumers::start(&nodes, 1);
        until("the sale goes on", async || {
            let response = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[20]).await.response;
            response == Response::Pending || response == Response::Already
        })
        .await;
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 15, "{lost} was lost");
    }
}

async fn selling_goes_on_while_the_database_is_away(kind: Kind) {
    runs::selling_goes_on_while_the_database_is_away(Queue::Stream, kind).await;
}

async fn owners_are_refused_at_once_while_the_database_hangs(kind: Kind) {
    runs::owners_are_refused_at_once_while_the_database_hangs(Queue::Stream, kind).await;
}

/// A Redis without an append-only file is refused unless the settings allow it, and so is `work` in another tier.
#[test]
fn unsuitable_settings_are_refused() {
    let redis = redis::start().unwrap();
    let storage = Storage::on(Kind::Postgres);
    let node = || {
        let mut command = queued(command(&storage));
        command.args(["--redis", &redis::url(redis.port())]);
        command
    };
    let error = refused(node());
    assert!(error.contains("appendonly") && error.contains("queue.allow_without_aof"), "{error}");
    let mut allowed = node();
    allowed.env("STAMPEDE__QUEUE__ALLOW_WITHOUT_AOF", "true");
    assert!(Shop::run(allowed).stop().success());
    let mut solo = Command::new(env!("CARGO_BIN_EXE_stampede"));
    solo.args(["work", "--listen", "127.0.0.1:0", "--data-dir"]).arg(storage.path());
    let error = refused(solo);
    assert!(error.contains("only the tiers queued and shielded have a queue"), "{error}");
}

/// A process that records orders prints only addresses that it serves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_prints_the_addresses_that_it_serves() {
    let nodes = start(Kind::Postgres, 1);
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut process = Process::start(consumer_command(&storage, &redis::url(nodes.redis.port()))).unwrap();
    let printed = RefCell::new(Vec::new());
    let end = process.wait_for(Duration::from_secs(60), |line| {
        printed.borrow_mut().push(line.to_owned());
        line.contains("database").then_some(())
    });
    end.unwrap();
    let printed = printed.into_inner().join("\n");
    let mut urls = Vec::new();
    for line in printed.lines().filter(|line| line.contains("://127.0.0.1")) {
        let (_, rest) = line.split_once("://").unwrap();
        let (address, paths) = rest.split_once('/').unwrap();
        let paths = format!("/{paths}");
        let paths = paths.split([',', ' ']).filter(|word| word.starts_with('/') && !word.contains("token"));
        urls.extend(paths.map(|path| (address.to_owned(), path.to_owned())));
    }
    assert_eq!(urls.len(), 3, "{printed}");
    for (address, path) in urls {
        let mut client = Client::connect(address.parse().unwrap()).await.unwrap();
        assert_eq!(client.get(&path, TOKEN).await.unwrap().status, 200, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_sells_and_leaves_nothing_behind() {
    demo_starts_and_stops_everything(&["--tier", "queued"], 2, 202).await;
}

#[test]
fn load_test_finds_no_violation() {
    runs::load_test_finds_no_violation(&["--database", "postgres"]);
}

#[test]
fn drain_is_compared_with_raw_inserts() {
    runs::drain_is_compared_with_raw_inserts(&["--database", "postgres"]);
}

on_each_database!(
    servers: three_nodes_and_two_consumers_sell_exactly_the_stock,
    one_user_gets_one_order,
    an_accepted_order_is_visible_on_every_node,
    watchers_share_their_queries,
    buyers_can_wait_for_the_ledger,
    accepted_orders_can_be_cancelled,
    survives_a_node_that_dies_after_the_admission,
    survives_a_consumer_that_dies_before_the_commit,
    survives_a_consumer_that_dies_after_the_commit,
    survives_a_consumer_that_dies_before_settling,
    accepted_orders_survive_the_death_of_everything,
    accepted_orders_survive_the_loss_of_one_key,
    selling_goes_on_while_the_database_is_away
);

on_each_database!(@module on_postgres, Postgres, owners_are_refused_at_once_while_the_database_hangs);

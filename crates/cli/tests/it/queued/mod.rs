//! The tier `queued`: several node processes, one gate in Redis whose outbox is the queue, and consumers that record the orders.
//! [`runs`]: what every queue passes; [`rabbitmq`]: with RabbitMQ as the queue; [`stories`]: what a simpler protocol would do wrong.

mod rabbitmq;
mod runs;
mod stories;

use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Server, count, redis, until};

use self::runs::Queue;
use crate::shared::{Nodes, refused};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command};

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
fn consumer_command(storage: &Storage, redis: &Server) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["work", "--tier", "queued", "--listen", "127.0.0.1:0", "--redis", &redis::url(redis.port())]);
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
        let run = |storage| Shop::run(change(consumer_command(storage, &nodes.redis)));
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

/// An order is shown as pending on every node from the moment it is accepted, to its owner only; then as it is in the ledger.
async fn an_accepted_order_is_visible_on_every_node(kind: Kind) {
    let nodes = start(kind, 2);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(5).await;
    let (one, other) = (&nodes.shops[0], &nodes.shops[1]);
    let path = format!("/v1/sales/{sale}/orders");
    let accepted = one.client().await.post(&path, &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!((accepted.status.as_u16(), accepted.text("status")), (202, "pending".to_owned()));
    let location = accepted.header("location").to_owned();
    assert_eq!(location, format!("/v1/orders/{}?sale={sale}", accepted.text("id")));
    let ask = async |path: &str, buyer: &Buyer| other.client().await.get(path, &buyer.token).await.unwrap();
    let pending = ask(&location, &buyers[0]).await;
    assert_eq!(pending.json(), json!({ "id": accepted.text("id"), "sale_id": sale, "status": "pending" }));
    assert_eq!(ask(&location, &buyers[1]).await.status, 404, "another user's order is not shown");
    let other_id = format!("/v1/orders/12345?sale={sale}");
    assert_eq!(ask(&other_id, &buyers[0]).await.status, 404);

    // The stream of events ends with the order in the ledger.
    let events = location.replace('?', "/events?");
    let watching = {
        let (address, token) = (other.address, buyers[0].token.clone());
        tokio::spawn(async move {
            let mut client = stampede_testkit::Client::connect(address).await.unwrap();
            client.get(&events, &token).await.unwrap()
        })
    };
    let _consumers = Consumers::start(&nodes, 1);
    let stream = String::from_utf8(watching.await.unwrap().body.to_vec()).unwrap();
    let states: Vec<Value> =
        stream.lines().filter_map(|line| line.strip_prefix("data: ")).map(|data| data.parse().unwrap()).collect();
    let states: Vec<&str> = states.iter().map(|state| state["status"].as_str().unwrap()).collect();
    assert_eq!(states, ["pending", "unpaid"], "{stream}");
    assert_eq!(ask(&location, &buyers[0]).await.text("status"), "unpaid");
}

/// Many watchers of orders in the queue cost no query each.
async fn watchers_share_their_queries(kind: Kind) {
    let watchers = count(2000, 100);
    let nodes = start(kind, 1);
    let buyers = nodes.shops[0].log_in(0, watchers).await;
    let sale = nodes.create_sale(watchers as u32).await;
    let history = Arc::new(Recorder::default());
    for some in buyers.chunks(500) {
        nodes.storm(&history, sale, some, 1).await;
    }
    let watching: Vec<_> = history
        .ended()
        .into_iter()
        .map(|attempt| {
            let token = buyers.iter().find(|buyer| buyer.id == attempt.user).unwrap().token.clone();
            let path = format!("/v1/orders/{}/events?sale={sale}", attempt.order.unwrap());
            let address = nodes.shops[0].address;
            tokio::spawn(async move {
                let mut client = stampede_testkit::Client::connect(address).await.unwrap();
                client.get(&path, &token).await.unwrap()
            })
        })
        .collect();
    until("everyone watches", async || nodes.shops[0].metric("stampede_queue_watched_orders").await == watchers as f64)
        .await;
    let before = nodes.shops[0].metric("stampede_queue_watch_queries_total").await;
    let _consumers = Consumers::start(&nodes, 1);
    for task in watching {
        let reply = task.await.unwrap();
        assert!(String::from_utf8(reply.body.to_vec()).unwrap().contains("unpaid"));
    }
    let queries = nodes.shops[0].metric("stampede_queue_watch_queries_total").await - before;
    assert!(queries < 30.0, "{queries} queries for {watchers} watchers");
}

/// With `answer_after = "ledger"` a buyer is answered when another process has recorded the order.
async fn buyers_can_wait_for_the_ledger(kind: Kind) {
    // The first node records for both. (It needs that for its demonstration data.)
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 2, |n, command| {
        let mut command = if n == 0 { queued(command) } else { without_consumer(command) };
        command.env("STAMPEDE__QUEUE__ANSWER_AFTER", "ledger");
        command
    });
    let everyone = nodes.shops[0].log_in(0, 60).await;
    let sale = nodes.create_sale(20).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone, 2).await;
    assert_eq!(history.count(Response::Created), 20);
    assert_eq!(history.count(Response::Pending), 0);
    assert_eq!(history.count(Response::Unknown), 0);
    assert_eq!(nodes.verify(&history, sale).await, 20);
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

#[test]
fn load_test_finds_no_violation() {
    runs::load_test_finds_no_violation(&["--database", "postgres"]);
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

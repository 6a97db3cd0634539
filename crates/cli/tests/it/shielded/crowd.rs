//! What a crowd costs that comes after the sell-out: nothing in Redis, nothing in the database, no memory.

#![expect(clippy::cast_sign_loss, reason = "metrics are not negative")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Server, count, redis, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{REFUSED, shielded, start, wait_for_shield};
use crate::fuzz::resident_bytes;
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, command};
use crate::statements::{counting_server, database_statements};

/// Nodes on a database server of their own, whose counters no other test raises.
async fn start_alone(kind: Kind, count: usize) -> (Server, Nodes) {
    let ((server, url), redis) = (counting_server(kind).await, redis::start_durable().unwrap());
    let storages: Vec<_> = (0..count).map(|_| Storage::with(Some(url.clone()))).collect();
    let node = |storage: &Storage| {
        let mut command = shielded(command(storage), 60_000);
        command.args(["--redis", &redis::url(redis.port())]);
        Shop::run(command)
    };
    let shops = storages.iter().map(node).collect();
    (server, Nodes { redis, storages, shops })
}

/// The commands that Redis has executed, those of scripts included.
pub(super) fn redis_commands(redis: &Server) -> u64 {
    let stats = redis::ask(redis.port(), &["info", "commandstats"]).unwrap();
    let calls = |line: &str| line.split_once(":calls=")?.1.split(',').next()?.parse::<u64>().ok();
    stats.lines().filter_map(calls).sum()
}

/// What Redis and the database have done so far.
async fn work(kind: Kind, nodes: &Nodes) -> (u64, u64) {
    (redis_commands(&nodes.redis), database_statements(kind, &nodes.storages[0]).await)
}

async fn sum(nodes: &Nodes, metric: &str) -> u64 {
    let mut sum = 0.0;
    for shop in &nodes.shops {
        sum += shop.metric(metric).await;
    }
    sum as u64
}

/// Every node refuses the whole crowd by itself. Redis and the database do what they do without a crowd, and owners get their orders
/// meanwhile.
async fn a_crowd_after_the_sell_out_costs_nothing(kind: Kind) {
    let (_server, nodes) = start_alone(kind, 3).await;
    let (owners, late, tries) = (5, count(1000, 60), count(34, 40));
    let everyone = nodes.shops[0].log_in(0, owners + late).await;
    let (owners, others) = everyone.split_at(owners as usize);
    let sale = nodes.create_sale(owners.len() as u32).await;
    let history = Arc::new(Recorder::default());
    super::sell_out(&nodes, &history, sale, owners, &others[0]).await;
    // Consumers have recorded the orders.
    assert_eq!(nodes.verify(&history, sale).await, owners.len());

    let probes = sum(&nodes, "stampede_shield_probes_total").await;
    let (refused, sent) = (sum(&nodes, REFUSED).await, history.all().len());
    let (before, started) = (work(kind, &nodes).await, Instant::now());
    nodes.storm(&history, sale, others, tries).await;
    let (elapsed, after) = (started.elapsed(), work(kind, &nodes).await);
    let sent = (history.all().len() - sent) as u64;
    assert!(sent >= 3 * late * tries);
    assert_eq!(history.count(Response::Unknown), 0);
    assert_eq!(sum(&nodes, REFUSED).await - refused, sent, "each was refused by its node");
    let probes = sum(&nodes, "stampede_shield_probes_total").await - probes;
    let expiries = elapsed.as_secs() / 48 + 1;
    assert!(probes <= 3 * expiries, "{probes} probes in {elapsed:?}");
    // The same time without a crowd.
    let idle_before = work(kind, &nodes).await;
    tokio::time::sleep(elapsed).await;
    let idle_after = work(kind, &nodes).await;
    let (redis, idle_redis) = (after.0 - before.0, idle_after.0 - idle_before.0);
    let (sql, idle_sql) = (after.1 - before.1, idle_after.1 - idle_before.1);
    eprintln!("{kind:?}: {sent} requests in {elapsed:?}: Redis {redis}, idle {idle_redis}; SQL {sql}, idle {idle_sql}");
    // Nodes look after their sales at intervals that vary: one round of all nodes more or less.
    let (redis_round, sql_round) = (3 * 120, 3 * 60);
    assert!(redis <= idle_redis + redis_round, "Redis: {redis} commands, {idle_redis} without the crowd");
    assert!(sql <= idle_sql + sql_round, "database: {sql} statements, {idle_sql} without the crowd");

    let asking = nodes.storm(&history, sale, owners, count(100, 5));
    let crowd = nodes.storm(&history, sale, &others[..20], count(100, 5));
    tokio::join!(asking, crowd);
    assert_eq!(nodes.verify(&history, sale).await, owners.len(), "no owner was refused");
}

/// Messages that are repeated late, invented or malformed lead to no refusal.
async fn late_messages_change_nothing(kind: Kind) {
    let nodes = start(kind, 2, 60_000);
    let everyone = nodes.shops[0].log_in(0, 5).await;
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    super::sell_out(&nodes, &history, sale, &everyone[..1], &everyone[4]).await;
    let port = nodes.redis.port();
    let ask = |command: &[&str]| redis::ask(port, command).unwrap().trim().to_owned();
    let channel = ask(&["pubsub", "channels", "stampede:*:sales"]);
    let key = ask(&["keys", &format!("stampede:*{{{sale}}}:sale")]);
    let generation = || ask(&["hmget", &key, "epoch", "gen"]).split_whitespace().collect::<Vec<_>>().join(" ");
    let publish = |message: &str| assert_eq!(ask(&["publish", &channel, message]), "2", "both nodes receive it");
    let first = generation();

    let order = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[0]).await.order.unwrap();
    let cancelled = history.cancel(&mut nodes.shops[0].client().await, sale, &everyone[0], order).await;
    assert_eq!(cancelled.response, Response::Cancelled);
    until("the stock is back", async || generation() != first).await;
    let malformed = sum(&nodes, "stampede_gate_malformed_messages_total").await;
    // The message of the first sell-out again, one that claims to be of now, and nonsense.
    publish(&format!("soldout {sale} {first}"));
    publish(&format!("soldout {sale} {}", generation()));
    publish("soldout");
    until("the messages have arrived", async || {
        sum(&nodes, "stampede_gate_malformed_messages_total").await == malformed + 2
    })
    .await;
    let next = history.buy(&mut nodes.shops[1].client().await, sale, &everyone[1]).await;
    assert_eq!(next.response, Response::Pending, "the next buyer gets it");
    for shop in &nodes.shops {
        wait_for_shield(shop, &history, sale, &everyone[4]).await;
        publish(&format!("soldout {sale} {first}"));
        let owned = history.buy(&mut shop.client().await, sale, &everyone[1]).await;
        assert_eq!(owned.order, next.order, "the owner gets the order");
    }
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// At the bound of buyers a sale has no shield, and gets one when another sale no longer needs its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buyers_of_all_sales_are_bounded() {
    let redis = redis::start_durable().unwrap();
    let nodes = Nodes::start_on(Kind::Postgres, redis, 1, |_, command| {
        let mut command = shielded(command, 1000);
        command.env("STAMPEDE__SHIELD__MAX_BUYERS", "1");
        command
    });
    let shop = &nodes.shops[0];
    let everyone = shop.log_in(0, 2).await;
    let (owner, other) = (&everyone[0], everyone[1].clone());
    let (first, second) = (nodes.create_sale(1).await, nodes.create_sale(1).await);
    let (of_first, history) = (Arc::new(Recorder::default()), Recorder::default());
    let mut client = shop.client().await;
    of_first.buy(&mut client, first, owner).await;
    wait_for_shield(shop, &of_first, first, &other).await;
    history.buy(&mut client, second, owner).await;
    // The first sale stays in use.
    let (asking, mut asker, asked_by) = (of_first.clone(), shop.client().await, other.clone());
    let in_use = tokio::spawn(async move {
        loop {
            assert_eq!(asking.buy(&mut asker, first, &asked_by).await.response, Response::SoldOut);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    until("the bound is reached", async || {
        assert_eq!(history.buy(&mut client, second, &other).await.response, Response::SoldOut);
        shop.metric("stampede_shield_over_capacity_total").await > 0.0
    })
    .await;
    assert_eq!(shop.metric("stampede_shield_buyers").await as u64, 1);
    assert!(history.buy(&mut client, second, owner).await.response.is_confirmation());
    in_use.abort();
    assert!(in_use.await.unwrap_err().is_cancelled(), "the first sale stayed sold out");
    wait_for_shield(shop, &history, second, &other).await;
    for (sale, history) in [(first, &*of_first), (second, &history)] {
        assert!(history.buy(&mut client, sale, owner).await.response.is_confirmation());
        assert_eq!(nodes.verify(history, sale).await, 1);
    }
}

/// Requests of one connection that are sent before the first response is read.
const PIPELINED: usize = 64;

/// Users without an order, of whom each sends the requests that a connection sends at once.
struct Crowd {
    users: Vec<Buyer>,
    next: AtomicUsize,
}

impl Crowd {
    fn next(&self) -> &Buyer {
        &self.users[self.next.fetch_add(1, Ordering::Relaxed) % self.users.len()]
    }
}

/// Sends requests over one connection, and returns when all were refused with 409.
async fn refuse(address: SocketAddr, path: String, crowd: Arc<Crowd>, requests: u64) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut received = Vec::new();
    for _ in 0..requests.div_ceil(PIPELINED as u64) {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {}\r\ncontent-length: 0\r\n\r\n",
            crowd.next().token
        );
        stream.write_all(request.repeat(PIPELINED).as_bytes()).await.unwrap();
        received.clear();
        // The last member of every body.
        while count_of(&received, b"\"code\":\"sold_out\"}") < PIPELINED {
            assert!(stream.read_buf(&mut received).await.unwrap() > 0, "the connection was closed");
        }
        assert_eq!(count_of(&received, b"HTTP/1.1 409 "), PIPELINED);
    }
}

fn count_of(text: &[u8], part: &[u8]) -> usize {
    text.windows(part.len()).filter(|found| found == &part).count()
}

/// A crowd of many users that is refused leaves nothing behind in the memory of the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_take_no_memory() {
    let nodes = start(Kind::Postgres, 1, 1000);
    let shop = &nodes.shops[0];
    let mut users = shop.log_in(0, count(1000, 50) + 1).await;
    let owner = users.remove(0);
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    super::sell_out(&nodes, &history, sale, std::slice::from_ref(&owner), &users[0]).await;
    let crowd = Arc::new(Crowd { users, next: AtomicUsize::new(0) });
    let (path, refused) = (format!("/v1/sales/{sale}/orders"), shop.metric(REFUSED).await);
    let requests = count(10_000_000, 20_000);
    let tenth = async || {
        let connections = (0..8).map(|_| refuse(shop.address, path.clone(), crowd.clone(), requests / 80));
        JoinSet::from_iter(connections).join_all().await;
    };
    tenth().await;
    let (early, started) = (resident_bytes(shop), Instant::now());
    for _ in 1..10 {
        tenth().await;
    }
    let late = resident_bytes(shop);
    let local = (shop.metric(REFUSED).await - refused) as u64;
    eprintln!(
        "{requests} requests of {} users, {local} refused locally; {early} bytes resident after a tenth, {late} at the end; {:?}",
        crowd.users.len(),
        started.elapsed()
    );
    assert!(local > requests * 9 / 10, "{local} of {requests} were refused by the node itself");
    assert!(late < early + early / 10 + (8 << 20), "{early} bytes after a tenth of the requests, {late} at the end");
    let reply = shop.client().await.post(&path, &owner.token, &Value::Null).await.unwrap();
    assert!(reply.status.is_success(), "the owner gets the order");
}

on_each_database!(servers: a_crowd_after_the_sell_out_costs_nothing, late_messages_change_nothing);

//! What a batch costs Redis.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_proof::servers::redis::client;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, count, redis, until};

use super::{Nodes, entries, executed};
use crate::shop::{Kind, Shop, Storage, command};

/// Prints every command that a Redis server receives into a file.
pub struct Monitor<'a> {
    redis: &'a Server,
    log: PathBuf,
    client: Child,
}

impl<'a> Monitor<'a> {
    pub async fn start(redis: &'a Server, directory: &Path) -> Self {
        let log = directory.join("monitor");
        let mut command = client(redis.port());
        let client = command.arg("monitor").stdout(std::fs::File::create(&log).unwrap()).spawn().unwrap();
        let monitor = Self { redis, log, client };
        until("the monitor is connected", async || monitor.read().starts_with("OK")).await;
        monitor
    }

    fn read(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// What was received until now. `marker` must be another one with every call.
    pub async fn received(&self, marker: &str) -> String {
        redis::ask(self.redis.port(), &["echo", marker]).unwrap();
        until("the marker was printed", async || self.read().contains(marker)).await;
        self.read()
    }
}

impl Drop for Monitor<'_> {
    fn drop(&mut self) {
        // It may have ended with the server.
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

/// The admissions of a sale, each by its number of requests, and the number of its settlements, among the commands that were received.
fn admissions_and_settlements(sale: SaleId, received: &str) -> (Vec<usize>, usize) {
    let key = format!(":{{{sale}}}:");
    let (mut admissions, mut settlements) = (Vec::new(), 0);
    for line in received.lines() {
        let words: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        let [command, _hash, keys, first, ..] = words[..] else { continue };
        if !command.eq_ignore_ascii_case("evalsha") || !first.contains(&key) {
            continue;
        }
        match (keys, words.len()) {
            // After the four keys: five arguments, and two for each request. A snapshot has the same keys and one argument.
            ("4", length @ 14..) => admissions.push((length - 12) / 2),
            ("2", _) if words.get(4).is_some_and(|key| key.ends_with(":out")) => settlements += 1,
            _ => {}
        }
    }
    (admissions, settlements)
}

/// The orders of the requests in the admissions of a sale, among the commands that were received.
pub fn requested_orders(sale: SaleId, received: &str) -> Vec<String> {
    let key = format!(":{{{sale}}}:");
    let mut orders = Vec::new();
    for line in received.lines() {
        let words: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        if let [command, _hash, "4", first, ..] = words[..]
            && command.eq_ignore_ascii_case("evalsha")
            && first.contains(&key)
        {
            // After the keys and five arguments: users and orders.
            orders.extend(words.iter().skip(13).step_by(2).map(|order| (*order).to_owned()));
        }
    }
    orders
}

/// A call takes so long that everyone who tries at the same time waits for the next one.
const SLOW: Fault = Fault::Delay(Duration::from_millis(3));

/// A node, and the proxy through which it reaches Redis.
async fn start(kind: Kind) -> (Nodes, Proxy) {
    let redis = redis::start().unwrap();
    let proxy = Proxy::start(redis.address()).await.unwrap();
    let storage = Storage::on(kind);
    let mut command = command(&storage);
    command.args(["--tier", "shared", "--redis", &redis::url(proxy.address().port())]);
    let nodes = Nodes { redis, storages: vec![storage], shops: vec![Shop::run(command)] };
    (nodes, proxy)
}

/// Requests that arrive together are one batch. A batch of accepted orders costs Redis one admission and its settlement, a batch of
/// refused requests one admission. Redis itself counts the batches: for each with an order, the admission appends one entry to the outbox.
async fn a_batch_costs_one_call_of_the_gate(kind: Kind) {
    /// Buyers who try at the same time, and how often refused ones try.
    const CROWD: usize = 10;
    const TRIES: u64 = 20;
    let (nodes, proxy) = start(kind).await;
    let (redis, shop) = (&nodes.redis, &nodes.shops[0]);
    let (owners, others) = (shop.log_in(0, count(600, 150)).await, shop.log_in(1000, 50).await);
    let sale = nodes.create_sale(owners.len() as u32).await;
    let history = Arc::new(Recorder::default());
    let monitor = Monitor::start(redis, nodes.storages[0].path()).await;
    proxy.set(SLOW);

    let before = ["evalsha", "xadd", "xack"].map(|command| executed(redis, command));
    for crowd in owners.chunks(CROWD) {
        nodes.storm(&history, sale, crowd, 1).await;
    }
    assert_eq!(history.count(Response::Created), owners.len());
    let outbox = format!("stampede:*:{{{sale}}}:out");
    until("all entries are settled", async || entries(redis, &outbox) == 0).await;
    let (admissions, settlements) = admissions_and_settlements(sale, &monitor.received("accepted").await);
    let after = ["evalsha", "xadd", "xack"].map(|command| executed(redis, command));
    let [calls, batches, settled] = [0, 1, 2].map(|n: usize| after[n] - before[n]);
    assert_eq!(admissions.iter().sum::<usize>(), owners.len(), "every request is in one call: {admissions:?}");
    assert!(admissions.len() as f64 <= 1.2 * batches, "{batches} batches cost {} admissions", admissions.len());
    assert!(settlements as f64 <= batches && settled == batches, "{batches} batches cost {settlements} settlements");
    assert!(calls >= (admissions.len() + settlements) as f64, "{calls} calls of scripts");
    assert!(admissions.len() <= owners.len() / 2, "orders were not batched: {admissions:?}");

    let batches = async || shop.metric("stampede_gate_admit_seconds_count").await;
    let before = batches().await;
    nodes.storm(&history, sale, &others, TRIES).await;
    let refused = history.count(Response::SoldOut);
    assert_eq!(refused, others.len() * TRIES as usize, "nothing is left for them");
    let (all, _) = admissions_and_settlements(sale, &monitor.received("refused").await);
    let admissions = &all[admissions.len()..];
    assert_eq!(admissions.iter().sum::<usize>(), refused, "every request is in one call: {admissions:?}");
    assert!(admissions.len() as f64 <= batches().await - before, "a batch costs one admission");
    assert!(admissions.len() <= refused / 2, "refused requests were not batched: {admissions:?}");
    assert_eq!(executed(redis, "xadd"), after[1], "a refusal leaves nothing in the outbox");
    proxy.set(Fault::None);
    drop(monitor);
    assert_eq!(nodes.verify(&history, sale).await, owners.len());
}

/// Attempts of one buyer at the same time wait for each other in the node: no two of them are in one call.
async fn attempts_of_one_buyer_reach_the_gate_one_by_one(kind: Kind) {
    const ATTEMPTS: usize = 20;
    let (nodes, proxy) = start(kind).await;
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Arc::new(Recorder::default());
    let monitor = Monitor::start(&nodes.redis, nodes.storages[0].path()).await;
    proxy.set(SLOW);
    for buyer in &buyers {
        nodes.storm(&history, sale, &vec![buyer.clone(); ATTEMPTS], 1).await;
    }
    assert_eq!((history.count(Response::Created), history.count(Response::Already)), (2, 2 * (ATTEMPTS - 1)));
    let (admissions, _) = admissions_and_settlements(sale, &monitor.received("bought").await);
    assert_eq!(admissions, [1; 2 * ATTEMPTS]);
    proxy.set(Fault::None);
    drop(monitor);
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

on_each_database!(servers: a_batch_costs_one_call_of_the_gate, attempts_of_one_buyer_reach_the_gate_one_by_one);

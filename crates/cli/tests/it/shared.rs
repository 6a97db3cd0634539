//! The tier `shared`: several node processes, one gate in Redis, a database server.
//!
//! - here: what nodes sell together, and their start; [`gate_calls`]: what a batch costs Redis; [`two_shops`]: two ledgers on one Redis

pub mod gate_calls;
mod two_shops;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::{Clock as _, OrderId, Sale, SaleId, SalePhase, SystemClock, UserId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_proof::servers::free_port;
use stampede_testkit::process::was_killed_by;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Process, Proxy, Server, count, redis, until};
use tokio::sync::Barrier;

use crate::proof::{run_without_violation, small_bench, stampede};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, ledger, log_in, verify, violations};

const SIGKILL: i32 = 9;

/// Nodes with separate data directories on one database and one Redis.
pub struct Nodes {
    pub redis: Server,
    pub storages: Vec<Storage>,
    pub shops: Vec<Shop>,
}

/// A node's command.
pub fn node(storage: &Storage, redis: &Server) -> Command {
    let mut command = command(storage);
    command.args(["--redis", &redis::url(redis.port())]).env("STAMPEDE__TIER", "shared");
    command
}

impl Nodes {
    pub fn start(kind: Kind, count: usize) -> Self {
        Self::start_with(kind, count, |_, command| command)
    }

    /// Starts nodes whose commands are changed by `change`, which gets the number of the node.
    pub fn start_with(kind: Kind, count: usize, change: impl Fn(usize, Command) -> Command) -> Self {
        Self::start_on(kind, redis::start().unwrap(), count, change)
    }

    /// Starts nodes on this Redis.
    pub fn start_on(kind: Kind, redis: Server, count: usize, change: impl Fn(usize, Command) -> Command) -> Self {
        let server = kind.server().unwrap();
        let url = kind.create_database(server, server.port());
        let storages: Vec<_> = (0..count).map(|_| Storage::with(Some(url.clone()))).collect();
        let shops =
            storages.iter().enumerate().map(|(n, storage)| Shop::run(change(n, node(storage, &redis)))).collect();
        Self { redis, storages, shops }
    }

    /// The command of a further node.
    pub fn node(&self, storage: &Storage) -> Command {
        node(storage, &self.redis)
    }

    /// Creates a sale on the first node, and waits until every node has it.
    pub async fn create_sale(&self, stock: u32) -> SaleId {
        let sale = self.shops[0].create_sale(stock).await;
        self.wait_until_open(sale).await;
        sale
    }

    /// Creates a sale in which this user has a mark and no order, as after the death of a node and the loss of its entry in the outbox.
    /// Returns when the sale is over.
    pub async fn create_ended_sale_with_mark(&self, user: UserId, order: OrderId) -> SaleId {
        let begin = SystemClock.now();
        let sale = self.shops[0].create_sale_between(1, begin, begin.plus(Duration::from_secs(3))).await;
        self.wait_until_open(sale).await;
        let live = redis::ask(self.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:live")]).unwrap();
        let (user, order) = (user.to_string(), order.to_string());
        redis::ask(self.redis.port(), &["hset", live.trim(), &user, &order]).unwrap();
        for shop in &self.shops {
            until("the sale is over", async || {
                shop.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap().text("state") == "ended"
            })
            .await;
        }
        sale
    }

    /// Creates a sale as soon as that is possible: just after Redis has restarted, it fails for a moment.
    pub async fn create_sale_after_outage(&self, stock: u32) -> SaleId {
        let (begin, mut sale) = (SystemClock.now(), None);
        until("a sale can be created", async || {
            let made = self.shops[0].try_create_sale(stock, begin, begin.plus(Duration::from_secs(3600))).await;
            sale = (made.status == 201).then(|| made.text("id").parse().unwrap());
            sale.is_some()
        })
        .await;
        let sale = sale.unwrap();
        self.wait_until_open(sale).await;
        sale
    }

    /// Waits until every node has the sale open in the gate. After a rebuild by one node the others follow.
    pub async fn wait_until_open(&self, sale: SaleId) {
        let path = format!("/admin/v1/sales/{sale}/gate");
        for shop in &self.shops {
            shop.wait_for_sale(sale).await;
            until("the sale is open on every node", async || {
                shop.client().await.get(&path, TOKEN).await.unwrap().status == 200
            })
            .await;
        }
    }

    /// Waits until every node says that it is ready.
    pub async fn wait_until_ready(&self) {
        for shop in &self.shops {
            until("the node is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200)
                .await;
        }
    }

    pub async fn verify(&self, history: &Recorder, sale: SaleId) -> usize {
        self.wait_until_open(sale).await;
        let nodes: Vec<&Shop> = self.shops.iter().collect();
        verify(history, &self.storages[0], &nodes, sale).await
    }

    /// Like [`Self::verify`], and returns the violations.
    pub async fn violations(&self, history: &Recorder, sale: SaleId) -> Vec<String> {
        self.wait_until_open(sale).await;
        let nodes: Vec<&Shop> = self.shops.iter().collect();
        violations(history, &self.storages[0], &nodes, sale).await
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.shops.iter().map(|shop| shop.address).collect()
    }

    /// Every buyer tries on every node, `tries` times.
    pub async fn storm(&self, history: &Arc<Recorder>, sale: SaleId, buyers: &[Buyer], tries: u64) {
        storm(&self.addresses(), history, sale, buyers, tries).await;
    }
}

/// Every buyer tries on every node, `tries` times, or until the node is down.
pub async fn storm(nodes: &[SocketAddr], history: &Arc<Recorder>, sale: SaleId, buyers: &[Buyer], tries: u64) {
    let pairs = buyers.iter().flat_map(|buyer| nodes.iter().map(|&address| (buyer.clone(), address, Duration::ZERO)));
    storm_of(pairs.collect(), history, sale, tries).await;
}

/// The same in random order, with a random pause before each first attempt.
async fn seeded_storm(nodes: &Nodes, history: &Arc<Recorder>, sale: SaleId, buyers: &[Buyer], tries: u64, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let longest_us = rng.random_range(1..100_000);
    let mut pairs: Vec<_> = buyers
        .iter()
        .flat_map(|buyer| nodes.addresses().into_iter().map(|address| (buyer.clone(), address)))
        .map(|(buyer, address)| (buyer, address, Duration::from_micros(rng.random_range(0..longest_us))))
        .collect();
    pairs.shuffle(&mut rng);
    storm_of(pairs, history, sale, tries).await;
}

/// Attempts of buyers on nodes, each after a pause from a common start.
async fn storm_of(pairs: Vec<(Buyer, SocketAddr, Duration)>, history: &Arc<Recorder>, sale: SaleId, tries: u64) {
    let start = Arc::new(Barrier::new(pairs.len()));
    let tasks: Vec<_> = pairs
        .into_iter()
        .map(|(buyer, address, pause)| {
            let (history, start) = (history.clone(), start.clone());
            tokio::spawn(async move {
                let client = Client::connect(address).await;
                start.wait().await;
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                let Ok(mut client) = client else { return };
                for _ in 0..tries {
                    if history.buy(&mut client, sale, &buyer).await.response == Response::Unknown {
                        let Ok(next) = Client::connect(address).await else { return };
                        client = next;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

/// Buyers spread their tries over three nodes: exactly the stock is sold, one to each, and every confirmed order has its row.
async fn three_nodes_sell_exactly_the_stock(kind: Kind) {
    let (buyers, tries, stock) = (count(2000, 120), count(4, 2), count(500, 40) as u32);
    let nodes = Nodes::start(kind, 3);
    let everyone = nodes.shops[0].log_in(0, buyers).await;
    for seed in 0..count(50, 1) {
        eprintln!("{kind:?}, seed {seed}");
        let sale = nodes.create_sale(stock).await;
        let history = Arc::new(Recorder::default());
        seeded_storm(&nodes, &history, sale, &everyone, tries, seed).await;
        assert_eq!(history.count(Response::Created), stock as usize);
        assert_eq!(history.count(Response::Unknown), 0, "without a fault every response is definite");
        assert_eq!(nodes.verify(&history, sale).await, stock as usize);
    }
    for shop in nodes.shops {
        assert!(shop.stop().success());
    }
}

/// One user tries on three nodes at once: one order, and every response names it.
async fn one_user_gets_one_order(kind: Kind) {
    let nodes = Nodes::start(kind, 3);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    for _ in 0..count(20, 2) {
        let sale = nodes.create_sale(5).await;
        let history = Arc::new(Recorder::default());
        let everyone = vec![buyer.clone(); 22];
        nodes.storm(&history, sale, &everyone, 1).await;
        let orders: Vec<_> = history.ended().iter().map(|attempt| attempt.order).collect();
        assert!(orders.iter().all(|order| order.is_some() && *order == orders[0]), "{orders:?}");
        assert_eq!(history.count(Response::Created), 1);
        assert_eq!(nodes.verify(&history, sale).await, 1);
    }
}

/// A node that knows of a new sale, but has not heard that another node has opened it, sells it at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_created_sale_is_sold_by_every_node() {
    let nodes = Nodes::start_with(Kind::Postgres, 1, |_, mut command| {
        command.env("STAMPEDE_FAILPOINTS", "sale.created=pause:2500");
        command
    });
    // This node reads the ledger once a second, and hears nothing in between.
    let port = nodes.redis.port();
    redis::ask(port, &["acl", "setuser", "deaf", "on", ">word", "~*", "&*", "+@all", "-subscribe"]).unwrap();
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut second = command(&storage);
    second.args(["--tier", "shared", "--redis", &format!("redis://deaf:word@127.0.0.1:{port}/")]);
    let second = Shop::run(second);
    let buyer = second.log_in(0, 1).await.remove(0);
    let mut client = second.client().await;
    let create = nodes.shops[0].create_sale(5);
    let is_known = until("the second node knows of the sale", async || {
        let sales = client.get("/v1/sales", "").await.unwrap().json();
        sales["sales"].as_array().is_some_and(|sales| !sales.is_empty())
    });
    let (sale, _) = tokio::join!(create, is_known);
    let bought = Recorder::default().buy(&mut client, sale, &buyer).await;
    assert_eq!(bought.response, Response::Created);
}

/// Buyers cancel and buy again on other nodes, while others try to get the same stock.
async fn cancelled_orders_can_be_bought_again(kind: Kind) {
    /// For each order that is bought again.
    const PATIENCE: Duration = Duration::from_millis(500);
    let wanted = count(1000, 50);
    let nodes = Nodes::start(kind, 3);
    let buyers = nodes.shops[0].log_in(0, 12).await;
    let sale = nodes.create_sale(4).await;
    let (history, bought_again) = (Arc::new(Recorder::default()), Arc::new(AtomicU64::new(0)));
    let deadline = Instant::now() + Duration::from_secs(10) + PATIENCE * wanted as u32;
    let tasks: Vec<_> = buyers
        .into_iter()
        .enumerate()
        .map(|(n, buyer)| {
            let (history, bought_again) = (history.clone(), bought_again.clone());
            let addresses = nodes.addresses();
            tokio::spawn(async move {
                let mut clients = Vec::new();
                for address in addresses {
                    clients.push(Client::connect(address).await.unwrap());
                }
                let mut has_cancelled = false;
                for round in 0_usize.. {
                    if bought_again.load(Ordering::Relaxed) >= wanted {
                        break;
                    }
                    assert!(Instant::now() < deadline, "{bought_again:?} of {wanted} were bought again");
                    let bought = history.buy(&mut clients[(n + round) % 3], sale, &buyer).await;
                    let Some(order) = bought.order.filter(|_| bought.response == Response::Created) else {
                        assert_eq!(bought.response, Response::SoldOut);
                        continue;
                    };
                    if has_cancelled {
                        bought_again.fetch_add(1, Ordering::Relaxed);
                    }
                    let cancelled = history.cancel(&mut clients[(n + round + 1) % 3], sale, &buyer, order).await;
                    assert_eq!(cancelled.response, Response::Cancelled);
                    has_cancelled = true;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let created = history.count(Response::Created) as u64;
    assert!(created > wanted && bought_again.load(Ordering::Relaxed) >= wanted, "{created} orders");
    assert_eq!(history.count(Response::Cancelled) as u64, created);
    assert!(history.count(Response::SoldOut) > 0, "others tried meanwhile");
    assert_eq!(nodes.verify(&history, sale).await, 0, "every order was cancelled");
}

/// Rounds in which a process dies at a failpoint while buyers try on it and on the first node, until `wanted` of them have died. `dying`
/// changes the command of that process; a process for which `is_idle` holds after the load is not waited for any longer; `recover` then
/// starts what is needed to go on.
pub async fn survives_processes_that_die<T>(
    nodes: &Nodes,
    (failpoint, wanted): (&str, u64),
    dying: impl Fn(Command) -> Command,
    is_idle: impl AsyncFn(SaleId) -> bool,
    recover: impl AsyncFn(&Arc<Recorder>, SaleId, &[Buyer]) -> T,
) {
    let everyone = nodes.shops[0].log_in(0, 60).await;
    let mut died = 0;
    for seed in 0.. {
        if died == wanted {
            break;
        }
        assert!(seed < 4 * wanted + 10, "the failpoint is hardly ever reached");
        let mut rng = StdRng::seed_from_u64(seed);
        let storage = Storage::with(Some(nodes.storages[0].url()));
        let mut command = dying(nodes.node(&storage));
        command.env("STAMPEDE_FAILPOINTS", format!("{failpoint}=abort@{}", rng.random_range(1..3)));
        let mut process = Shop::run(command);
        let sale = nodes.create_sale(30).await;
        // A consumer may have died already, of a message that was delivered once more.
        until("the process shows the sale, or has died", async || {
            process.process.try_wait().unwrap().is_some() || process.shows(sale).await
        })
        .await;
        let history = Arc::new(Recorder::default());
        eprintln!("{failpoint}, seed {seed}");
        storm(&[nodes.shops[0].address, process.address], &history, sale, &everyone, 2).await;
        let mut is_dead = false;
        until("the process has died, or has nothing left to do", async || {
            is_dead = process.process.try_wait().unwrap().is_some();
            is_dead || is_idle(sale).await
        })
        .await;
        // A round in which the failpoint was not reached often enough does not count.
        died += u64::from(is_dead);
        drop(process);
        let _recovered = recover(&history, sale, &everyone).await;
        assert_eq!(nodes.verify(&history, sale).await, 30, "the sale continues until it is sold out");
    }
}

/// A node dies at a failpoint while buyers try on all nodes. The others settle what it has left, and the sale goes on.
async fn survives_a_node_that_dies_at(kind: Kind, failpoint: &str, wanted: u64) {
    let nodes = Nodes::start(kind, 1);
    let (is_idle, recover) = (async |_| true, async |_: &Arc<Recorder>, _: SaleId, _: &[Buyer]| ());
    survives_processes_that_die(&nodes, (failpoint, wanted), |command| command, is_idle, recover).await;
}

async fn survives_a_node_that_dies_after_the_admission(kind: Kind) {
    survives_a_node_that_dies_at(kind, "buy.admitted", count(50, 1)).await;
}

async fn survives_a_node_that_dies_before_the_commit(kind: Kind) {
    survives_a_node_that_dies_at(kind, "record.inserted", count(50, 1)).await;
}

async fn survives_a_node_that_dies_after_the_commit(kind: Kind) {
    survives_a_node_that_dies_at(kind, "record.committed", count(50, 1)).await;
}

async fn survives_a_node_that_dies_before_settling(kind: Kind) {
    survives_a_node_that_dies_at(kind, "outbox.settle", count(20, 1)).await;
}

/// A node is paused after the admission until the other one has settled its entries, and then woken: nothing happens twice.
async fn a_paused_node_does_nothing_twice(kind: Kind) {
    let pause = |n: usize, mut command: Command| {
        if n == 1 {
            // Long enough for SIGSTOP to arrive while an admitted batch is not recorded.
            command.env("STAMPEDE_FAILPOINTS", "buy.admitted=pause:300");
        }
        command
    };
    let nodes = Nodes::start_with(kind, 2, pause);
    let everyone = nodes.shops[0].log_in(0, 20).await;
    let (wanted, mut stopped_in_time) = (count(50, 1), 0);
    for round in 0.. {
        if stopped_in_time == wanted {
            break;
        }
        assert!(round < 2 * wanted + 5, "the node has hardly ever been stopped in time");
        let sale = nodes.create_sale(10).await;
        let history = Arc::new(Recorder::default());
        let tasks: Vec<_> = everyone
            .iter()
            .cloned()
            .map(|buyer| {
                let (history, address) = (history.clone(), nodes.shops[1].address);
                tokio::spawn(async move {
                    let mut client = Client::connect(address).await.unwrap();
                    history.buy(&mut client, sale, &buyer).await;
                })
            })
            .collect();
        let outbox = format!("stampede:*:{{{sale}}}:out");
        until("an admitted batch is in the outbox", async || entries(&nodes.redis, &outbox) > 0).await;
        nodes.shops[1].process.signal("STOP").unwrap();
        until("the node is stopped", async || is_stopped(nodes.shops[1].process.pid())).await;
        // A round in which the node has settled everything itself does not count.
        stopped_in_time += u64::from(entries(&nodes.redis, &outbox) > 0);
        until("the other node has settled it", async || entries(&nodes.redis, &outbox) == 0).await;
        nodes.shops[1].process.signal("CONT").unwrap();
        for task in tasks {
            task.await.unwrap();
        }
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 10);
    }
}

/// Whether a process was stopped by a signal.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The state follows the name, which is in parentheses.
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

/// The number of entries in the streams that match a pattern.
pub fn entries(redis: &Server, pattern: &str) -> u64 {
    let keys = redis::ask(redis.port(), &["keys", pattern]).unwrap();
    keys.lines().map(|key| redis::ask(redis.port(), &["xlen", key]).unwrap().trim().parse::<u64>().unwrap()).sum()
}

/// Edits, sales and cancellations of one node reach the others, and requests for unknown sales do not reach Redis.
async fn changes_reach_every_node(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let [one, other] = &nodes.shops[..] else { unreachable!() };
    let buyers = one.log_in(0, 2).await;
    let sale = nodes.create_sale(1).await;
    let path = format!("/v1/sales/{sale}/orders");
    let buy =
        async |shop: &Shop, buyer: &Buyer| shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
    let edit = async |what: &str| one.admin(&format!("sales/{sale}/{what}"), &Value::Null).await;
    // The gate is shared, so a pause holds on every node as soon as it is confirmed.
    assert_eq!(edit("pause").await.status, 200);
    assert_eq!(buy(other, &buyers[0]).await.text("code"), "paused");
    assert_eq!(edit("resume").await.status, 200);
    let bought = buy(other, &buyers[0]).await;
    assert_eq!(bought.status, 201);
    let again = buy(one, &buyers[0]).await;
    assert_eq!((again.status.as_u16(), again.text("id")), (200, bought.text("id")));
    assert_eq!(buy(one, &buyers[1]).await.text("code"), "sold_out");
    let cancel = format!("/v1/orders/{}/cancel", bought.text("id"));
    let cancelled = one.client().await.post(&cancel, &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!(cancelled.text("status"), "cancelled");
    assert_eq!(buy(other, &buyers[1]).await.status, 201, "the stock is returned at once");

    changes_are_seen_at_once(&nodes.shops, sale).await;
    assert_eq!(edit("end").await.status, 200);
    let owned = buy(one, &buyers[1]).await;
    assert_eq!(owned.status, 200, "the owner gets the order back after the end: {owned:?}");
    assert_eq!(buy(other, &buyers[0]).await.text("code"), "ended");

    // Unknown sales cost the gate nothing, also with ids that might have been made a moment ago.
    let admitted = async || other.metric("stampede_gate_admit_seconds_count").await;
    let before = admitted().await;
    let client = &mut other.client().await;
    for unknown in (1000..1020).chain(sale.get() + 1..=sale.get() + 20) {
        let refused =
            client.post(&format!("/v1/sales/{unknown}/orders"), &buyers[0].token, &Value::Null).await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.text("code")), (404, "no_such_sale".to_owned()));
    }
    assert_eq!(admitted().await, before);
    let rebuilds =
        one.metric("stampede_gate_rebuilds_total").await + other.metric("stampede_gate_rebuilds_total").await;
    assert_eq!(rebuilds, 1.0, "only the first start rebuilds");
}

/// Pauses, resumptions and top-ups of a sale that is sold out, by one node and the other, are in the views of both, well before the next poll, which takes
/// place within half a second to a second.
async fn changes_are_seen_at_once(shops: &[Shop], sale: SaleId) {
    /// Polling alone would keep to it in about half of the rounds.
    const LONGEST: Duration = Duration::from_millis(400);
    let edit = format!("sales/{sale}");
    let mut clients = Vec::new();
    for shop in shops {
        clients.push(shop.client().await);
    }
    let view = async |client: &mut Client| client.get(&format!("/v1/sales/{sale}"), "").await.unwrap().json();
    for round in 0_usize..18 {
        let (kind, member, expected) = match round % 3 {
            0 => ("top-ups", "remaining", json!(round / 3 + 1)),
            1 => ("pause", "state", json!("paused")),
            _ => ("resume", "state", json!("on")),
        };
        let body = if kind == "top-ups" { json!({ "add": 1, "request_id": round.to_string() }) } else { Value::Null };
        let editor = &shops[round % shops.len()];
        let edited = editor.admin(&format!("{edit}/{kind}"), &body).await;
        assert_eq!(edited.status, 200, "{edited:?}");
        let confirmed = Instant::now();
        for client in &mut clients {
            until("the node shows the change", async || view(client).await[member] == expected).await;
        }
        let delay = confirmed.elapsed();
        assert!(delay < LONGEST, "round {round}: {kind} is shown after {delay:?}");
    }
}

/// Three nodes start at once on an empty database and Redis: one of them rebuilds the gate, and a sale that is created on any of them at
/// once is confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_start_together_rebuild_the_gate_once() {
    for round in 0..count(10, 1) {
        let kind = if round % 2 == 0 { Kind::Postgres } else { Kind::MariaDb };
        let (redis, storage) = (redis::start().unwrap(), Storage::on(kind));
        let storages = [(); 3].map(|()| Storage::with(Some(storage.url())));
        let starting = storages.each_ref().map(|storage| {
            let mut command = without_demo(&node(storage, &redis));
            // Longer than the nodes' starts are apart, so that the others find a rebuild that has not loaded the scripts yet.
            command.env("STAMPEDE_FAILPOINTS", "rebuild.begun=pause:150");
            tokio::task::spawn_blocking(|| Shop::run(command))
        });
        let mut shops = Vec::new();
        for shop in starting {
            shops.push(shop.await.unwrap());
        }
        let begin = SystemClock.now();
        let create = async |shop: &Shop| shop.try_create_sale(1, begin, begin.plus(Duration::from_secs(3600))).await;
        let created = tokio::join!(create(&shops[0]), create(&shops[1]), create(&shops[2]));
        for made in [created.0, created.1, created.2] {
            assert_eq!(made.status, 201, "{kind:?}: {made:?}");
        }
        let mut rebuilds = 0.0;
        for shop in &shops {
            rebuilds += shop.metric("stampede_gate_rebuilds_total").await;
        }
        assert_eq!(rebuilds, 1.0, "{kind:?}");
        for shop in shops {
            assert!(shop.stop().success());
        }
    }
}

/// Redis is restarted without its memory: the gate is rebuilt from the ledger, and the sale goes on.
async fn a_gate_that_lost_its_memory_is_rebuilt(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let everyone = nodes.shops[0].log_in(0, 40).await;
    let sale = nodes.create_sale(20).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..15], 1).await;
    assert_eq!(history.count(Response::Created), 15);
    nodes.redis.kill().unwrap();
    nodes.redis.restart().unwrap();
    until("the sale goes on", async || {
        let mut client = nodes.shops[1].client().await;
        history.buy(&mut client, sale, &everyone[20]).await.response == Response::Created
    })
    .await;
    nodes.storm(&history, sale, &everyone, 1).await;
    assert_eq!(nodes.verify(&history, sale).await, 20);
    // A part of the gate is lost.
    let keys = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:live")]).unwrap();
    redis::ask(nodes.redis.port(), &["del", keys.trim()]).unwrap();
    until("owners get their orders back", async || {
        let mut client = nodes.shops[0].client().await;
        history.buy(&mut client, sale, &everyone[20]).await.response == Response::Already
    })
    .await;
    nodes.storm(&history, sale, &everyone, 1).await;
    assert_eq!(nodes.verify(&history, sale).await, 20);
}

/// Redis is not there when the node starts: the node starts, says why it is not ready, and sells once Redis is there.
async fn starts_without_redis(kind: Kind) {
    let redis = redis::start().unwrap();
    redis.kill().unwrap();
    let storage = Storage::on(kind);
    let mut command = node(&storage, &redis);
    // Demonstration data needs a gate.
    command.env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(without_demo(&command));
    let reply = shop.client().await.get("/readyz", "").await.unwrap();
    assert_eq!(reply.status, 503);
    assert!(reply.text("detail").contains("Redis"), "{reply:?}");
    redis.restart().unwrap();
    until("the node is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200).await;
    shop.create_sale(1).await;
    assert!(shop.stop().success());
}

/// The same command without `--demo`.
pub fn without_demo(command: &Command) -> Command {
    let mut plain = Command::new(command.get_program());
    plain.args(command.get_args().filter(|arg| *arg != "--demo"));
    plain.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    plain
}

/// Runs a command that must fail, and returns its error message.
pub fn refused(mut command: Command) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

async fn unsuitable_settings_are_refused(kind: Kind) {
    let redis = redis::start().unwrap();
    let storage = Storage::on(kind);
    let shared_without_redis = || {
        let mut command = command(&storage);
        command.args(["--tier", "shared"]);
        command
    };
    let error = refused(shared_without_redis());
    assert!(error.contains("--redis"), "{error}");
    let error = refused(node(&crate::shop::temporary_storage(), &redis));
    assert!(error.contains("SQLite"), "{error}");

    redis::ask(redis.port(), &["config", "set", "maxmemory-policy", "allkeys-lru"]).unwrap();
    let error = refused(node(&storage, &redis));
    assert!(error.contains("noeviction") && error.contains("allkeys-lru"), "{error}");
    redis::ask(redis.port(), &["config", "set", "maxmemory-policy", "noeviction"]).unwrap();

    // Where CONFIG is forbidden, the operator has to state the policy.
    redis::ask(redis.port(), &["acl", "setuser", "app", "on", ">word", "~*", "&*", "+@all", "-config"]).unwrap();
    let restricted = || {
        let mut command = command(&storage);
        let url = format!("redis://app:word@127.0.0.1:{}/", redis.port());
        command.args(["--tier", "shared", "--redis", &url]);
        command
    };
    let error = refused(restricted());
    assert!(error.contains("assume_noeviction") && !error.contains("word@"), "{error}");
    let mut assuming = restricted();
    assuming.env("STAMPEDE__REDIS__ASSUME_NOEVICTION", "true");
    let shop = Shop::run(assuming);

    // While a node of one tier runs, another tier does not start on the same ledger.
    let error = refused(command(&Storage::with(Some(storage.url()))));
    assert!(error.contains("shared") && error.contains("solo"), "{error}");
    assert!(shop.stop().success());
    let solo = Shop::open(&storage);
    let error = refused(node(&Storage::with(Some(storage.url())), &redis));
    assert!(error.contains("solo"), "{error}");
    assert!(solo.stop().success());
}

/// Without an append-only file, what is in the outbox is lost with Redis. No confirmation depends on it, so the node warns and sells.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_without_an_append_only_file_is_warned_of() {
    for (redis, is_warned_of) in [(redis::start().unwrap(), true), (redis::start_durable().unwrap(), false)] {
        let storage = Storage::on(Kind::Postgres);
        let log = storage.path().join("log");
        let mut command = node(&storage, &redis);
        command.env("STAMPEDE__LOG__LEVEL", "warn").stderr(std::fs::File::create(&log).unwrap());
        let shop = Shop::run(command);
        let (sale, buyer) = (shop.create_sale(1).await, shop.log_in(0, 1).await.remove(0));
        let bought = Recorder::default().buy(&mut shop.client().await, sale, &buyer).await;
        assert_eq!(bought.response, Response::Created);
        assert!(shop.stop().success());
        let log = std::fs::read_to_string(log).unwrap();
        let is_warning =
            |line: &str| line.contains("WARN") && line.contains("Redis does not write an append-only file");
        assert_eq!(log.lines().any(is_warning), is_warned_of, "{log}");
    }
}

/// What one tier has sold the other one knows: the gate in Redis is rebuilt after the tier `solo` has sold.
async fn tiers_take_turns_on_one_ledger(kind: Kind) {
    let redis = redis::start().unwrap();
    let storage = Storage::on(kind);
    let history = Recorder::default();
    let shop = Shop::run(node(&storage, &redis));
    let buyers = shop.log_in(0, 3).await;
    let sale = shop.create_sale(3).await;
    assert!(shop.stop().success());
    for (n, is_shared) in [true, false, true].into_iter().enumerate() {
        let shop = Shop::run(if is_shared { node(&storage, &redis) } else { command(&storage) });
        let mut client = shop.client().await;
        assert_eq!(history.buy(&mut client, sale, &buyers[n]).await.response, Response::Created, "{n}");
        for earlier in &buyers[..n] {
            assert_eq!(history.buy(&mut client, sale, earlier).await.response, Response::Already);
        }
        verify(&history, &storage, &[&shop], sale).await;
        drop(client);
        assert!(shop.stop().success());
    }
}

/// How often a Redis server has executed a command, also in scripts.
fn executed(redis: &Server, command: &str) -> f64 {
    let stats = redis::ask(redis.port(), &["info", "commandstats"]).unwrap();
    let name = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(name.as_str()));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0.0)
}

/// How often a Redis server was called with a script.
pub fn evaluated(redis: &Server) -> f64 {
    executed(redis, "evalsha")
}

/// A node is killed at a random moment and started again, while the others sell.
async fn nodes_are_killed_at_random_moments(kind: Kind) {
    let mut nodes = Nodes::start(kind, 3);
    let everyone = nodes.shops[0].log_in(0, 60).await;
    for seed in 0..count(20, 1) {
        let mut rng = StdRng::seed_from_u64(seed);
        let sale = nodes.create_sale(40).await;
        let history = Arc::new(Recorder::default());
        let delay = Duration::from_micros(rng.random_range(0..60_000));
        let addresses = nodes.addresses();
        let victim = &mut nodes.shops[1].process;
        tokio::join!(storm(&addresses, &history, sale, &everyone, 3), async {
            tokio::time::sleep(delay).await;
            assert!(was_killed_by(victim.kill().unwrap(), SIGKILL));
        });
        nodes.shops[1] = Shop::run(node(&nodes.storages[1], &nodes.redis));
        nodes.shops[1].wait_for_sale(sale).await;
        assert_eq!(nodes.verify(&history, sale).await, 40);
    }
}

/// A rebuild that takes longer than nodes wait for progress is finished by the node that has begun it. Meanwhile no sale is shown as sold
/// out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_rebuild_is_not_begun_again() {
    let (server, redis) = (Kind::Postgres.server().unwrap(), redis::start().unwrap());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let direct = Kind::Postgres.create_database(server, server.port());
    let slow = direct.replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.address().port()));
    let storages = [Storage::with(Some(slow.clone())), Storage::with(Some(slow))];
    let shops = storages.each_ref().map(|storage| Shop::run(node(storage, &redis)));
    let mut sales = Vec::new();
    for _ in 0..count(400, 64) {
        sales.push(shops[0].create_sale(1).await);
    }
    let buyer = shops[0].log_in(0, 1).await.remove(0);
    let rebuilds = async || {
        shops[0].metric("stampede_gate_rebuilds_total").await + shops[1].metric("stampede_gate_rebuilds_total").await
    };
    let before = rebuilds().await;
    proxy.set(Fault::Delay(Duration::from_millis(40)));
    redis::ask(redis.port(), &["script", "flush"]).unwrap();
    until("the rebuild has begun", async || rebuilds().await > before).await;
    let begun = Instant::now();
    let stores = ledger(&Storage::with(Some(direct))).await;
    let is_open = |sale: &Sale| sale.phase == SalePhase::Open;
    let mut views = sales.iter().cycle();
    while !stores.ledger.sales(None).await.unwrap().iter().all(is_open) {
        let path = format!("/v1/sales/{}", views.next().unwrap());
        for shop in &shops {
            let view = shop.client().await.get(&path, "").await.unwrap().json();
            assert_eq!((&view["state"], &view["remaining"]), (&json!("on"), &json!(1)), "{view}");
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "the rebuild does not end");
    }
    assert!(begun.elapsed() > Duration::from_secs(5), "{:?}: this was no long rebuild", begun.elapsed());
    assert_eq!(rebuilds().await, before + 1.0);
    proxy.set(Fault::None);
    for (n, sale) in sales.iter().enumerate().take(10) {
        let path = format!("/v1/sales/{sale}/orders");
        let mut client = shops[n % 2].client().await;
        until("the sale is open again", async || {
            client.post(&path, &buyer.token, &Value::Null).await.unwrap().status == 201
        })
        .await;
    }
}

/// The load test starts its own servers and several nodes, one of which is killed at a time.
#[test]
fn load_test_finds_no_violation() {
    for database in &["postgres", "mariadb"][..count(2, 1) as usize] {
        let mut bench = small_bench(1);
        bench.args(["--tier", "shared", "--nodes", "2", "--private-servers", "--database", database, "--kill"]);
        let report = run_without_violation(bench);
        assert_eq!((&report["tier"], &report["nodes"]), (&json!("shared"), &json!(2)));
        assert_eq!(report["orders"]["other"], json!(0), "every buyer got an order");
    }
}

/// Two free ports in a row; returns the first.
fn free_port_pair() -> u16 {
    loop {
        let port = free_port().unwrap();
        if std::net::TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
}

/// The running processes that have inherited this value in their environment, with their command lines.
pub fn processes_with(value: &str) -> Vec<(u32, String)> {
    let read = |pid: u32, file: &str| std::fs::read(format!("/proc/{pid}/{file}")).ok();
    let of = |entry: std::io::Result<std::fs::DirEntry>| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let has_value =
            read(pid, "environ")?.split(|byte| *byte == 0).any(|variable| variable.ends_with(value.as_bytes()));
        has_value.then(|| Some((pid, String::from_utf8_lossy(&read(pid, "cmdline")?).into_owned())))?
    };
    std::fs::read_dir("/proc").unwrap().filter_map(of).collect()
}

/// The directories of private servers that are named in a command line.
fn server_directories(command_line: &str) -> impl Iterator<Item = PathBuf> {
    let is_directory =
        |path: &&Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"stampede-server-"));
    let words = command_line.split(|c: char| "\0= \"".contains(c));
    words.filter_map(move |word| Path::new(word).ancestors().find(is_directory).map(Path::to_owned))
}

/// One command starts `servers` and two nodes with demonstration data. A purchase is answered with `status` and becomes an order. An
/// interrupt stops everything, and leaves neither a process nor a directory.
pub async fn demo_starts_and_stops_everything(arguments: &[&str], servers: usize, status: u16) {
    let (free, temporary) = (free_port_pair(), tempfile::tempdir().unwrap());
    let mut command = stampede(&["demo", "--port", &free.to_string()]);
    command.args(arguments).env("TMPDIR", temporary.path()).stderr(std::process::Stdio::null());
    let mut demo = Process::start(command).unwrap();
    for n in 0..2 {
        let address =
            demo.wait_for(Duration::from_secs(60), |line| line.trim().strip_prefix("open").map(str::to_owned));
        let expected = format!("http://127.0.0.1:{}/", free + n);
        assert_eq!(address.unwrap().trim(), expected);
    }
    let address = SocketAddr::from(([127, 0, 0, 1], free + 1));
    let mut client = Client::connect(address).await.unwrap();
    let sales = client.get("/v1/sales", "").await.unwrap().json();
    let sales = sales["sales"].as_array().unwrap();
    assert_eq!(sales.len(), 3, "{sales:?}");
    let sale = sales.iter().find(|sale| sale["state"] == "on").unwrap()["id"].as_str().unwrap();
    let buyer = log_in(&mut client, "13800138000").await;
    let bought = client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap();
    assert_eq!(bought.status, status, "{:?}", bought.body);
    let location = bought.header("location").to_owned();
    let mut other = Client::connect(SocketAddr::from(([127, 0, 0, 1], free))).await.unwrap();
    until("the other node shows the order", async || {
        other.get(&location, &buyer.token).await.unwrap().text("status") == "unpaid"
    })
    .await;
    drop((client, other));

    let running = || processes_with(&temporary.path().display().to_string());
    let started = running();
    let directories: BTreeSet<PathBuf> = started.iter().flat_map(|(_, line)| server_directories(line)).collect();
    assert_eq!(directories.len(), servers, "{started:?}");
    assert!(directories.iter().all(|directory| directory.exists()), "{directories:?}");
    demo.signal("INT").unwrap();
    assert!(demo.wait(Duration::from_secs(30)).unwrap().success());
    assert!(Client::connect(address).await.is_err());
    until("no process is left", async || running().is_empty()).await;
    let left: Vec<_> = directories.iter().filter(|directory| directory.exists()).collect();
    assert!(left.is_empty(), "{left:?}");
    let left: Vec<_> = std::fs::read_dir(temporary.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_sells_and_leaves_nothing_behind() {
    demo_starts_and_stops_everything(&["--tier", "shared"], 2, 201).await;
}

on_each_database!(
    servers: three_nodes_sell_exactly_the_stock,
    one_user_gets_one_order,
    cancelled_orders_can_be_bought_again,
    survives_a_node_that_dies_after_the_admission,
    survives_a_node_that_dies_before_the_commit,
    survives_a_node_that_dies_after_the_commit,
    survives_a_node_that_dies_before_settling,
    a_paused_node_does_nothing_twice,
    changes_reach_every_node,
    a_gate_that_lost_its_memory_is_rebuilt,
    starts_without_redis,
    unsuitable_settings_are_refused,
    tiers_take_turns_on_one_ledger,
    nodes_are_killed_at_random_moments
);

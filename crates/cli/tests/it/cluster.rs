//! Nodes of the tier `shared`, or of another one with Redis, with everything around them that can fail: each reaches Redis and the database through proxies of its own,
//! and has a clock that a test can set. Buyers buy and cancel on all nodes while a fault happens.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_core::{Clock as _, Sale, SaleId, SystemClock};
use stampede_proof::check::Rules;
use stampede_proof::history::{Action, Response};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Proxy, Reply, Server, redis, until};
use tokio::task::JoinHandle;

use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, read_only, verify_with};

/// More than [`STOCK`] and what tests add to it, so that every sale sells out in the end.
pub const BUYERS: u64 = 24;
pub const STOCK: u32 = 14;
/// The longest time that any request may take, whatever fails: `buy.answer_timeout_ms` of the nodes is far lower.
pub const MAX_LATENCY: Duration = Duration::from_secs(6);
/// The pause between two attempts of a buyer.
const PACE: Duration = Duration::from_millis(30);
/// How long buyers may need for an answer after a fault has ended.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

type Change = Box<dyn Fn(usize, Command) -> Command + Send + Sync>;

pub struct Cluster {
    pub nodes: Nodes,
    /// The way of each node to Redis.
    pub to_redis: Vec<Proxy>,
    /// The way of each node to the database.
    pub to_database: Vec<Proxy>,
    /// The database without a proxy.
    pub direct: Storage,
    /// The database server, if it is of this test alone.
    pub database: Option<Server>,
    pub buyers: Vec<Buyer>,
    addresses: Arc<RwLock<Vec<SocketAddr>>>,
    change: Change,
}

/// What a cluster runs on.
pub struct Servers {
    pub kind: Kind,
    pub redis: Server,
    /// A database server of this test alone.
    pub database: Option<Server>,
}

impl Servers {
    /// The database server that all tests share, and a Redis without persistence.
    pub fn on(kind: Kind) -> Self {
        Self { kind, redis: redis::start().unwrap(), database: None }
    }

    pub fn with_own_database(kind: Kind) -> Self {
        Self { database: Some(kind.own_server()), ..Self::on(kind) }
    }
}

impl Cluster {
    pub async fn start(kind: Kind, count: usize) -> Self {
        Self::start_with(Servers::on(kind), count, |_, command| command).await
    }

    /// Starts nodes whose commands are changed by `change`, which gets the number of the node.
    pub async fn start_with(
        servers: Servers,
        count: usize,
        change: impl Fn(usize, Command) -> Command + Send + Sync + 'static,
    ) -> Self {
        let Servers { kind, redis, database } = servers;
        let server = database.as_ref().or(kind.server()).unwrap();
        let url = kind.create_database(server, server.port());
        let (mut to_redis, mut to_database, mut storages) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let wire = Proxy::start(server.address()).await.unwrap();
            let behind = url.replace(&format!(":{}/", server.port()), &format!(":{}/", wire.address().port()));
            storages.push(Storage::with(Some(behind)));
            to_database.push(wire);
            to_redis.push(Proxy::start(redis.address()).await.unwrap());
        }
        let nodes = Nodes { redis, storages, shops: Vec::new() };
        let mut cluster = Self {
            nodes,
            to_redis,
            to_database,
            direct: Storage::with(Some(url)),
            database,
            buyers: Vec::new(),
            addresses: Arc::default(),
            change: Box::new(change),
        };
        for n in 0..count {
            cluster.set_clock(n, 0);
            let shop = Shop::run(cluster.node(n));
            cluster.addresses.write().unwrap().push(shop.address);
            cluster.nodes.shops.push(shop);
        }
        cluster.buyers = cluster.nodes.shops[0].log_in(0, BUYERS).await;
        cluster
    }

    /// The command of a node.
    pub fn node(&self, n: usize) -> Command {
        let mut command = command(&self.nodes.storages[n]);
        command
            .args(["--redis", &redis::url(self.to_redis[n].address().port())])
            .env("STAMPEDE__TIER", "shared")
            .env("STAMPEDE_CLOCK_FILE", self.clock_file(n))
            .env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000")
            // Sessions must not expire when the clock jumps.
            .env("STAMPEDE__LOGIN__SESSION_TTL_MS", (24 * 3600 * 1000).to_string())
            // Faults must be survived without it: a rebuild, the outbox and pending releases are enough.
            .env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000")
            .env("STAMPEDE__LOG__LEVEL", "off");
        (self.change)(n, command)
    }

    fn clock_file(&self, n: usize) -> PathBuf {
        self.nodes.storages[n].path().join("clock")
    }

    /// Sets the clock of a node to this many seconds before or after the real time.
    pub fn set_clock(&self, n: usize, offset_s: i64) {
        std::fs::write(self.clock_file(n), (offset_s * 1000).to_string()).unwrap();
    }

    pub fn kill(&mut self, n: usize) {
        self.nodes.shops[n].process.kill().unwrap();
    }

    /// Waits for the end of a node that aborts.
    pub fn wait_for_death(&mut self, n: usize) {
        assert!(!self.nodes.shops[n].process.wait(Duration::from_secs(10)).unwrap().success());
    }

    /// Starts a node again, whose process may be running.
    pub fn restart(&mut self, n: usize) {
        self.run(n, self.node(n));
    }

    /// Starts a node again that aborts at a failpoint.
    pub fn restart_with_failpoint(&mut self, n: usize, failpoint: &str) {
        let mut command = self.node(n);
        command.env("STAMPEDE_FAILPOINTS", failpoint);
        self.run(n, command);
    }

    fn run(&mut self, n: usize, command: Command) {
        // It may have died.
        let _ = self.nodes.shops[n].process.kill();
        self.nodes.shops[n] = Shop::run(command);
        self.addresses.write().unwrap()[n] = self.nodes.shops[n].address;
    }

    /// Runs a command in Redis.
    pub fn ask(&self, command: &[&str]) -> String {
        redis::ask(self.nodes.redis.port(), command).unwrap()
    }

    /// The name of a key of a sale in Redis, if it exists.
    pub fn key(&self, sale: SaleId, part: &str) -> Option<String> {
        let keys = self.ask(&["keys", &format!("stampede:*:{{{sale}}}:{part}")]);
        keys.lines().next().map(str::to_owned).filter(|key| !key.is_empty())
    }

    /// How often the gate was rebuilt by the processes that run now.
    pub async fn rebuilds(&self) -> f64 {
        let mut sum = 0.0;
        for shop in &self.nodes.shops {
            sum += shop.metric("stampede_gate_rebuilds_total").await;
        }
        sum
    }

    pub async fn until_rebuilt(&self, before: f64) {
        until("the gate is rebuilt", async || self.rebuilds().await > before).await;
    }

    /// The sale in the database.
    pub async fn sale(&self, sale: SaleId) -> Sale {
        let ledger = read_only(&self.direct).await;
        let found = ledger.sale(sale).await.unwrap().unwrap();
        ledger.close().await;
        found
    }

    /// Asks for an order that the buyer has or is refused. Not part of a history, so nothing may be sold by it.
    pub async fn ask_again(&self, n: usize, sale: SaleId, buyer: &Buyer) -> Reply {
        let path = format!("/v1/sales/{sale}/orders");
        self.nodes.shops[n].client().await.post(&path, &buyer.token, &Value::Null).await.unwrap()
    }

    /// A new sale that began ten minutes ago and ends in twenty, with buyers who buy and cancel on all nodes. Returns when some have bought.
    pub async fn begin(&self) -> Round {
        let (now, minute) = (SystemClock.now(), Duration::from_secs(60));
        let (begin, end) = (now.minus(10 * minute), now.plus(20 * minute));
        let mut created = None;
        // The gate may be being rebuilt once more after the last fault.
        until("a sale is created", async || {
            let reply = self.nodes.shops[0].try_create_sale(STOCK, begin, end).await;
            created = reply.text("id").parse().ok().filter(|_| reply.status == 201);
            created.is_some()
        })
        .await;
        let sale: SaleId = created.unwrap();
        self.nodes.wait_until_open(sale).await;
        let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
        let tasks = self.buyers.iter().enumerate().map(|(n, buyer)| {
            let (history, stop, addresses) = (history.clone(), stop.clone(), self.addresses.clone());
            tokio::spawn(buy_and_cancel(n, buyer.clone(), sale, addresses, history, stop))
        });
        let round = Round { sale, tasks: tasks.collect(), history, stop };
        until("the sale has begun", async || round.confirmed() > BUYERS as usize / 2).await;
        round
    }

    /// Waits until every node has given a definite answer to a request that was sent after this call, and returns how long that took.
    pub async fn until_selling(&self, round: &Round) -> Duration {
        let all: Vec<usize> = (0..self.nodes.shops.len()).collect();
        self.until_selling_on(&all, round).await
    }

    /// Like [`Self::until_selling`], for some of the nodes.
    pub async fn until_selling_on(&self, nodes: &[usize], round: &Round) -> Duration {
        let started = Instant::now();
        for &n in nodes {
            let (address, buyer) = (self.nodes.shops[n].address, &self.buyers[n]);
            answer(&round.history, || address, round.sale, buyer).await;
        }
        started.elapsed()
    }

    /// Ends the load, sells the rest, and verifies the invariants. Returns the number of live orders: the whole stock is sold.
    pub async fn end(&self, round: Round) -> usize {
        self.end_with(Rules::default(), round).await
    }

    /// Like [`Self::end`], with other rules.
    pub async fn end_with(&self, rules: Rules, mut round: Round) -> usize {
        let (sale, history) = (round.sale, round.history.clone());
        round.stop.store(true, Ordering::Relaxed);
        for task in std::mem::take(&mut round.tasks) {
            tokio::time::timeout(RECOVERY_TIMEOUT, task).await.expect("a buyer gets an answer").unwrap();
        }
        self.nodes.wait_until_open(sale).await;
        let path = format!("/admin/v1/sales/{sale}/gate");
        // Stock of cancelled orders may come back a moment later.
        until("the whole stock is sold", async || {
            let tasks = self.buyers.iter().enumerate().map(|(n, buyer)| {
                let (history, buyer, addresses) = (history.clone(), buyer.clone(), self.addresses.clone());
                tokio::spawn(async move { answer(&history, || pick(&addresses, n), sale, &buyer).await })
            });
            for task in tasks.collect::<Vec<_>>() {
                task.await.unwrap();
            }
            let gate = self.nodes.shops[0].client().await.get(&path, TOKEN).await.unwrap().json();
            gate["marks"].is_u64() && gate["marks"] == gate["cap"]
        })
        .await;
        let shops: Vec<&Shop> = self.nodes.shops.iter().collect();
        let live = verify_with(rules, &history, &self.direct, &shops, sale).await;
        assert_eq!(live, self.sale(sale).await.total as usize, "the whole stock is sold");
        live
    }

    pub fn stop(self) {
        for shop in self.nodes.shops {
            assert!(shop.stop().success());
        }
    }
}

/// A sale and its buyers, who buy and cancel until [`Cluster::end`].
pub struct Round {
    pub sale: SaleId,
    pub history: Arc<Recorder>,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Round {
    /// The number of attempts that were confirmed so far.
    pub fn confirmed(&self) -> usize {
        self.history.ended().iter().filter(|attempt| attempt.response.is_confirmation()).count()
    }

    /// No attempt to buy has taken longer than [`MAX_LATENCY`], whatever has failed.
    pub fn assert_bounded_latency(&self) {
        let attempts = self.history.ended();
        let buys = attempts.iter().filter(|attempt| attempt.action == Action::Buy);
        let slowest = Duration::from_micros(buys.map(|attempt| attempt.end_us - attempt.start_us).max().unwrap_or(0));
        assert!(slowest < MAX_LATENCY, "an attempt took {slowest:?}");
    }

    /// Waits for this many orders that are new.
    pub async fn until_sold(&self, more: usize) {
        let before = self.history.count(Response::Created);
        until("orders are sold", async || self.history.count(Response::Created) >= before + more).await;
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn pick(addresses: &RwLock<Vec<SocketAddr>>, n: usize) -> SocketAddr {
    let addresses = addresses.read().unwrap();
    addresses[n % addresses.len()]
}

/// Buys again and again; two of three buyers cancel. After an answer that is not definite, continues on another node.
async fn buy_and_cancel(
    n: usize,
    buyer: Buyer,
    sale: SaleId,
    addresses: Arc<RwLock<Vec<SocketAddr>>>,
    history: Arc<Recorder>,
    stop: Arc<AtomicBool>,
) {
    let (mut client, mut at) = (None, n);
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(PACE).await;
        let mut connected: Client = match client.take() {
            Some(connected) => connected,
            None => {
                at += 1;
                // The node may be down.
                let Ok(connected) = Client::connect(pick(&addresses, at)).await else { continue };
                connected
            }
        };
        let attempt = history.buy(&mut connected, sale, &buyer).await;
        let order = attempt.order.filter(|_| attempt.response.is_confirmation() && !n.is_multiple_of(3));
        let is_definite = match order {
            Some(order) => history.cancel(&mut connected, sale, &buyer, order).await.response != Response::Unknown,
            None => attempt.response != Response::Unknown,
        };
        client = is_definite.then_some(connected);
    }
}

/// Tries until the answer is definite.
async fn answer(history: &Recorder, address: impl Fn() -> SocketAddr, sale: SaleId, buyer: &Buyer) -> Response {
    let deadline = Instant::now() + RECOVERY_TIMEOUT;
    loop {
        if let Ok(mut client) = Client::connect(address()).await {
            let response = history.buy(&mut client, sale, buyer).await.response;
            if response != Response::Unknown {
                return response;
            }
        }
        assert!(Instant::now() < deadline, "no definite answer in time");
        tokio::time::sleep(PACE).await;
    }
}

//! The tier `shared`: several node processes, one gate in Redis, a database server.

use std::net::SocketAddr;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::{Sale, SaleId, SalePhase};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_proof::servers::free_port;
use stampede_testkit::process::was_killed_by;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Process, Proxy, Server, count, redis, until};
use tokio::sync::Barrier;

use crate::proof::{run_without_violation, small_bench, stampede};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, ledger, verify};

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

    pub async fn verify(&self, history: &Recorder, sale: SaleId) -> usize {
        self.wait_until_open(sale).await;
        let nodes: Vec<&Shop> = self.shops.iter().collect();
        verify(history, &self.storages[0], &nodes, sale).await
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.shops.iter().map(|shop| shop.address).collect()
    }

    /// Every buyer tries on every node, `tries` times.
    pub async fn storm(&self, history: &Arc<Recorder>, sale: SaleId, buyers: &[Buyer], tries: u64) {
        storm(&self.addresses(), history, sale, buyers, tries).await;
    }
}

/// Every buyer tries on every node, `tries` times, or until the node is down.
pub async fn storm(nodes: &[SocketAddr], history: &Arc<Recorder>, sale: SaleId, buyers: &[Buyer], tries: u64) {
    let start = Arc::new(Barrier::new(buyers.len() * nodes.len()));
    let tasks: Vec<_> = buyers
        .iter()
        .flat_map(|buyer| nodes.iter().map(|&address| (buyer.clone(), address)))
        .map(|(buyer, address)| {
            let (history, start) = (history.clone(), start.clone());
            tokio::spawn(async move {
                let client = Client::connect(address).await;
                start.wait().await;
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
    for _ in 0..count(50, 1) {
        let sale = nodes.create_sale(stock).await;
        let history = Arc::new(Recorder::default());
        nodes.storm(&history, sale, &everyone, tries).await;
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

/// Buyers cancel and buy again on other nodes while others try.
async fn cancelled_orders_can_be_bought_again(kind: Kind) {
    let nodes = Nodes::start(kind, 3);
    let buyers = nodes.shops[0].log_in(0, 12).await;
    let sale = nodes.create_sale(4).await;
    let history = Arc::new(Recorder::default());
    let tasks: Vec<_> = buyers
        .into_iter()
        .enumerate()
        .map(|(n, buyer)| {
            let history = history.clone();
            let addresses: Vec<_> = nodes.shops.iter().map(|shop| shop.address).collect();
            tokio::spawn(async move {
                let mut clients = Vec::new();
                for address in addresses {
                    clients.push(Client::connect(address).await.unwrap());
                }
                for round in 0..count(250, 12) as usize {
                    let bought = history.buy(&mut clients[(n + round) % 3], sale, &buyer).await;
                    let Some(order) = bought.order.filter(|_| bought.response.is_confirmation()) else {
                        assert_eq!(bought.response, Response::SoldOut);
                        continue;
                    };
                    let cancelled = history.cancel(&mut clients[(n + round + 1) % 3], sale, &buyer, order).await;
                    assert_eq!(cancelled.response, Response::Cancelled);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(history.count(Response::Created) > 10);
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
    for _ in 0..count(50, 1) {
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
        until("the other node has settled it", async || entries(&nodes.redis, &outbox) == 0).await;
        nodes.shops[1].process.signal("CONT").unwrap();
        for task in tasks {
            task.await.unwrap();
        }
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 10);
    }
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

    // Views are updated by pub/sub, well before the next poll.
    assert_eq!(edit("pause").await.status, 200);
    let view = async |shop: &Shop| shop.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
    let delay = until("the other node shows the pause", async || view(other).await.text("state") == "paused").await;
    assert!(delay < Duration::from_millis(800), "{delay:?}");
    assert_eq!(edit("end").await.status, 200);
    let owned = buy(one, &buyers[1]).await;
    assert_eq!(owned.status, 200, "the owner gets the order back after the end: {owned:?}");
    assert_eq!(buy(other, &buyers[0]).await.text("code"), "ended");

    // Unknown sales cost Redis nothing.
    let admitted = async || other.metric("stampede_gate_admit_seconds_count").await;
    let before = admitted().await;
    let client = &mut other.client().await;
    for unknown in 1000..1020 {
        let refused =
            client.post(&format!("/v1/sales/{unknown}/orders"), &buyers[0].token, &Value::Null).await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.text("code")), (404, "no_such_sale".to_owned()));
    }
    assert_eq!(admitted().await, before);
    let rebuilds =
        one.metric("stampede_gate_rebuilds_total").await + other.metric("stampede_gate_rebuilds_total").await;
    assert_eq!(rebuilds, 1.0, "only the first start rebuilds");
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
fn without_demo(command: &Command) -> Command {
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

/// How often a Redis server was called with a script.
pub fn evaluated(redis: &Server) -> f64 {
    let stats = redis::ask(redis.port(), &["info", "commandstats"]).unwrap();
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0.0)
}

/// A refused request costs Redis one call per batch, and an accepted one that and settling. Besides, calls of the rate limits.
async fn a_batch_costs_one_call_of_the_gate(kind: Kind) {
    let nodes = Nodes::start(kind, 1);
    let buyers = nodes.shops[0].log_in(0, count(400, 150)).await;
    let sale = nodes.create_sale(buyers.len() as u32 / 3).await;
    let history = Arc::new(Recorder::default());
    let calls = || evaluated(&nodes.redis);
    let batches = async || nodes.shops[0].metric("stampede_gate_admit_seconds_count").await;
    let commits = async || nodes.shops[0].metric("stampede_commit_batch_size_count").await;
    let limits = async || nodes.shops[0].metric("stampede_limit_calls_total").await;
    let before = (calls(), batches().await, commits().await, limits().await);
    nodes.storm(&history, sale, &buyers, 3).await;
    let after = (calls(), batches().await, commits().await, limits().await);
    let (batches, commits, limits) = (after.1 - before.1, after.2 - before.2, after.3 - before.3);
    // Besides, one snapshot of each sale a second, and more when the sale changes.
    let background = 60.0;
    assert!(after.0 - before.0 <= batches + commits + limits + background, "{before:?} {after:?}");
    assert!(batches < 3.0 * buyers.len() as f64, "requests were batched");
    assert_eq!(nodes.verify(&history, sale).await, buyers.len() / 3);
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

/// One command starts servers and two nodes with demonstration data, and an interrupt stops everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_starts_and_stops_everything() {
    let free = free_port_pair();
    let mut command = stampede(&["demo", "--tier", "shared", "--port", &free.to_string()]);
    command.stderr(std::process::Stdio::null());
    let mut demo = Process::start(command).unwrap();
    for n in 0..2 {
        let address =
            demo.wait_for(Duration::from_secs(60), |line| line.trim().strip_prefix("open").map(str::to_owned));
        let expected = format!("http://127.0.0.1:{}/", free + n);
        assert_eq!(address.unwrap().trim(), expected);
    }
    let address = SocketAddr::from(([127, 0, 0, 1], free + 1));
    let sales = Client::connect(address).await.unwrap().get("/v1/sales", "").await.unwrap().json();
    assert_eq!(sales["sales"].as_array().map(Vec::len), Some(3), "{sales}");
    demo.signal("INT").unwrap();
    assert!(demo.wait(Duration::from_secs(30)).unwrap().success());
    assert!(Client::connect(address).await.is_err());
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
    a_batch_costs_one_call_of_the_gate,
    nodes_are_killed_at_random_moments
);

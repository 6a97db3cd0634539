//! Runs that the tier passes with every queue. The module of each queue names those of its tests.

use std::collections::HashMap;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Proxy, Server, count, redis, until};

use super::stories::dead_letters_command;
use super::{Consumers, outbox, queued, rabbitmq};
use crate::proof::{run_without_violation, small_bench};
use crate::quarantine::quarantine;
use crate::shared::{Nodes, entries, storm, survives_processes_that_die};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, verify};
use crate::statements::{counting_server, database_statements};

/// Where admitted orders wait until they are recorded.
#[derive(Clone, Copy)]
pub enum Queue<'a> {
    /// In the outbox of the gate in Redis.
    Stream,
    /// In this broker.
    RabbitMq(&'a Server),
}

impl Queue<'_> {
    /// A node that serves buyers and records orders.
    pub fn node(self, command: Command) -> Command {
        match self {
            Self::Stream => queued(command),
            Self::RabbitMq(broker) => rabbitmq::with_broker(broker.port())(command),
        }
    }

    /// Nodes without consumers.
    pub fn start(self, kind: Kind, nodes: usize) -> Nodes {
        match self {
            Self::Stream => super::start(kind, nodes),
            Self::RabbitMq(broker) => rabbitmq::start(kind, nodes, broker),
        }
    }

    /// A Redis as safe as the queue needs it.
    pub fn redis(self) -> Server {
        match self {
            Self::Stream => redis::start_durable().unwrap(),
            Self::RabbitMq(_) => redis::start().unwrap(),
        }
    }

    /// Nodes whose commands are changed by `change`.
    pub fn start_with(self, kind: Kind, nodes: usize, change: impl Fn(Command) -> Command) -> Nodes {
        Nodes::start_on(kind, self.redis(), nodes, |_, command| change(self.node(command)))
    }

    pub fn consumers(self, nodes: &Nodes, count: usize) -> Consumers {
        Consumers::start_with(nodes, count, |command| self.node(command))
    }

    /// The answers to buyers who have an order.
    fn confirmations(self, history: &Recorder) -> usize {
        match self {
            Self::Stream => history.count(Response::Pending),
            Self::RabbitMq(_) => history.count(Response::Pending) + history.count(Response::Already),
        }
    }

    /// Whether all `stock` orders of a sale are recorded.
    pub async fn is_idle(self, nodes: &Nodes, sale: SaleId, stock: usize) -> bool {
        let is_recorded = match self {
            // An entry stays in the outbox until it is recorded.
            Self::Stream => true,
            Self::RabbitMq(_) => rabbitmq::rows(nodes, sale).await == stock,
        };
        is_recorded && entries(&nodes.redis, &outbox(sale)) == 0
    }
}

/// Buyers spread their tries over three nodes, and two other processes record the orders: exactly the stock is sold, one to each, and
/// every accepted order becomes one row.
pub async fn three_nodes_and_two_consumers_sell_exactly_the_stock(queue: Queue<'_>, kind: Kind) {
    let (buyers, stock) = (count(20_000, 150), count(2000, 40) as u32);
    let nodes = queue.start(kind, 3);
    let consumers = queue.consumers(&nodes, 2);
    let everyone = nodes.shops[0].log_in(0, buyers).await;
    for _ in 0..count(3, 1) {
        let sale = nodes.create_sale(stock).await;
        let history = Arc::new(Recorder::default());
        for some in everyone.chunks(500) {
            nodes.storm(&history, sale, some, 1).await;
        }
        assert!(queue.confirmations(&history) >= stock as usize);
        assert_eq!(history.count(Response::Created), 0, "buyers are answered before their orders are recorded");
        assert_eq!(history.count(Response::Unknown), 0, "without a fault every response is definite");
        assert_eq!(nodes.verify(&history, sale).await, stock as usize);
        assert_eq!(entries(&nodes.redis, &outbox(sale)), 0);
    }
    consumers.stop();
    for shop in nodes.shops {
        assert!(shop.stop().success());
    }
}

/// One user tries on three nodes at once: one order, and every response names it, before and after it is recorded.
pub async fn one_user_gets_one_order(queue: Queue<'_>, kind: Kind) {
    let nodes = queue.start(kind, 3);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(5).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &vec![buyer.clone(); 22], 1).await;
    assert_eq!(history.count(Response::Pending), 66, "each is in the queue, and nothing records the order");
    let _consumers = queue.consumers(&nodes, 1);
    until("the order is recorded", async || {
        history.buy(&mut nodes.shops[1].client().await, sale, &buyer).await.response == Response::Already
    })
    .await;
    let orders: Vec<_> = history.ended().iter().map(|attempt| attempt.order).collect();
    assert!(orders.iter().all(|order| order.is_some() && *order == orders[0]), "{orders:?}");
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// An order is shown as pending on every node from the moment it is accepted, to its owner only; then as it is in the ledger.
pub async fn an_accepted_order_is_visible_on_every_node(queue: Queue<'_>, kind: Kind) {
    let nodes = queue.start(kind, 2);
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
            let mut client = Client::connect(address).await.unwrap();
            client.get(&events, &token).await.unwrap()
        })
    };
    let _consumers = queue.consumers(&nodes, 1);
    let stream = String::from_utf8(watching.await.unwrap().body.to_vec()).unwrap();
    let states: Vec<Value> =
        stream.lines().filter_map(|line| line.strip_prefix("data: ")).map(|data| data.parse().unwrap()).collect();
    let states: Vec<&str> = states.iter().map(|state| state["status"].as_str().unwrap()).collect();
    assert_eq!(states, ["pending", "unpaid"], "{stream}");
    assert_eq!(ask(&location, &buyers[0]).await.text("status"), "unpaid");
}

/// With `answer_after = "ledger"` a buyer is answered when another process has recorded the order.
pub async fn buyers_can_wait_for_the_ledger(queue: Queue<'_>, kind: Kind) {
    // The first node records for both. (It needs that for its demonstration data.)
    let nodes = Nodes::start_on(kind, queue.redis(), 2, |n, command| {
        let mut command = queue.node(command);
        command.env("STAMPEDE__QUEUE__ANSWER_AFTER", "ledger").env("STAMPEDE__QUEUE__CONSUME", (n == 0).to_string());
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

/// Raises the limit of open files of this process to what it may be.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

/// Many watchers of orders in the queue cost the database no query each, neither when they begin nor later.
pub async fn watchers_share_their_queries(queue: Queue<'_>, kind: Kind) {
    /// What processes do without watchers.
    const STATEMENTS_PER_S: u64 = 50;
    let watchers = count(10_000, 1000);
    // Each has a connection.
    raise_descriptor_limit();
    let (_server, url) = counting_server(kind).await;
    let (redis, storage) = (queue.redis(), Storage::with(Some(url)));
    let mut node = queue.node(command(&storage));
    node.args(["--redis", &redis::url(redis.port())]).env("STAMPEDE__QUEUE__CONSUME", "false");
    node.env("STAMPEDE__HTTP__MAX_CONNECTIONS", (watchers + 1000).to_string());
    let shops = vec![Shop::run(node)];
    let nodes = Nodes { redis, storages: vec![storage], shops };
    let buyers = nodes.shops[0].log_in(0, watchers).await;
    let sale = nodes.create_sale(watchers as u32).await;
    let history = Arc::new(Recorder::default());
    for some in buyers.chunks(500) {
        nodes.storm(&history, sale, some, 1).await;
    }
    let tokens: HashMap<_, _> = buyers.iter().map(|buyer| (buyer.id, &buyer.token)).collect();
    let (before, started) = (database_statements(kind, &nodes.storages[0]).await, Instant::now());
    let watching: Vec<_> = history
        .ended()
        .into_iter()
        .map(|attempt| {
            let token = tokens[&attempt.user].clone();
            let path = format!("/v1/orders/{}/events?sale={sale}", attempt.order.unwrap());
            let address = nodes.shops[0].address;
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                client.get(&path, &token).await.unwrap()
            })
        })
        .collect();
    until("everyone watches", async || nodes.shops[0].metric("stampede_queue_watched_orders").await == watchers as f64)
        .await;
    let check = async |what: &str, most: u64| {
        let statements = database_statements(kind, &nodes.storages[0]).await - before;
        let elapsed_s = started.elapsed().as_secs() + 1;
        let text = format!("{kind:?}: {what}: {statements} statements in {elapsed_s} s for {watchers} watchers");
        eprintln!("{text}");
        assert!(statements < most + elapsed_s * STATEMENTS_PER_S, "{text}");
    };
    check("everyone watches", watchers / 10).await;
    let _consumers = queue.consumers(&nodes, 1);
    for task in watching {
        let reply = task.await.unwrap();
        assert!(String::from_utf8(reply.body.to_vec()).unwrap().contains("unpaid"));
    }
    // Recording takes several statements for each batch, and on a busy machine batches are small.
    check("everything is recorded", watchers / 2).await;
    assert_eq!(nodes.verify(&history, sale).await, watchers as usize);
}

/// A node or a consumer dies at a failpoint. Others publish and record what it has left.
pub async fn survives_a_process_that_dies_at(queue: Queue<'_>, kind: Kind, failpoint: &str) {
    let nodes = queue.start(kind, 1);
    let is_idle = async |sale| queue.is_idle(&nodes, sale, 30).await;
    let recover = async |history: &Arc<Recorder>, sale: SaleId, everyone: &[Buyer]| {
        let consumers = queue.consumers(&nodes, 1);
        // Those whose node died try again.
        storm(&[nodes.shops[0].address], history, sale, everyone, 1).await;
        consumers
    };
    let dying = |command| queue.node(command);
    survives_processes_that_die(&nodes, (failpoint, count(50, 1)), dying, is_idle, recover).await;
}

/// All nodes, Redis and the broker are killed at once: every accepted order is recorded after the restart.
pub async fn accepted_orders_survive_the_death_of_everything(queue: Queue<'_>, kind: Kind, rounds: u64) {
    for _ in 0..rounds {
        let mut nodes = queue.start(kind, 2);
        let everyone = nodes.shops[0].log_in(0, 60).await;
        let sale = nodes.create_sale(25).await;
        let history = Arc::new(Recorder::default());
        let load = {
            let addresses: Vec<_> = nodes.shops.iter().map(|shop| shop.address).collect();
            let (history, everyone) = (history.clone(), everyone.clone());
            tokio::spawn(async move { storm(&addresses, &history, sale, &everyone, 2).await })
        };
        until("orders are accepted", async || history.count(Response::Pending) > 5).await;
        if let Queue::RabbitMq(broker) = queue {
            broker.kill().unwrap();
        }
        nodes.redis.kill().unwrap();
        for shop in nodes.shops.drain(..) {
            shop.process.signal("KILL").unwrap();
        }
        load.await.unwrap();
        nodes.redis.restart().unwrap();
        if let Queue::RabbitMq(broker) = queue {
            broker.restart().unwrap();
        }
        nodes.shops = nodes.storages.iter().map(|storage| Shop::run(queue.node(nodes.node(storage)))).collect();
        until("the sale goes on", async || {
            let response = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[0]).await.response;
            response != Response::Unknown
        })
        .await;
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 25);
    }
}

/// While the database is away, orders are accepted as fast as before, from the beginning to the end. Everything is recorded afterwards, and
/// nothing is in quarantine or a dead letter: an outage is no error of an order. The database hangs, its connections are cut, or it is killed.
pub async fn selling_goes_on_while_the_database_is_away(queue: Queue<'_>, kind: Kind) {
    let server = kind.own_server();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let url = kind.create_database(&server, proxy.address().port());
    let (storage, redis) = (Storage::with(Some(url)), redis::start_durable().unwrap());
    let node = |storage: &Storage| {
        let mut command = queue.node(command(storage));
        command.args(["--redis", &redis::url(redis.port())]);
        command
    };
    let shop = Shop::run(node(&storage));
    let everyone = shop.log_in(0, 40).await;
    for seed in 0..count(5, 1) {
        // Sessions and the sale are known to the node before the database is away.
        let known: usize = StdRng::seed_from_u64(seed).random_range(1..6);
        // `None`: the database is killed.
        let fault = [Some(Fault::Hang), Some(Fault::Cut), None][seed as usize % 3];
        eprintln!("{kind:?}, seed {seed}: the database is away after {known} orders: {fault:?}");
        let sale = shop.create_sale(20).await;
        let history = Arc::new(Recorder::default());
        storm(&[shop.address], &history, sale, &everyone[..known], 1).await;
        match fault {
            Some(fault) => proxy.set(fault),
            None => server.kill().unwrap(),
        }
        if fault == Some(Fault::Cut) {
            proxy.cut_all();
        }
        let (started, away) = (Instant::now(), Duration::from_secs(count(30, 3)));
        // What is left is sold at equal intervals, the last of it shortly before the database is back; then others ask.
        let wanting = &everyone[known..20];
        let interval = away / wanting.len() as u32;
        let buy = async |buyer: &Buyer, expected: Response| {
            let asked = Instant::now();
            let attempt = history.buy(&mut shop.client().await, sale, buyer).await;
            let (since, took) = (started.elapsed(), asked.elapsed());
            assert_eq!(attempt.response, expected, "after {since:?}");
            assert!(took < Duration::from_secs(1), "{took:?}, after {since:?}");
        };
        for (n, buyer) in (0_u32..).zip(wanting) {
            tokio::time::sleep_until((started + interval * n).into()).await;
            buy(buyer, Response::Pending).await;
        }
        for buyer in everyone[20..].iter().cycle().take_while(|_| started.elapsed() < away) {
            buy(buyer, Response::SoldOut).await;
        }
        let probe = async || shop.client().await.get("/readyz", "").await.unwrap();
        assert_eq!(probe().await.status, 200, "load balancers send buyers");
        match fault {
            Some(_) => proxy.set(Fault::None),
            None => server.restart().unwrap(),
        }
        until("the database is used again", async || probe().await.body == "ready\n").await;
        storm(&[shop.address], &history, sale, &everyone, 1).await;
        assert_eq!(verify(&history, &storage, &[&shop], sale).await, 20);
        assert_eq!(shop.metric("stampede_quarantined_total").await, 0.0);
        assert_eq!(quarantine(&shop).await, Vec::<Value>::new());
        assert_eq!(dead_letters(&shop).await, Vec::<String>::new());
        if matches!(queue, Queue::RabbitMq(_)) {
            assert_eq!(shop.metric("stampede_queue_parked_total").await, 0.0);
        }
    }
}

/// While the database hangs, owners who ask again, or look at their orders, are refused at once: only the database knows whether an order was
/// cancelled. Buyers without an order are answered as fast as before.
pub async fn owners_are_refused_at_once_while_the_database_hangs(queue: Queue<'_>, kind: Kind) {
    const AT_ONCE: Duration = Duration::from_secs(2);
    let server = kind.server().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let url = kind.create_database(server, proxy.address().port());
    let (storage, redis) = (Storage::with(Some(url)), queue.redis());
    let mut node = queue.node(command(&storage));
    node.args(["--redis", &redis::url(redis.port())]);
    let shop = Shop::run(node);
    let buyers = shop.log_in(0, 3).await;
    let (sale, history) = (shop.create_sale(3).await, Recorder::default());
    let buy = async |buyer: &Buyer| {
        let asked = Instant::now();
        let attempt = history.buy(&mut shop.client().await, sale, buyer).await;
        (attempt, asked.elapsed())
    };
    let owner = &buyers[0];
    let bought = buy(owner).await.0;
    assert_eq!(bought.response, Response::Pending);
    let path = format!("/v1/orders/{}?sale={sale}", bought.order.unwrap());

    proxy.set(Fault::Hang);
    // With this request the node notices it.
    assert_eq!(buy(owner).await.0.response, Response::Unknown);
    until("the breaker is open", async || shop.metric("stampede_ledger_breaker_open").await == 1.0).await;
    let (again, took) = buy(owner).await;
    assert!(again.response == Response::Unknown && took < AT_ONCE, "{again:?} after {took:?}");
    let asked = Instant::now();
    let shown = shop.client().await.get(&path, &owner.token).await.unwrap();
    assert_eq!((shown.status.as_u16(), shown.header("retry-after")), (503, "1"));
    assert!(asked.elapsed() < AT_ONCE, "{:?}", asked.elapsed());
    for buyer in &buyers[1..] {
        let (new, took) = buy(buyer).await;
        assert!(new.response == Response::Pending && took < Duration::from_secs(1), "{new:?} after {took:?}");
    }

    proxy.set(Fault::None);
    until("the owner gets the order", async || buy(owner).await.0.response.is_confirmation()).await;
    assert_eq!(shop.client().await.get(&path, &owner.token).await.unwrap().status, 200);
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 3);
}

/// The ids of the dead letters, oldest first.
pub async fn dead_letters(shop: &Shop) -> Vec<String> {
    let listed = shop.client().await.get("/admin/v1/dead-letters", TOKEN).await.unwrap();
    assert_eq!(listed.status, 200, "{:?}", listed.body);
    let letters = listed.json()["dead_letters"].as_array().unwrap().clone();
    letters.iter().map(|letter| letter["id"].as_str().unwrap().to_owned()).collect()
}

/// What administrators did with a target such as `order 12`, newest first: the action and its outcome.
pub async fn audit(shop: &Shop, target: &str) -> Vec<(String, String)> {
    let path = format!("/admin/v1/audit?target={}", target.replace(' ', "%20"));
    let log = shop.client().await.get(&path, TOKEN).await.unwrap().json();
    let text = |action: &Value, member: &str| action[member].as_str().unwrap_or_default().to_owned();
    log["actions"].as_array().unwrap().iter().map(|action| (text(action, "action"), text(action, "outcome"))).collect()
}

/// Dead letters of a sale that can be read now, each with one order, are recorded when an operator retries them, by command and by
/// request.
pub async fn retried_dead_letters_are_recorded(nodes: &Nodes, sale: SaleId) {
    let shop = &nodes.shops[0];
    let letters = dead_letters(shop).await;
    assert_eq!(letters.len(), 2);
    assert_eq!(rabbitmq::rows(nodes, sale).await, 0, "nothing is recorded without an operator");
    let (done, text) = dead_letters_command(shop, &["retry", &letters[0]]);
    assert!(done && text.contains("queued"), "{text}");
    until("the first one is recorded", async || rabbitmq::rows(nodes, sale).await == 1).await;
    assert_eq!(dead_letters(shop).await, letters[1..]);
    let retried = shop.admin(&format!("dead-letters/{}/retry", letters[1]), &Value::Null).await;
    assert_eq!((retried.status.as_u16(), retried.text("outcome").as_str()), (200, "queued"));
    until("both are recorded", async || rabbitmq::rows(nodes, sale).await == 2).await;
    assert_eq!(dead_letters(shop).await, Vec::<String>::new(), "they are no dead letters again");
    for letter in &letters {
        let actions = audit(shop, &format!("dead letter {letter}")).await;
        assert_eq!(actions, [("retry_dead_letter".to_owned(), "done".to_owned())]);
        assert!(!dead_letters_command(shop, &["retry", letter]).0, "once");
    }
}

/// The load test starts its own servers and several nodes, one of which is killed at a time.
pub fn load_test_finds_no_violation(arguments: &[&str]) {
    let mut bench = small_bench(1);
    bench.args(["--tier", "queued", "--nodes", "2", "--private-servers", "--kill"]).args(arguments);
    let report = run_without_violation(bench);
    assert_eq!((&report["tier"], &report["nodes"]), (&json!("queued"), &json!(2)));
    assert_eq!(report["orders"]["other"], json!(0), "every buyer got an order");
    let (messages, orders) = (&report["messages"]["messages"], &report["messages"]["orders"]);
    assert!(
        orders.as_u64() >= report["orders"]["count"].as_u64() && messages.as_u64() > Some(0),
        "{messages} {orders}"
    );
    assert!(report["messages"]["per_order"].as_f64().is_some_and(|each| each > 0.0 && each <= 1.0), "{report:#}");
}

/// The orders that wait in the queue are recorded by one consumer, and their rows are inserted once more without anything else.
pub fn drain_is_compared_with_raw_inserts(arguments: &[&str]) {
    let mut bench = small_bench(1);
    bench.args(["--tier", "queued", "--private-servers", "--drain"]).args(arguments);
    let report = run_without_violation(bench);
    let drain = &report["drain"];
    let accepted = report["orders"]["count"].as_u64();
    assert!(accepted >= Some(400) && drain["orders"].as_u64() >= accepted, "{report:#}");
    let of =
        |name: &str| drain[name].as_f64().filter(|value| *value > 0.0).unwrap_or_else(|| panic!("{name}: {drain}"));
    assert!((of("vs_raw") - of("per_s") / of("raw_per_s")).abs() < 1e-6 && of("batch") >= 1.0, "{drain}");
}

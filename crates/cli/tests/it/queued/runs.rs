//! Runs that the tier passes with every queue. The module of each queue names those of its tests.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, count, redis, until};

use super::{Consumers, outbox, queued, rabbitmq};
use crate::proof::{run_without_violation, small_bench};
use crate::shared::{Nodes, entries, storm, survives_processes_that_die};
use crate::shop::{Buyer, Kind, Shop, Storage, command, verify};

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
    fn node(self, command: Command) -> Command {
        match self {
            Self::Stream => queued(command),
            Self::RabbitMq(broker) => rabbitmq::with_broker(broker.port())(command),
        }
    }

    /// Nodes without consumers.
    fn start(self, kind: Kind, nodes: usize) -> Nodes {
        match self {
            Self::Stream => super::start(kind, nodes),
            Self::RabbitMq(broker) => rabbitmq::start(kind, nodes, broker),
        }
    }

    fn consumers(self, nodes: &Nodes, count: usize) -> Consumers {
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
    async fn is_idle(self, nodes: &Nodes, sale: SaleId, stock: usize) -> bool {
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

/// While the database is away, buyers are answered as fast as before, and everything is recorded afterwards.
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
    let sale = shop.create_sale(20).await;
    let history = Arc::new(Recorder::default());
    // Sessions and the sale are known to the node.
    storm(&[shop.address], &history, sale, &everyone[..1], 1).await;
    proxy.set(Fault::Cut);
    proxy.cut_all();
    let (started, away) = (Instant::now(), Duration::from_secs(count(30, 3)));
    // The first nineteen get what is left; then those who have nothing ask until the database is back.
    let rest = everyone[20..].iter().cycle();
    for buyer in everyone[1..20].iter().chain(rest).take_while(|_| started.elapsed() < away) {
        let asked = Instant::now();
        let attempt = history.buy(&mut shop.client().await, sale, buyer).await;
        assert!(matches!(attempt.response, Response::Pending | Response::SoldOut), "{attempt:?}");
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    }
    assert!(history.count(Response::Pending) >= 19);
    proxy.set(Fault::None);
    until("the database is used again", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200)
        .await;
    storm(&[shop.address], &history, sale, &everyone, 1).await;
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 20);
    assert_eq!(shop.metric("stampede_quarantined_total").await, 0.0);
}

/// The load test starts its own servers and several nodes, one of which is killed at a time.
pub fn load_test_finds_no_violation(arguments: &[&str]) {
    let mut bench = small_bench(1);
    bench.args(["--tier", "queued", "--nodes", "2", "--private-servers", "--kill"]).args(arguments);
    let report = run_without_violation(bench);
    assert_eq!((&report["tier"], &report["nodes"]), (&json!("queued"), &json!(2)));
    assert_eq!(report["orders"]["other"], json!(0), "every buyer got an order");
}

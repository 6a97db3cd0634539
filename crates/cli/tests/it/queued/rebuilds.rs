//! The gate is rebuilt while accepted orders are in the queue.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_core::SalePhase;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, redis, until};

use super::rabbitmq::{BROKER, consumers, with_broker, without_consumer};
use super::runs::Queue;
use super::stories::{phase, rebuild};
use super::{Consumers, outbox, without_consumer as without_stream_consumer};
use crate::cluster::{Cluster, Servers};
use crate::recovery::rebuilds::{rebuild_at_once, sleep_in_a_rebuild};
use crate::shared::{Nodes, entries};
use crate::shop::Kind;

/// Redis loses everything while accepted orders are in RabbitMQ and no other process records them. Returns the violations.
async fn lose_redis_with_orders_in_the_broker(planted_bug: &str) -> Vec<String> {
    let nodes = Nodes::start_on(Kind::Postgres, redis::start().unwrap(), 2, |n, command| {
        let mut command = without_consumer(BROKER.port())(n, command);
        command.env("STAMPEDE_PLANTED_BUGS", planted_bug);
        command
    });
    let everyone = nodes.shops[0].log_in(0, 25).await;
    let sale = nodes.create_sale(25).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..15], 1).await;
    assert!(history.count(Response::Pending) >= 15);
    nodes.redis.kill().unwrap();
    nodes.redis.restart().unwrap();
    until("the sale goes on", async || {
        let response = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[24]).await.response;
        response != Response::Unknown
    })
    .await;
    // The rest of the stock is sold to others.
    nodes.storm(&history, sale, &everyone[15..], 1).await;
    let _consumers = consumers(&nodes, 1, &BROKER);
    nodes.violations(&history, sale).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_that_does_not_wait_for_the_broker_is_detected() {
    assert_eq!(lose_redis_with_orders_in_the_broker("").await, Vec::<String>::new());
    let violations = lose_redis_with_orders_in_the_broker("skip-drain").await.join("\n");
    assert!(violations.contains("was confirmed and is rejected"), "{violations}");
}

/// How long an admission of the second node takes, and until when its order can be confirmed: long enough for a rebuild in between.
const SLOW_ADMISSION_MS: u64 = 3500;
const ACCEPT_WITHIN_MS: u64 = 5000;

/// Redis loses everything while the second node has admitted an order and has not published it. The first node rebuilds the gate meanwhile.
/// Returns whether the order was accepted, and the violations.
async fn lose_redis_during_an_admission(planted_bug: &str) -> (bool, Vec<String>) {
    let nodes = Nodes::start_on(Kind::Postgres, redis::start().unwrap(), 2, |n, command| {
        let mut command = without_consumer(BROKER.port())(n, command);
        command.env("STAMPEDE_PLANTED_BUGS", planted_bug);
        command.env("STAMPEDE__QUEUE__ACCEPT_WITHIN_MS", ACCEPT_WITHIN_MS.to_string());
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", (2 * ACCEPT_WITHIN_MS).to_string());
        if n == 1 {
            command.env("STAMPEDE_FAILPOINTS", format!("buy.admitted=pause:{SLOW_ADMISSION_MS}"));
        }
        command
    });
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    let buying = {
        let (history, buyer, address) = (history.clone(), buyers[0].clone(), nodes.shops[1].address);
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            history.buy(&mut client, sale, &buyer).await.response
        })
    };
    until("the order is admitted", async || entries(&nodes.redis, &outbox(sale)) == 1).await;
    nodes.redis.kill().unwrap();
    nodes.redis.restart().unwrap();
    let is_accepted = buying.await.unwrap() == Response::Pending;
    // Another buyer tries to get the same item.
    until("the sale goes on", async || {
        let response = history.buy(&mut nodes.shops[0].client().await, sale, &buyers[1]).await.response;
        response != Response::Unknown
    })
    .await;
    let same = |command: Command| {
        let mut command = with_broker(BROKER.port())(command);
        command.env("STAMPEDE__QUEUE__ACCEPT_WITHIN_MS", ACCEPT_WITHIN_MS.to_string());
        command
    };
    let _consumers = Consumers::start_with(&nodes, 1, same);
    (is_accepted, nodes.violations(&history, sale).await)
}

/// An order that is confirmed while a rebuild goes on is recorded before its sale is opened again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_that_does_not_wait_for_late_confirms_is_detected() {
    let mut accepted = 0;
    for attempt in 0..4 {
        let (is_accepted, violations) = lose_redis_during_an_admission("").await;
        assert_eq!(violations, Vec::<String>::new());
        // On a machine that is busy, the confirm may be too late.
        accepted += u32::from(is_accepted);
        if accepted > 0 {
            break;
        }
        eprintln!("attempt {attempt}: the order was not accepted");
    }
    assert!(accepted > 0, "the order was never accepted");
    for attempt in 0..8 {
        let (_, violations) = lose_redis_during_an_admission("skip-wait").await;
        if violations.join("\n").contains("was confirmed and is rejected") {
            return;
        }
        eprintln!("attempt {attempt}: the rebuild was too slow: {violations:?}");
    }
    panic!("the bug was not detected");
}

/// As long as an old master may accept orders, a rebuild opens no sale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_waits_for_the_failover_window() {
    const WINDOW: Duration = Duration::from_secs(4);
    let nodes = Queue::Stream.start_with(Kind::Postgres, 1, |mut command| {
        command.env("STAMPEDE__REDIS__FAILOVER_WINDOW_MS", WINDOW.as_millis().to_string());
        command
    });
    let sale = nodes.create_sale(1).await;
    let started = Instant::now();
    let rebuilt = nodes.shops[0].admin("gate/rebuild", &Value::Null).await;
    assert_eq!(rebuilt.status, 200, "{:?}", rebuilt.body);
    assert!(started.elapsed() >= WINDOW, "{:?}", started.elapsed());
    nodes.wait_until_open(sale).await;
}

/// Nodes that serve buyers and record orders.
async fn cluster(queue: Queue<'static>, kind: Kind, nodes: usize) -> Cluster {
    let servers = Servers { redis: queue.redis(), ..Servers::on(kind) };
    Cluster::start_with(servers, nodes, move |_, command| queue.node(command)).await
}

async fn nodes_rebuild_at_once_on_streams(kind: Kind) {
    rebuild_at_once(cluster(Queue::Stream, kind, 3).await).await;
}

async fn nodes_rebuild_at_once_with_a_broker(kind: Kind) {
    rebuild_at_once(cluster(Queue::RabbitMq(&BROKER), kind, 3).await).await;
}

/// The first seed sleeps after all sales are closed, before what has survived is recorded.
async fn rebuilder_that_sleeps_does_no_harm_on_streams(kind: Kind) {
    sleep_in_a_rebuild(cluster(Queue::Stream, kind, 2).await, 1).await;
}

/// The first seed sleeps after all sales are closed, before the markers are published.
async fn rebuilder_that_sleeps_does_no_harm_with_a_broker(kind: Kind) {
    sleep_in_a_rebuild(cluster(Queue::RabbitMq(&BROKER), kind, 2).await, 1).await;
}

/// A node sleeps while it loads a sale. Another one begins the next rebuild and closes all sales, the first one learns of that, and wakes up:
/// it does not open the sale under the incarnation of the other rebuild, so that nothing is sold until that one has loaded the sale.
async fn overlapping_rebuilds_lose_no_accepted_order(kind: Kind) {
    const INCARNATION: &str = "stampede_gate_incarnation";
    let directory = tempfile::tempdir().unwrap();
    let armed = |n: usize| directory.path().join(n.to_string());
    let reached = |n: usize| directory.path().join(format!("{n}.reached"));
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 2, |n, command| {
        let mut command = without_stream_consumer(command);
        let failpoint = ["rebuild.closed", "rebuild.loading"][n];
        command.env("STAMPEDE_FAILPOINTS", format!("{failpoint}=hold:{}", armed(n).display()));
        command
    });
    let [next, slow] = &nodes.shops[..] else { unreachable!() };
    let everyone = next.log_in(0, 60).await;
    let sale = nodes.create_sale(60).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..5], 1).await;

    // There are other sales, from the demonstration data.
    std::fs::write(armed(1), sale.to_string()).unwrap();
    let first = rebuild(slow);
    until("the sale is being loaded", async || reached(1).exists()).await;
    assert_eq!(phase(&nodes, sale).await, SalePhase::Loading);
    let incarnation = slow.metric(INCARNATION).await;
    until("the other node follows", async || next.metric(INCARNATION).await == incarnation).await;
    std::fs::write(armed(0), "").unwrap();
    let second = rebuild(next);
    until("all sales are closed again", async || reached(0).exists()).await;
    until("the first node follows", async || slow.metric(INCARNATION).await > incarnation).await;
    std::fs::remove_file(reached(1)).unwrap();
    assert_ne!(first.await.unwrap(), 200, "it was overtaken");
    std::fs::remove_file(reached(0)).unwrap();
    // The second rebuild has recorded what has survived, and waits.
    for buyer in everyone[5..].iter().cycle() {
        if second.is_finished() {
            break;
        }
        history.buy(&mut slow.client().await, sale, buyer).await;
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    // A call of it may time out on a busy machine; then a node begins again.
    assert!([200, 503].contains(&second.await.unwrap()));
    let _consumers = Consumers::start(&nodes, 1);
    nodes.wait_until_open(sale).await;
    nodes.storm(&history, sale, &everyone, 1).await;
    assert_eq!(nodes.verify(&history, sale).await, everyone.len());
}

on_each_database!(
    @module on_postgres, Postgres,
    overlapping_rebuilds_lose_no_accepted_order,
    nodes_rebuild_at_once_with_a_broker,
    rebuilder_that_sleeps_does_no_harm_on_streams
);

on_each_database!(
    @module on_mariadb, MariaDb,
    nodes_rebuild_at_once_on_streams,
    rebuilder_that_sleeps_does_no_harm_with_a_broker
);

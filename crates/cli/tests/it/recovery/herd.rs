//! Redis is away while many buyers wait. How often nodes connect to it, then and when it is back, does not depend on how many wait.

use std::sync::Arc;
use std::time::Duration;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Proxy, count, until};

use crate::cluster::Cluster;
use crate::shop::{Kind, Shop, verify};

use super::{OUTAGES, seeds};

const NODES: u64 = 3;
/// A node has a few clients of Redis, each with a connection for commands and some with one for messages, which may fail a few times
/// before the server listens again.
const MAX_CONNECTIONS_PER_NODE: u64 = 25;
/// The pause between two attempts of a buyer.
const PACE: Duration = Duration::from_millis(50);
/// How long buyers may need for an order after the outage.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// How often the nodes have called the gate for buyers.
async fn gate_calls(cluster: &Cluster) -> f64 {
    let mut sum = 0.0;
    for shop in &cluster.nodes.shops {
        sum += shop.metric("stampede_gate_admit_seconds_count").await;
    }
    sum
}

/// How often the nodes have connected to Redis, or tried to.
fn connections(cluster: &Cluster) -> u64 {
    cluster.to_redis.iter().map(Proxy::opened).sum()
}

/// Redis is killed and restarted without its memory, while every buyer tries again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_crowd_does_not_rush_to_redis() {
    let cluster = Cluster::start(Kind::Postgres, NODES as usize).await;
    let crowd = count(1000, 150);
    let waiting = cluster.nodes.shops[0].log_in(1000, crowd).await;
    for seed in seeds(OUTAGES) {
        let sale = cluster.nodes.create_sale_after_outage((crowd + NODES) as u32).await;
        let history = Arc::new(Recorder::default());
        for (shop, buyer) in cluster.nodes.shops.iter().zip(&cluster.buyers) {
            assert_eq!(history.buy(&mut shop.client().await, sale, buyer).await.response, Response::Created);
        }
        cluster.nodes.redis.kill().unwrap();
        for shop in &cluster.nodes.shops {
            until("the breaker is open", async || shop.metric("stampede_gate_breaker_open").await == 1.0).await;
        }
        let tasks = waiting.iter().cloned().enumerate().map(|(n, buyer)| {
            let address = cluster.nodes.shops[n % cluster.nodes.shops.len()].address;
            let history = history.clone();
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                while !history.buy(&mut client, sale, &buyer).await.response.is_confirmation() {
                    tokio::time::sleep(PACE).await;
                }
            })
        });
        let tasks: Vec<_> = tasks.collect();
        let refused = || history.count(Response::Unknown) as u64;
        until("the buyers are refused", async || refused() >= crowd).await;
        let (calls, connected, before) = (gate_calls(&cluster).await, connections(&cluster), refused());
        until("the buyers are refused again and again", async || refused() >= before + 5 * crowd).await;
        let (connected, attempts) = (connections(&cluster) - connected, refused() - before);
        assert_eq!(gate_calls(&cluster).await, calls, "the gate is not called for buyers");
        eprintln!("seed {seed}: {connected} connections during {attempts} attempts of {crowd} buyers");
        assert!(2 * connected < attempts, "{connected} connections during {attempts} attempts");

        let before = connections(&cluster);
        cluster.nodes.redis.restart().unwrap();
        for task in tasks {
            tokio::time::timeout(RECOVERY_TIMEOUT, task).await.expect("a buyer gets an order").unwrap();
        }
        let connected = connections(&cluster) - before;
        eprintln!("seed {seed}: {connected} connections until {crowd} buyers had an order");
        assert!(connected <= NODES * MAX_CONNECTIONS_PER_NODE, "{connected} connections for {crowd} buyers");
        let shops: Vec<&Shop> = cluster.nodes.shops.iter().collect();
        assert_eq!(verify(&history, &cluster.direct, &shops, sale).await as u64, crowd + NODES);
        cluster.nodes.wait_until_ready().await;
    }
    cluster.stop();
}

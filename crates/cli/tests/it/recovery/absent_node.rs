//! A node with an admitted batch sleeps, or is cut off, while another node rebuilds the gate. Then it goes on, under the old epoch.

use std::sync::Arc;

use stampede_core::{OrderId, OrderStatus};
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, count, until};

use crate::cluster::{Cluster, Servers};
use crate::shop::{Buyer, Kind, Shop, read_only, verify};

use super::OUTAGES;
use super::rebuilds::rebuild;

#[derive(Debug, Clone, Copy)]
enum Absence {
    Asleep,
    /// From Redis and the database.
    CutOff,
}

impl Absence {
    fn begin(self, cluster: &Cluster) {
        self.set(cluster, "STOP", Fault::Hang);
    }

    fn end(self, cluster: &Cluster) {
        self.set(cluster, "CONT", Fault::None);
    }

    fn set(self, cluster: &Cluster, signal: &str, fault: Fault) {
        match self {
            Self::Asleep => cluster.nodes.shops[1].process.signal(signal).unwrap(),
            Self::CutOff => {
                for wire in [&cluster.to_redis[1], &cluster.to_database[1]] {
                    wire.set(fault);
                }
            }
        }
    }
}

/// Buyers get an order from the other node meanwhile: the one that was admitted, if Redis still has it for the rebuild, or another one. What
/// the absent node does afterwards changes nothing.
async fn a_node_is_absent_during_a_rebuild(kind: Kind, absence: Absence) {
    let cluster = Cluster::start_with(Servers::on(kind), 2, |n, mut command| {
        if n == 1 {
            // Long enough for the absence to begin while an admitted batch is not recorded.
            command.env("STAMPEDE_FAILPOINTS", "buy.admitted=pause:1500");
        }
        command
    })
    .await;
    let (ledger, buyers) = (read_only(&cluster.direct).await, &cluster.buyers[..3]);
    let [other, absent] = &cluster.nodes.shops[..] else { unreachable!() };
    for seed in 0..count(2 * OUTAGES, 2) {
        let loses_memory = seed % 2 == 1;
        eprintln!("{kind:?}, {absence:?}, seed {seed}");
        let sale = cluster.nodes.create_sale_after_outage(10).await;
        let history = Arc::new(Recorder::default());
        let tasks = buyers.iter().cloned().map(|buyer| {
            let (history, address) = (history.clone(), absent.address);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                history.buy(&mut client, sale, &buyer).await;
            })
        });
        let tasks: Vec<_> = tasks.collect();
        let (outbox, live) = (cluster.key(sale, "out").unwrap(), cluster.key(sale, "live").unwrap());
        until("a batch is admitted", async || cluster.ask(&["xlen", &outbox]) != "0").await;
        absence.begin(&cluster);
        let mark_of = |buyer: &Buyer| cluster.ask(&["hget", &live, &buyer.id.to_string()]).parse::<OrderId>().ok();
        let admitted: Vec<_> = buyers.iter().filter_map(|buyer| Some((buyer, mark_of(buyer)?))).collect();
        assert!(!admitted.is_empty());
        let before = other.metric("stampede_gate_rebuilds_total").await;
        if loses_memory {
            cluster.nodes.redis.kill().unwrap();
        }
        assert_eq!(cluster.sale(sale).await.sold, 0, "admitted, and not recorded");
        if loses_memory {
            cluster.nodes.redis.restart().unwrap();
        } else {
            until("the other node accepts the command", async || rebuild(&cluster, 0).await == Some(200)).await;
        }
        until("the other node has rebuilt the gate", async || {
            other.metric("stampede_gate_rebuilds_total").await > before
        })
        .await;
        for (buyer, held) in &admitted {
            let mut order = None;
            until("the other node sells", async || {
                let bought = history.buy(&mut other.client().await, sale, buyer).await;
                order = bought.order.filter(|_| bought.response.is_confirmation());
                order.is_some()
            })
            .await;
            assert_eq!(order == Some(*held), !loses_memory, "{order:?}, admitted as {held}");
        }
        absence.end(&cluster);
        for task in tasks {
            task.await.unwrap();
        }
        let status_of = async |order: OrderId| {
            let rows = ledger.inspect(sale).await.unwrap().unwrap().orders;
            rows.iter().find(|row| row.order.id == order).map(|row| row.order.status)
        };
        let expected = if loses_memory { OrderStatus::Rejected } else { OrderStatus::Unpaid };
        for (_, held) in admitted {
            until("the order is decided", async || status_of(held).await == Some(expected)).await;
        }
        cluster.nodes.wait_until_open(sale).await;
        for buyer in buyers {
            until("every buyer has an order", async || {
                history.buy(&mut other.client().await, sale, buyer).await.response.is_confirmation()
            })
            .await;
        }
        let shops: Vec<&Shop> = cluster.nodes.shops.iter().collect();
        assert_eq!(verify(&history, &cluster.direct, &shops, sale).await, buyers.len());
        cluster.nodes.wait_until_ready().await;
    }
    ledger.close().await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_sleeps_with_an_admitted_batch_during_a_rebuild() {
    a_node_is_absent_during_a_rebuild(Kind::Postgres, Absence::Asleep).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_cut_off_with_an_admitted_batch_during_a_rebuild() {
    a_node_is_absent_during_a_rebuild(Kind::MariaDb, Absence::CutOff).await;
}

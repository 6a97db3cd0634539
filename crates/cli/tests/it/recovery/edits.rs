//! Sales are paused, resumed, topped up and reduced under load, and a node dies between the steps of an edit.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_testkit::{Client, count, until};

use crate::cluster::{Cluster, Round, STOCK};
use crate::shop::{Buyer, Kind, TOKEN};

use super::{CRASHES, OUTAGES, seeds};

/// What a top-up adds, and a reduction removes.
const CHANGE: u32 = 2;

/// Sends an edit to a node, which may die. Returns the status, if there is an answer.
async fn edit(cluster: &Cluster, n: usize, sale: SaleId, what: &str, body: &Value) -> Option<u16> {
    let mut client = Client::connect(cluster.nodes.shops[n].address).await.ok()?;
    let reply = client.post(&format!("/admin/v1/sales/{sale}/{what}"), TOKEN, body).await.ok()?;
    Some(reply.status.as_u16())
}

/// A buyer who has no order.
async fn stranger(cluster: &Cluster) -> Buyer {
    cluster.nodes.shops[0].log_in(5000, 1).await.remove(0)
}

/// What this node answers a buyer who has no order. If they get one, it is cancelled.
async fn answer_to(stranger: &Buyer, cluster: &Cluster, n: usize, round: &Round) -> Response {
    let mut client = cluster.nodes.shops[n].client().await;
    let attempt = round.history.buy(&mut client, round.sale, stranger).await;
    if let Some(order) = attempt.order.filter(|_| attempt.response.is_confirmation()) {
        round.history.cancel(&mut client, round.sale, stranger, order).await;
    }
    attempt.response
}

/// A node follows an edit of another one at once, at the latest after a rebuild.
async fn until_paused(cluster: &Cluster, nodes: &[usize], round: &Round, stranger: &Buyer) {
    for &n in nodes {
        until("the sale is paused", async || answer_to(stranger, cluster, n, round).await == Response::Paused).await;
    }
}

/// Every edit once and again, each on another node, while buyers buy and cancel on all of them.
async fn a_sale_is_edited_under_load(kind: Kind) {
    let cluster = Cluster::start(kind, 3).await;
    let stranger = stranger(&cluster).await;
    for seed in seeds(OUTAGES) {
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        for n in 0..2 {
            let mut node = || rng.random_range(0..3);
            assert_eq!(edit(&cluster, node(), round.sale, "pause", &Value::Null).await, Some(200));
            // The gate is one, so the pause holds on every node as soon as it is confirmed.
            for n in 0..3 {
                assert_eq!(answer_to(&stranger, &cluster, n, &round).await, Response::Paused);
            }
            assert_eq!(edit(&cluster, node(), round.sale, "resume", &Value::Null).await, Some(200));
            let top_up = json!({ "add": CHANGE, "request_id": format!("{seed}-{n}") });
            for _ in 0..2 {
                assert_eq!(edit(&cluster, node(), round.sale, "top-ups", &top_up).await, Some(200));
            }
            round.until_sold(3).await;
        }
        assert_eq!(cluster.end(round).await as u32, STOCK + 2 * CHANGE, "each top-up has added once");
    }
    cluster.stop();
}

/// A node that is about to die when it reaches the failpoint; the buyers' load is on all nodes.
async fn begin_with_a_dying_node(cluster: &mut Cluster, failpoint: &str) -> Round {
    cluster.restart_with_failpoint(1, &format!("{failpoint}=abort"));
    cluster.begin().await
}

/// The ledger has the edit, and the gate does not: another node brings it there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_dies_before_its_pause_reaches_the_gate() {
    let mut cluster = Cluster::start(Kind::Postgres, 2).await;
    let stranger = stranger(&cluster).await;
    for seed in seeds(CRASHES) {
        eprintln!("seed {seed}");
        let round = begin_with_a_dying_node(&mut cluster, "sale.edited").await;
        assert_eq!(edit(&cluster, 1, round.sale, "pause", &Value::Null).await, None);
        cluster.wait_for_death(1);
        until_paused(&cluster, &[0], &round, &stranger).await;
        cluster.restart(1);
        until_paused(&cluster, &[1], &round, &stranger).await;
        assert_eq!(edit(&cluster, 1, round.sale, "resume", &Value::Null).await, Some(200));
        cluster.until_selling(&round).await;
        assert_eq!(cluster.end(round).await as u32, STOCK);
    }
    cluster.stop();
}

async fn a_node_dies_before_its_top_up_reaches_the_gate(kind: Kind) {
    let mut cluster = Cluster::start(kind, 2).await;
    for seed in seeds(CRASHES / 2) {
        eprintln!("{kind:?}, seed {seed}");
        let round = begin_with_a_dying_node(&mut cluster, "sale.edited").await;
        let top_up = json!({ "add": CHANGE, "request_id": format!("{seed}") });
        assert_eq!(edit(&cluster, 1, round.sale, "top-ups", &top_up).await, None);
        cluster.wait_for_death(1);
        // The operator has no answer, and asks again.
        if seed % 2 == 0 {
            assert_eq!(edit(&cluster, 0, round.sale, "top-ups", &top_up).await, Some(200));
        }
        cluster.restart(1);
        assert_eq!(edit(&cluster, 1, round.sale, "top-ups", &top_up).await, Some(200));
        assert_eq!(cluster.end(round).await as u32, STOCK + CHANGE, "it has added once");
    }
    cluster.stop();
}

/// A reduction removes at most what is not sold: never more than was asked for, and never an order.
fn assert_reduced(total: usize, times: u32) {
    let total = u32::try_from(total).unwrap();
    assert!((STOCK - times * CHANGE..=STOCK).contains(&total), "{total} are left");
}

async fn a_sale_is_reduced_under_load(kind: Kind) {
    let cluster = Cluster::start(kind, 3).await;
    for seed in seeds(OUTAGES) {
        eprintln!("{kind:?}, seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        for n in 0..2 {
            let reduce = json!({ "remove": CHANGE, "request_id": format!("{seed}-{n}") });
            for _ in 0..2 {
                assert_eq!(edit(&cluster, rng.random_range(0..3), round.sale, "reduce", &reduce).await, Some(200));
            }
            round.until_sold(3).await;
        }
        assert_reduced(cluster.end(round).await, 2);
    }
    cluster.stop();
}

/// A node dies after the first step of a reduction, in the ledger, or after the second, in the gate. Asking again ends it.
async fn a_node_dies_while_it_reduces_a_sale(kind: Kind) {
    let mut cluster = Cluster::start(kind, 2).await;
    for seed in 0..count(CRASHES / 2, 2) {
        let failpoint = ["reduce.ledger", "reduce.gate"][seed as usize % 2];
        eprintln!("{kind:?}, seed {seed}: {failpoint}");
        let round = begin_with_a_dying_node(&mut cluster, failpoint).await;
        let reduce = json!({ "remove": CHANGE, "request_id": format!("{seed}") });
        assert_eq!(edit(&cluster, 1, round.sale, "reduce", &reduce).await, None);
        cluster.wait_for_death(1);
        assert_eq!(edit(&cluster, 0, round.sale, "reduce", &reduce).await, Some(200));
        cluster.restart(1);
        round.until_sold(1).await;
        assert_reduced(cluster.end(round).await, 1);
    }
    cluster.stop();
}

on_each_database!(
    servers: a_sale_is_edited_under_load,
    a_node_dies_before_its_top_up_reaches_the_gate,
    a_sale_is_reduced_under_load,
    a_node_dies_while_it_reduces_a_sale
);

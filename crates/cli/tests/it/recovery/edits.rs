//! Sales are paused, resumed, topped up, reduced and extended under load, and a node dies between the steps of an edit.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::{Clock as _, SaleId, SystemClock};
use stampede_proof::history::Response;
use stampede_testkit::{Client, count, until};

use crate::cluster::{Cluster, Round, STOCK};
use crate::shop::{Buyer, Kind, TOKEN, read_only};

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

/// In every other seed the operator asks again at once; otherwise only when another node has completed the top-up alone.
async fn a_node_dies_before_its_top_up_reaches_the_gate(kind: Kind) {
    let mut cluster = Cluster::start(kind, 2).await;
    for seed in 0..count(CRASHES / 2, 2) {
        eprintln!("{kind:?}, seed {seed}");
        let round = begin_with_a_dying_node(&mut cluster, "sale.edited").await;
        let top_up = json!({ "add": CHANGE, "request_id": format!("{seed}") });
        assert_eq!(edit(&cluster, 1, round.sale, "top-ups", &top_up).await, None);
        cluster.wait_for_death(1);
        if seed % 2 == 0 {
            assert_eq!(edit(&cluster, 0, round.sale, "top-ups", &top_up).await, Some(200));
        } else {
            let path = format!("/admin/v1/sales/{}/gate", round.sale);
            let mut client = cluster.nodes.shops[0].client().await;
            until("the other node has topped up the gate", async || {
                client.get(&path, TOKEN).await.unwrap().json()["cap"] == STOCK + CHANGE
            })
            .await;
        }
        cluster.restart(1);
        assert_eq!(edit(&cluster, 1, round.sale, "top-ups", &top_up).await, Some(200));
        assert_eq!(cluster.end(round).await as u32, STOCK + CHANGE, "it has added once");
    }
    cluster.stop();
}

/// A sale is to end in a few seconds. A node dies while it extends the sale: when the ledger has the new end and the gate does not, or when the
/// gate has it and the ledger does not know that. Another node completes the edit alone, and the sale goes on after its old end.
async fn a_node_dies_while_it_extends_a_sale(kind: Kind) {
    const OLD_END_IN: Duration = Duration::from_secs(5);
    let mut cluster = Cluster::start(kind, 2).await;
    for seed in seeds(CRASHES) {
        // Each failpoint is reached in every other seed, and in the first one on one of the databases.
        let first = usize::from(kind == Kind::MariaDb);
        let failpoint = ["sale.edited", "edit.gate"][(first + seed as usize) % 2];
        eprintln!("{kind:?}, seed {seed}: {failpoint}");
        let round = begin_with_a_dying_node(&mut cluster, failpoint).await;
        let old_end = SystemClock.now().plus(OLD_END_IN);
        let shorten = json!({ "end": old_end, "request_id": format!("{seed}-shorten") });
        assert_eq!(edit(&cluster, 0, round.sale, "window", &shorten).await, Some(200));
        let new_end = old_end.plus(Duration::from_secs(3600));
        let extend = json!({ "end": new_end, "request_id": format!("{seed}-extend") });
        assert_eq!(edit(&cluster, 1, round.sale, "window", &extend).await, None);
        cluster.wait_for_death(1);
        let ledger = read_only(&cluster.direct).await;
        until("the other node has completed the edit", async || {
            ledger.sales_with_pending_edits(10).await.unwrap().is_empty()
        })
        .await;
        ledger.close().await;
        cluster.restart(1);
        // The operator has no answer, and asks again.
        assert_eq!(edit(&cluster, 1, round.sale, "window", &extend).await, Some(200));
        assert_eq!(cluster.sale(round.sale).await.window.end, new_end);
        until("the old end has passed", async || SystemClock.now() > old_end).await;
        cluster.until_selling(&round).await;
        round.until_sold(3).await;
        assert_eq!(cluster.end(round).await as u32, STOCK);
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
    // Each failpoint is reached in every other seed.
    for seed in 0..count(CRASHES, 2) {
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
    a_node_dies_while_it_extends_a_sale,
    a_sale_is_reduced_under_load,
    a_node_dies_while_it_reduces_a_sale
);

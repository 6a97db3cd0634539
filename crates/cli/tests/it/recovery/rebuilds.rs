//! The gate is rebuilt while buyers buy and cancel, by two nodes at once, and by nodes that die.

use std::process::Command;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use stampede_core::{SaleId, failpoint};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, redis, until};

use crate::cluster::Cluster;
use crate::proof::stampede;
use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, TOKEN};

use super::{CRASHES, OUTAGES, seeds};

/// Has a node rebuild the gate. `None` if the node dies.
async fn rebuild(cluster: &Cluster, n: usize) -> Option<u16> {
    let mut client = Client::connect(cluster.nodes.shops[n].address).await.ok()?;
    let reply = client.post("/admin/v1/gate/rebuild", TOKEN, &Value::Null).await.ok()?;
    Some(reply.status.as_u16())
}

/// Rebuilds one after the other, by different nodes, while orders are bought and cancelled.
async fn the_gate_is_rebuilt_while_orders_are_cancelled(kind: Kind) {
    let cluster = Cluster::start(kind, 3).await;
    for seed in seeds(OUTAGES) {
        eprintln!("{kind:?}, seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        for _ in 0..3 {
            let n = rng.random_range(0..3);
            until("a node rebuilds the gate", async || match rebuild(&cluster, n).await {
                Some(200) => true,
                // The node has not seen the end of the last rebuild yet.
                Some(503) => false,
                other => panic!("{other:?}"),
            })
            .await;
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..100))).await;
        }
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

/// All nodes begin at the same time: one of them rebuilds the gate, and the others do no harm.
async fn nodes_rebuild_the_gate_at_once(kind: Kind) {
    let cluster = Cluster::start(kind, 3).await;
    for seed in seeds(OUTAGES) {
        eprintln!("{kind:?}, seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        let pauses = [0; 2].map(|_| Duration::from_millis(rng.random_range(0..40)));
        let later = async |n: usize| {
            tokio::time::sleep(pauses[n - 1]).await;
            rebuild(&cluster, n).await
        };
        let done = tokio::join!(rebuild(&cluster, 0), later(1), later(2));
        let done = [done.0, done.1, done.2];
        assert!(done.iter().all(|status| matches!(status, Some(200 | 503))), "{done:?}");
        assert!(done.contains(&Some(200)), "{done:?}");
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

/// The database refuses the orders of one sale, and the gate is rebuilt: that sale stays closed, which is reported, and the others are sold.
async fn a_sale_that_cannot_be_rebuilt_holds_up_no_other(kind: Kind) {
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let (stuck, other) = (nodes.create_sale(5).await, nodes.create_sale(5).await);
    let (of_stuck, of_other) = (Recorder::default(), Recorder::default());
    for statement in refuse_orders(kind, stuck) {
        execute(kind, &nodes.storages[0], &statement).await;
    }
    let bought = of_stuck.buy(&mut nodes.shops[0].client().await, stuck, &buyers[0]).await;
    assert_eq!(bought.response, Response::Unknown, "admitted, and not recorded");
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    let sells = async |shop: &Shop, history: &Recorder, sale, buyer| {
        let bought = history.buy(&mut shop.client().await, sale, buyer).await;
        matches!(bought.response, Response::Created | Response::Already)
    };
    for shop in &nodes.shops {
        until("the other sale is sold", async || sells(shop, &of_other, other, &buyers[1]).await).await;
    }
    until("an alert names the sale", async || {
        let mut raised = false;
        for shop in &nodes.shops {
            let metrics = shop.client().await.get("/metrics", TOKEN).await.unwrap();
            raised |=
                String::from_utf8_lossy(&metrics.body).contains("stampede_alerts_total{alert=\"sale_not_rebuilt\"}");
        }
        raised
    })
    .await;
    let on_table = if matches!(kind, Kind::Postgres) { " ON orders" } else { "" };
    execute(kind, &nodes.storages[0], &format!("DROP TRIGGER refuse{on_table}")).await;
    for shop in &nodes.shops {
        until("the sale is sold again", async || sells(shop, &of_stuck, stuck, &buyers[0]).await).await;
    }
    assert_eq!(nodes.verify(&of_stuck, stuck).await, 1);
    assert_eq!(nodes.verify(&of_other, other).await, 1);
}

/// Statements with which the database refuses orders of a sale for a reason that is not in their data.
fn refuse_orders(kind: Kind, sale: SaleId) -> Vec<String> {
    match kind {
        Kind::Sqlite => panic!("not a database of this tier"),
        Kind::MariaDb => vec![format!(
            "CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW
                IF NEW.sale_id = {sale} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not now'; END IF"
        )],
        Kind::Postgres => vec![
            format!(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                    IF NEW.sale_id = {sale} THEN RAISE EXCEPTION 'not now'; END IF; RETURN NEW; END $$"
            ),
            "CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION refuse()".to_owned(),
        ],
    }
}

on_each_database!(servers: the_gate_is_rebuilt_while_orders_are_cancelled, nodes_rebuild_the_gate_at_once, a_sale_that_cannot_be_rebuilt_holds_up_no_other);

/// A node dies in the middle of a rebuild, between two steps. Another node begins again.
async fn survives_a_rebuilder_that_dies_at(failpoint: &str, kind: Kind) {
    let mut cluster = Cluster::start(kind, 2).await;
    // Sales without buyers, so that the node dies before, between or after others.
    for _ in 0..2 {
        cluster.nodes.create_sale(1).await;
    }
    for seed in seeds(CRASHES / 4) {
        let mut rng = StdRng::seed_from_u64(seed);
        // Once in a rebuild, or once per sale.
        let hit = if failpoint.starts_with("rebuild.load") || failpoint.starts_with("rebuild.open") {
            rng.random_range(1..=3)
        } else {
            1
        };
        eprintln!("{kind:?}, seed {seed}: {failpoint} {hit}");
        cluster.restart_with_failpoint(1, &format!("{failpoint}=abort@{hit}"));
        let round = cluster.begin().await;
        assert_eq!(rebuild(&cluster, 1).await, None);
        cluster.wait_for_death(1);
        cluster.until_selling_on(&[0], &round).await;
        cluster.restart(1);
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

const _: () = assert!(failpoint::SERVER_GATE.len() == 5, "a failpoint of the rebuild needs a test");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survives_a_rebuilder_that_dies_before_it_closes_the_sales() {
    survives_a_rebuilder_that_dies_at("rebuild.begun", Kind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survives_a_rebuilder_that_dies_after_it_has_closed_the_sales() {
    survives_a_rebuilder_that_dies_at("rebuild.closed", Kind::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survives_a_rebuilder_that_dies_while_it_loads_the_marks() {
    survives_a_rebuilder_that_dies_at("rebuild.loading", Kind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survives_a_rebuilder_that_dies_after_it_has_opened_a_sale() {
    survives_a_rebuilder_that_dies_at("rebuild.opened", Kind::MariaDb).await;
}

/// A rebuilder sleeps in the middle of a rebuild until another node has begun and ended one, and wakes up: its own one does no harm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebuilder_that_sleeps_does_no_harm() {
    let mut cluster = Cluster::start(Kind::Postgres, 2).await;
    for seed in seeds(OUTAGES) {
        let failpoint = failpoint::SERVER_GATE[1 + seed as usize % 4];
        eprintln!("seed {seed}: {failpoint}");
        // Long enough to be stopped there.
        cluster.restart_with_failpoint(1, &format!("{failpoint}=pause:1000"));
        let round = cluster.begin().await;
        let address = cluster.nodes.shops[1].address;
        let asleep = tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            client.post("/admin/v1/gate/rebuild", TOKEN, &Value::Null).await
        });
        let before = cluster.nodes.shops[0].metric("stampede_gate_rebuilds_total").await;
        until("the rebuild has begun", async || cluster.sale(round.sale).await.phase != stampede_core::SalePhase::Open)
            .await;
        cluster.nodes.shops[1].process.signal("STOP").unwrap();
        until("the other node has rebuilt the gate", async || {
            cluster.nodes.shops[0].metric("stampede_gate_rebuilds_total").await > before
        })
        .await;
        cluster.until_selling_on(&[0], &round).await;
        cluster.nodes.shops[1].process.signal("CONT").unwrap();
        // It fails, or is refused: the answer is of no interest, only that there is one.
        let _ = asleep.await.unwrap();
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

/// `stampede rebuild` under load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_rebuilds_the_gate_under_load() {
    let cluster = Cluster::start(Kind::MariaDb, 2).await;
    let round = cluster.begin().await;
    let target = format!("http://{}", cluster.nodes.shops[1].address);
    let mut command: Command = stampede(&["rebuild", "--target", &target]);
    let output = command.env("STAMPEDE_ADMIN_TOKEN", TOKEN).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("the gate was rebuilt"), "{text}");
    cluster.until_selling(&round).await;
    cluster.end(round).await;
    cluster.stop();
}

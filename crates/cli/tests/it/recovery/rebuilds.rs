//! The gate is rebuilt while buyers buy and cancel, by two nodes at once, and by nodes that die.

use std::process::Command;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::{Clock as _, OrderId, SaleId, SystemClock, UserId, failpoint};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, redis, until};

use crate::cluster::Cluster;
use crate::proof::stampede;
use crate::quarantine::{accept_orders_again, execute, quarantine, reject_orders_of};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, TOKEN, read_only};

use super::drift::{GHOST, key, note_request};
use super::foreign_lock::ForeignLock;
use super::{CRASHES, OUTAGES, seeds};

/// Has a node rebuild the gate. `None` if the node dies.
pub(super) async fn rebuild(cluster: &Cluster, n: usize) -> Option<u16> {
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
    rebuild_at_once(Cluster::start(kind, 3).await).await;
}

/// All three nodes of a cluster rebuild the gate at the same time.
pub async fn rebuild_at_once(cluster: Cluster) {
    for seed in seeds(OUTAGES) {
        eprintln!("seed {seed}");
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
    for shop in &nodes.shops {
        until("the other sale is sold", async || sells(shop, &of_other, other, &buyers[1]).await).await;
    }
    until("an alert names the sale", async || is_alerted(&nodes, "sale_not_rebuilt").await).await;
    execute(kind, &nodes.storages[0], accept_orders(kind)).await;
    for shop in &nodes.shops {
        until("the sale is sold again", async || sells(shop, &of_stuck, stuck, &buyers[0]).await).await;
    }
    assert_eq!(nodes.verify(&of_stuck, stuck).await, 1);
    assert_eq!(nodes.verify(&of_other, other).await, 1);
}

/// The database rejects orders of two sales that only have marks, and the gate is rebuilt. Of one sale it rejects every order of the batch:
/// none goes into quarantine, and the sale stays closed until they are recorded. Of the other one it rejects one, which goes into quarantine.
async fn a_batch_in_which_every_order_is_rejected_is_not_quarantined(kind: Kind) {
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        // A comparison of gate and ledger would record the marks one by one.
        command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000");
        command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "1000");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let (all_rejected, one_rejected) = (nodes.create_sale(5).await, nodes.create_sale(5).await);
    let other = nodes.create_sale(5).await;
    let (of_all, of_one, of_other) = (Recorder::default(), Recorder::default(), Recorder::default());
    let ghost = |n: i64| UserId::new(GHOST + n).unwrap();
    execute(kind, &nodes.storages[0], &reject_orders_of(kind, &[ghost(1), ghost(2), ghost(3)])).await;
    let plant = |history: &Recorder, sale: SaleId, n: i64| {
        let (user, order) = (ghost(n), OrderId::new(sale.get() + n).unwrap().to_string());
        note_request(history, sale, user);
        redis::ask(nodes.redis.port(), &["hset", &key(&nodes, sale, "live"), &user.to_string(), &order]).unwrap();
        order
    };
    plant(&of_all, all_rejected, 1);
    plant(&of_all, all_rejected, 2);
    let quarantined = plant(&of_one, one_rejected, 3);
    plant(&of_one, one_rejected, 4);
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    for shop in &nodes.shops {
        until("the other sale is sold", async || sells(shop, &of_other, other, &buyers[0]).await).await;
    }
    nodes.wait_until_open(one_rejected).await;
    until("an alert names the sale", async || is_alerted(&nodes, "sale_not_rebuilt").await).await;
    // This is raised when they have been tried as often as an order that goes into quarantine.
    until("an alert names the cause", async || is_alerted(&nodes, "sale_not_recorded").await).await;
    let in_quarantine =
        async || -> Vec<Value> { quarantine(&nodes.shops[0]).await.iter().map(|order| order["id"].clone()).collect() };
    assert_eq!(in_quarantine().await, [json!(quarantined)]);
    assert!(!sells(&nodes.shops[0], &of_all, all_rejected, &buyers[1]).await, "the sale is closed");

    execute(kind, &nodes.storages[0], accept_orders_again(kind)).await;
    for shop in &nodes.shops {
        until("the sale is sold again", async || sells(shop, &of_all, all_rejected, &buyers[1]).await).await;
    }
    assert_eq!(in_quarantine().await, [json!(quarantined)], "none was added");
    let retried = nodes.shops[0].admin(&format!("quarantine/{quarantined}/retry"), &Value::Null).await;
    assert_eq!((retried.status.as_u16(), retried.text("outcome").as_str()), (200, "recorded"));
    assert_eq!(nodes.verify(&of_all, all_rejected).await, 3);
    assert_eq!(nodes.verify(&of_one, one_rejected).await, 2);
    assert_eq!(nodes.verify(&of_other, other).await, 1);
}

/// A sale stays closed, so that the mark of an order that was cancelled in it cannot be released: the stock of an unpaid order of another sale,
/// which is returned by the same worker, is sold again at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mark_that_cannot_be_released_holds_up_no_other() {
    /// By then, attempts to release the first mark are more than six seconds apart.
    const DEADLINE: Duration = Duration::from_secs(12);
    let kind = Kind::Postgres;
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let closed = nodes.create_sale(5).await;
    let (begin, voucher) = (SystemClock.now(), nodes.shops[0].create_voucher().await);
    let expiring = json!({
        "voucher_id": voucher, "stock": 1, "begin": begin, "end": begin.plus(Duration::from_secs(3600)),
        "payment_deadline_ms": DEADLINE.as_millis() as u64,
    });
    let expiring = nodes.shops[0].admin("sales", &expiring).await.text("id").parse().unwrap();
    nodes.wait_until_open(expiring).await;
    let (of_closed, of_expiring) = (Recorder::default(), Recorder::default());
    let bought = of_closed.buy(&mut nodes.shops[0].client().await, closed, &buyers[0]).await;
    for statement in refuse_orders(kind, closed) {
        execute(kind, &nodes.storages[0], &statement).await;
    }
    let unrecorded = of_closed.buy(&mut nodes.shops[0].client().await, closed, &buyers[1]).await;
    assert_eq!(unrecorded.response, Response::Unknown, "admitted, and not recorded");
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    until("an alert names the sale", async || is_alerted(&nodes, "sale_not_rebuilt").await).await;
    let order = bought.order.unwrap();
    let cancelled = of_closed.cancel(&mut nodes.shops[1].client().await, closed, &buyers[0], order).await;
    assert_eq!(cancelled.response, Response::Cancelled);

    until("the other sale is sold", async || sells(&nodes.shops[0], &of_expiring, expiring, &buyers[2]).await).await;
    let unpaid = of_expiring.ended().iter().find_map(|attempt| attempt.order).unwrap();
    let (mut client, path) = (nodes.shops[0].client().await, format!("/v1/orders/{unpaid}"));
    until("the order has expired", async || {
        client.get(&path, &buyers[2].token).await.unwrap().text("status") == "cancelled"
    })
    .await;
    let again = async || sells(&nodes.shops[1], &of_expiring, expiring, &buyers[3]).await;
    let delay = until("its stock is sold again", again).await;
    assert!(delay < Duration::from_secs(3), "{delay:?}");
    assert!(!sells(&nodes.shops[0], &of_closed, closed, &buyers[3]).await, "the other sale is still closed");
    execute(kind, &nodes.storages[0], accept_orders(kind)).await;
    until("the sale is opened", async || sells(&nodes.shops[0], &of_closed, closed, &buyers[1]).await).await;
    let ledger = read_only(&nodes.storages[0]).await;
    until("its mark is released", async || ledger.pending_releases(None, 10).await.unwrap().is_empty()).await;
    ledger.close().await;
    assert_eq!(nodes.verify(&of_closed, closed).await, 1);
    assert_eq!(nodes.verify(&of_expiring, expiring).await, 1);
}

/// Another client of the database locks the rows of two sales, one of them with an order that was admitted, and the gate is rebuilt: the
/// other sales are sold meanwhile, and those two when the lock is gone.
async fn locked_sales_hold_up_no_other(kind: Kind) {
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000");
        // A rebuild waits for the locks of two sales.
        command.env("STAMPEDE__HTTP__ANSWER_TIMEOUT_MS", "29000");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let locked = [nodes.create_sale(5).await, nodes.create_sale(5).await];
    let other = nodes.create_sale(5).await;
    let (of_locked, of_other) = ([Recorder::default(), Recorder::default()], Recorder::default());
    let lock = ForeignLock::on_sales(kind, &nodes.storages[0], &locked).await;
    let bought = of_locked[0].buy(&mut nodes.shops[0].client().await, locked[0], &buyers[0]).await;
    assert_eq!(bought.response, Response::Unknown, "admitted, and not recorded");
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    for shop in &nodes.shops {
        until("the other sale is sold", async || sells(shop, &of_other, other, &buyers[1]).await).await;
        for (sale, history) in locked.iter().zip(&of_locked) {
            assert!(!sells(shop, history, *sale, &buyers[0]).await, "a locked sale is sold");
        }
    }
    until("an alert names the sales", async || is_alerted(&nodes, "sale_not_rebuilt").await).await;
    let (code, text) = run_rebuild(&nodes.shops[0]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("the gate was rebuilt") && text.contains("2 sale(s) stay closed"), "{text}");
    lock.release().await;
    for (sale, history) in locked.iter().zip(&of_locked) {
        for shop in &nodes.shops {
            until("the sale is sold again", async || sells(shop, history, *sale, &buyers[0]).await).await;
        }
        assert_eq!(nodes.verify(history, *sale).await, 1);
    }
    assert_eq!(nodes.verify(&of_other, other).await, 1);
}

/// Another client of the database locks the rows of all sales, and the gate is rebuilt: they are sold when the lock is gone, without a
/// second rebuild.
async fn a_rebuild_waits_for_locked_sales(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let buyers = nodes.shops[0].log_in(0, 1).await;
    let (sale, history) = (nodes.create_sale(5).await, Recorder::default());
    let rebuilds = async || {
        let mut sum = 0.0;
        for shop in &nodes.shops {
            sum += shop.metric("stampede_gate_rebuilds_total").await;
        }
        sum
    };
    let before = rebuilds().await;
    let lock = ForeignLock::on_sales(kind, &nodes.storages[0], &[sale]).await;
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    until("an alert names the sale", async || is_alerted(&nodes, "sale_not_rebuilt").await).await;
    lock.release().await;
    for shop in &nodes.shops {
        until("the sale is sold again", async || sells(shop, &history, sale, &buyers[0]).await).await;
    }
    assert_eq!(rebuilds().await, before + 1.0);
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// Runs `stampede rebuild` and returns its exit code and output.
async fn run_rebuild(shop: &Shop) -> (Option<i32>, String) {
    let mut command: Command = stampede(&["rebuild", "--target", &format!("http://{}", shop.address)]);
    command.env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
}

async fn sells(shop: &Shop, history: &Recorder, sale: SaleId, buyer: &Buyer) -> bool {
    let bought = history.buy(&mut shop.client().await, sale, buyer).await;
    matches!(bought.response, Response::Created | Response::Already)
}

/// Whether a node has raised this alert.
pub(super) async fn is_alerted(nodes: &Nodes, alert: &str) -> bool {
    let raised = format!("stampede_alerts_total{{alert=\"{alert}\"}}");
    for shop in &nodes.shops {
        let metrics = shop.client().await.get("/metrics", TOKEN).await.unwrap();
        if String::from_utf8_lossy(&metrics.body).contains(&raised) {
            return true;
        }
    }
    false
}

/// Statements with which the database refuses orders of a sale for a reason that is not in their data.
pub fn refuse_orders(kind: Kind, sale: SaleId) -> Vec<String> {
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

/// The statement that ends [`refuse_orders`].
pub fn accept_orders(kind: Kind) -> &'static str {
    if matches!(kind, Kind::Postgres) { "DROP TRIGGER refuse ON orders" } else { "DROP TRIGGER refuse" }
}

on_each_database!(servers: the_gate_is_rebuilt_while_orders_are_cancelled, nodes_rebuild_the_gate_at_once, a_sale_that_cannot_be_rebuilt_holds_up_no_other, a_batch_in_which_every_order_is_rejected_is_not_quarantined, locked_sales_hold_up_no_other, a_rebuild_waits_for_locked_sales);

/// A node dies in the middle of a rebuild, between two steps. Another node begins again: where the scripts are loaded, after 5 s
/// without progress, so that a seed takes about ten seconds.
async fn survives_a_rebuilder_that_dies_at(failpoint: &str, kind: Kind) {
    let mut cluster = Cluster::start(kind, 2).await;
    // Sales without buyers, so that the node dies before, between or after others.
    for _ in 0..2 {
        cluster.nodes.create_sale(1).await;
    }
    for seed in seeds(CRASHES) {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebuilder_that_sleeps_does_no_harm() {
    sleep_in_a_rebuild(Cluster::start(Kind::Postgres, 2).await, 0).await;
}

/// The second node of a cluster sleeps in the middle of a rebuild until the first one has begun and ended another, and wakes up: its own
/// one does no harm. `first`: the failpoint of the first seed.
pub async fn sleep_in_a_rebuild(mut cluster: Cluster, first: usize) {
    for seed in seeds(OUTAGES) {
        let failpoint = failpoint::SERVER_GATE[1 + (first + seed as usize) % 4];
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
    let (code, text) = run_rebuild(&cluster.nodes.shops[1]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("the gate was rebuilt") && !text.contains("closed"), "{text}");
    cluster.until_selling(&round).await;
    cluster.end(round).await;
    cluster.stop();
}

//! Differences between gate and ledger are repaired while sales run.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use stampede_core::{OrderId, SaleId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, redis, until};

use crate::proof::stampede;
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, TOKEN, ledger, verify};

/// Two nodes that do not reconcile by themselves, and repair what is found twice within half a second.
fn start(kind: Kind) -> Nodes {
    Nodes::start_with(kind, 2, |_, command| with_reconcile(command, 3_600_000))
}

fn with_reconcile(mut command: Command, interval_ms: u64) -> Command {
    command.env("STAMPEDE__RECONCILE__INTERVAL_MS", interval_ms.to_string());
    command.env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "500");
    command
}

/// A key of a sale in Redis.
pub(super) fn key(nodes: &Nodes, sale: SaleId, part: &str) -> String {
    let keys = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:{part}")]).unwrap();
    assert!(!keys.is_empty() && !keys.contains('\n'), "{part}: {keys}");
    keys
}

async fn reconcile(shop: &Shop, dry_run: bool) -> Value {
    let done = shop.admin("reconcile", &json!({ "dry_run": dry_run })).await;
    assert_eq!(done.status, 200, "{:?}", done.body);
    done.json()
}

/// The findings of a report: what, about which order, and the outcome. Sorted.
pub(super) fn findings(report: &Value) -> Vec<(String, String, String)> {
    let text = |finding: &Value, member: &str| finding[member].as_str().unwrap_or_default().to_owned();
    let found = report["findings"].as_array().unwrap().iter();
    let mut found: Vec<_> =
        found.map(|one| (text(one, "finding"), text(one, "order_id"), text(one, "outcome"))).collect();
    found.sort();
    found
}

/// Buys for everyone until `stop`, cancels half of the orders, and buys again.
fn load(
    nodes: &Nodes,
    history: &Arc<Recorder>,
    sale: SaleId,
    buyers: &[Buyer],
    stop: &Arc<AtomicBool>,
) -> Vec<tokio::task::JoinHandle<()>> {
    let address = |n: usize| nodes.shops[n % nodes.shops.len()].address;
    let tasks = buyers.iter().enumerate().map(|(n, buyer)| {
        let (history, buyer, address, stop) = (history.clone(), buyer.clone(), address(n), stop.clone());
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                let attempt = history.buy(&mut client, sale, &buyer).await;
                if attempt.response == Response::Unknown {
                    let Ok(next) = Client::connect(address).await else { return };
                    client = next;
                }
                if let (true, Some(order)) = (n % 2 == 0, attempt.order) {
                    history.cancel(&mut client, sale, &buyer, order).await;
                }
            }
        })
    });
    tasks.collect()
}

/// Verifies the invariants that need no history: no user has requested what was planted.
pub(super) async fn verify_without_history(nodes: &Nodes, sale: SaleId) {
    let shops: Vec<&Shop> = nodes.shops.iter().collect();
    verify(&Recorder::default(), &nodes.storages[0], &shops, sale).await;
}

/// Every kind of difference is planted while buyers buy and cancel, found, and repaired; the orders on their way are left alone.
async fn differences_are_repaired_under_load(kind: Kind) {
    let nodes = start(kind);
    let stores = ledger(&nodes.storages[0]).await;
    let buyers = nodes.shops[0].log_in(0, 24).await;
    let victims = nodes.shops[0].log_in(1000, 3).await;
    for _ in 0..count(20, 1) {
        let sale = nodes.create_sale(500).await;
        let history = Arc::new(Recorder::default());
        let mut client = nodes.shops[0].client().await;
        let mut orders = Vec::new();
        for victim in &victims {
            let bought = history.buy(&mut client, sale, victim).await;
            assert_eq!(bought.response, Response::Created);
            orders.push(bought.order.unwrap());
        }
        until("the outbox is empty", async || {
            redis::ask(nodes.redis.port(), &["xlen", &key(&nodes, sale, "out")]).unwrap() == "0"
        })
        .await;
        let stop = Arc::new(AtomicBool::new(false));
        let load = load(&nodes, &history, sale, &buyers, &stop);
        let live = key(&nodes, sale, "live");
        let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();

        // Three differences at once: a mark without an order, the mark of a cancelled order, and a higher cap.
        let dead: OrderId = orders[0];
        let cancelled =
            stores.ledger.cancel(dead, victims[0].id, stampede_core::Clock::now(&stampede_core::SystemClock)).await;
        assert!(cancelled.is_ok());
        until("the mark is released", async || ask(&["hexists", &live, &victims[0].id.to_string()]) == "0").await;
        ask(&["hset", &live, &victims[0].id.to_string(), &dead.to_string()]);
        // The next id of the same millisecond, which is not used.
        let ghost = OrderId::new(dead.get() + 1).unwrap().to_string();
        ask(&["hset", &live, "4000000000000000001", &ghost]);
        ask(&["hset", &key(&nodes, sale, "sale"), "cap", "600"]);
        let mut expected = [
            ("cap_differs".to_owned(), String::new()),
            ("dead_row_with_mark".to_owned(), dead.to_string()),
            ("mark_without_row".to_owned(), ghost),
        ];
        expected.sort();
        let with = |outcome: &str| -> Vec<_> {
            expected.iter().map(|(what, order)| (what.clone(), order.clone(), outcome.to_owned())).collect()
        };
        // A dry run changes nothing, so it finds the same twice.
        for _ in 0..2 {
            assert_eq!(findings(&reconcile(&nodes.shops[1], true).await), with("reported"));
        }
        assert_eq!(findings(&reconcile(&nodes.shops[1], false).await), with("repaired"));
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), vec![]);
        assert_eq!(ask(&["hexists", &live, &victims[0].id.to_string()]), "0");
        assert_eq!(ask(&["hget", &key(&nodes, sale, "sale"), "cap"]), "500");

        // A cap that the gate cannot have set by itself is not taken over.
        ask(&["hset", &key(&nodes, sale, "sale"), "cap", "1"]);
        let cap = ("cap_differs".to_owned(), String::new(), "repaired".to_owned());
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), [cap]);
        assert_eq!(ask(&["hget", &key(&nodes, sale, "sale"), "cap"]), "500");

        // A live row without a mark: the whole gate is rebuilt.
        ask(&["hdel", &live, &victims[1].id.to_string()]);
        let lost = ("live_row_without_mark".to_owned(), orders[1].to_string(), "repaired".to_owned());
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), [lost]);
        // Another node may have begun the rebuild, which then goes on.
        let live = key(&nodes, sale, "live");
        until("the mark is back", async || ask(&["hget", &live, &victims[1].id.to_string()]) == orders[1].to_string())
            .await;
        stop.store(true, Ordering::Relaxed);
        for task in load {
            task.await.unwrap();
        }
        for shop in &nodes.shops {
            until("the node is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200)
                .await;
        }
        assert_eq!(findings(&reconcile(&nodes.shops[0], true).await), vec![], "nothing is left");
        verify_without_history(&nodes, sale).await;
    }
    let log = nodes.shops[1].client().await.get("/admin/v1/reconcile?limit=100", TOKEN).await.unwrap().json();
    let logged = findings(&log);
    assert_eq!(logged.len() as u64, 5 * count(20, 1));
    assert!(logged.iter().all(|(_, _, outcome)| outcome == "repaired"), "{logged:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_are_repaired_under_load_on_mariadb() {
    differences_are_repaired_under_load(Kind::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_are_repaired_under_load_on_postgres() {
    differences_are_repaired_under_load(Kind::Postgres).await;
}

/// Nodes find differences by themselves, one node at a time; the commands show what was repaired, and rebuild the gate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_reconcile_by_themselves_and_operators_by_command() {
    let nodes = Nodes::start_with(Kind::Postgres, 2, |_, command| with_reconcile(command, 300));
    let sale = nodes.create_sale(5).await;
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let history = Arc::new(Recorder::default());
    let mut client = nodes.shops[0].client().await;
    let bought = history.buy(&mut client, sale, &buyers[0]).await.order.unwrap();
    let ghost = OrderId::new(bought.get() + 1).unwrap().to_string();
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    ask(&["hset", &key(&nodes, sale, "live"), "4000000000000000001", &ghost]);
    let target = format!("http://{}", nodes.shops[0].address);
    let run = |args: &[&str]| {
        let mut command = stampede(args);
        command.args(["--target", &target]).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    until("a node has repaired it", async || run(&["reconcile", "--log"]).1.contains("mark_without_row")).await;
    let (code, log) = run(&["reconcile", "--log"]);
    assert_eq!(code, Some(0));
    assert!(log.contains(&ghost) && log.contains("repaired") && log.contains("1 line(s)"), "{log}");
    let (code, text) = run(&["reconcile", "--dry-run"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("nothing differs"), "{text}");
    let before = nodes.shops[0].metric("stampede_gate_rebuilds_total").await;
    let (code, text) = run(&["rebuild"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("the gate was rebuilt"), "{text}");
    assert_eq!(nodes.shops[0].metric("stampede_gate_rebuilds_total").await, before + 1.0);
    until("the sale is open again", async || {
        history.buy(&mut client, sale, &buyers[1]).await.response == Response::Created
    })
    .await;
    verify_without_history(&nodes, sale).await;
}

/// Orders that are on their way for seconds are found by no comparison: their entry in the outbox says that they are not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_on_their_way_are_not_repaired() {
    // Neither node settles an order before the other one has compared gate and ledger several times.
    let slow = "buy.admitted=pause:1500;outbox.settle=pause:1000";
    let nodes = Nodes::start_with(Kind::MariaDb, 2, |n, command| {
        let mut command = with_reconcile(command, 200);
        if n == 1 {
            command.env("STAMPEDE_FAILPOINTS", slow);
        }
        command
    });
    let buyers = nodes.shops[0].log_in(0, 12).await;
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    for _ in 0..count(20, 1) {
        let sale = nodes.create_sale(8).await;
        let (history, outbox) = (Arc::new(Recorder::default()), key(&nodes, sale, "out"));
        let tasks: Vec<_> = buyers
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
        until("an order is on its way", async || ask(&["xlen", &outbox]) != "0").await;
        let mut compared = 0;
        while tasks.iter().any(|task| !task.is_finished()) || ask(&["xlen", &outbox]) != "0" {
            assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), vec![]);
            compared += 1;
        }
        assert!(compared > 2, "{compared} comparisons");
        nodes.storm(&history, sale, &buyers, 1).await;
        let shops: Vec<&Shop> = nodes.shops.iter().collect();
        assert_eq!(verify(&history, &nodes.storages[0], &shops, sale).await, 8);
    }
    let log = nodes.shops[0].client().await.get("/admin/v1/reconcile", TOKEN).await.unwrap().json();
    assert_eq!(findings(&log), vec![], "nothing was repaired");
}

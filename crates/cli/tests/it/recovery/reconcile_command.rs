//! `stampede reconcile` and `stampede rebuild`: what operators see of differences between gate and ledger, and do about them.

use std::sync::Arc;

use stampede_core::{OrderId, UserId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::proof::stampede;
use crate::shared::Nodes;
use crate::shop::{Kind, TOKEN, read_only};

use super::drift::{GHOST, key, note_request, start, with_reconcile};

/// Runs a command with the first node as its target, and returns its exit code and what it printed.
fn run(nodes: &Nodes, args: &[&str]) -> (Option<i32>, String) {
    let mut command = stampede(args);
    command.args(["--target", &format!("http://{}", nodes.shops[0].address)]).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
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
    note_request(&history, sale, UserId::new(GHOST).unwrap());
    ask(&["hset", &key(&nodes, sale, "live"), &GHOST.to_string(), &ghost]);
    let run = |args: &[&str]| run(&nodes, args);
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
    assert_eq!(nodes.verify(&history, sale).await, 3);
}

/// A dry run reports what differs, exits with 1, and changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_reports_a_difference_and_repairs_nothing() {
    let nodes = start(Kind::Postgres);
    let (buyers, sale) = (nodes.shops[0].log_in(0, 1).await, nodes.create_sale(5).await);
    let history = Recorder::default();
    let bought = history.buy(&mut nodes.shops[0].client().await, sale, &buyers[0]).await.order.unwrap();
    // The next id of the same millisecond, which is not used.
    let ghost = OrderId::new(bought.get() + 1).unwrap();
    let (live, user, order) = (key(&nodes, sale, "live"), GHOST.to_string(), ghost.to_string());
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    note_request(&history, sale, UserId::new(GHOST).unwrap());
    ask(&["hset", &live, &user, &order]);
    let ledger = read_only(&nodes.storages[0]).await;
    for _ in 0..2 {
        let (code, text) = run(&nodes, &["reconcile", "--dry-run"]);
        assert_eq!(code, Some(1), "{text}");
        for part in ["mark_without_row", "reported", &order, "1 difference(s)"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(ask(&["hget", &live, &user]), order, "the mark is still there");
        assert_eq!(ledger.order(ghost).await.unwrap(), None, "the order is not recorded");
        let (code, log) = run(&nodes, &["reconcile", "--log"]);
        assert_eq!(code, Some(0), "{log}");
        assert!(log.contains("0 line(s)"), "{log}");
    }

    let (code, text) = run(&nodes, &["reconcile"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("repaired") && text.contains("1 difference(s)"), "{text}");
    let recorded = ledger.order(ghost).await.unwrap().map(|order| order.id);
    assert_eq!(recorded, Some(ghost));
    ledger.close().await;
    let (code, text) = run(&nodes, &["reconcile", "--dry-run"]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

//! Recovery in the tier `shared`: differences between gate and ledger are repaired while sales run, and alerts reach operators.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::{Value, json};
use sha2::Sha256;
use stampede_core::{OrderId, SaleId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, redis, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::proof::stampede;
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, default_settings, ledger};

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
fn key(nodes: &Nodes, sale: SaleId, part: &str) -> String {
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
fn findings(report: &Value) -> Vec<(String, String, String)> {
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
        ask(&["hset", &live, "4000000000000000001", "4000000000000000002"]);
        ask(&["hset", &key(&nodes, sale, "sale"), "cap", "600"]);
        let mut expected = [
            ("cap_differs".to_owned(), String::new()),
            ("dead_row_with_mark".to_owned(), dead.to_string()),
            ("mark_without_row".to_owned(), "4000000000000000002".to_owned()),
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

        // A live row without a mark: the whole gate is rebuilt.
        ask(&["hdel", &live, &victims[1].id.to_string()]);
        let lost = ("live_row_without_mark".to_owned(), orders[1].to_string(), "repaired".to_owned());
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), [lost]);
        let live = key(&nodes, sale, "live");
        assert_eq!(ask(&["hget", &live, &victims[1].id.to_string()]), orders[1].to_string());
        stop.store(true, Ordering::Relaxed);
        for task in load {
            task.await.unwrap();
        }
        for shop in &nodes.shops {
            until("the node is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200)
                .await;
        }
        assert_eq!(findings(&reconcile(&nodes.shops[0], true).await), vec![], "nothing is left");
    }
    let log = nodes.shops[1].client().await.get("/admin/v1/reconcile?limit=100", TOKEN).await.unwrap().json();
    let logged = findings(&log);
    assert_eq!(logged.len() as u64, 4 * count(20, 1));
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
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    ask(&["hset", &key(&nodes, sale, "live"), "4000000000000000001", "4000000000000000002"]);
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
    assert!(log.contains("4000000000000000002") && log.contains("repaired") && log.contains("1 line(s)"), "{log}");
    let (code, text) = run(&["reconcile", "--dry-run"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("nothing differs"), "{text}");
    let before = nodes.shops[0].metric("stampede_gate_rebuilds_total").await;
    let (code, text) = run(&["rebuild"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("the gate was rebuilt"), "{text}");
    assert_eq!(nodes.shops[0].metric("stampede_gate_rebuilds_total").await, before + 1.0);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let history = Arc::new(Recorder::default());
    let mut client = nodes.shops[0].client().await;
    until("the sale is open again", async || {
        history.buy(&mut client, sale, &buyer).await.response == Response::Created
    })
    .await;
}

/// Accepts requests, and returns the signature and the body of each.
async fn receiver() -> (SocketAddr, mpsc::Receiver<(String, String)>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, received) = mpsc::channel(10);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = Vec::new();
            let (head, body) = loop {
                assert_ne!(stream.read_buf(&mut bytes).await.unwrap(), 0, "no whole request");
                let text = String::from_utf8(bytes.clone()).unwrap();
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let length = |line: &str| line.to_lowercase().strip_prefix("content-length:")?.trim().parse().ok();
                if head.lines().find_map(length) == Some(body.len()) {
                    break (head.to_owned(), body.to_owned());
                }
            };
            let signature =
                |line: &str| Some(line.to_lowercase().strip_prefix("x-stampede-signature:")?.trim().to_owned());
            let signature = head.lines().find_map(signature).unwrap();
            let _ = tell.send((signature, body)).await;
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        }
    });
    (address, received)
}

/// Marks that cannot be released are reported to the webhook and to the phones, once, and are in the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn people_are_told_once_of_what_needs_them() {
    const SECRET: &str = "a-secret-of-the-operator";
    let (alerts, mut alerted) = receiver().await;
    let (messages, mut messaged) = receiver().await;
    let settings = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), "[alerts]\nphones = [\"13900139000\"]\n").unwrap();
    // One demonstration node, which shows login codes; then two that send them.
    let mut nodes = Nodes::start(Kind::Postgres, 1);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(5).await;
    let history = Recorder::default();
    let order = history.buy(&mut nodes.shops[0].client().await, sale, &buyer).await.order.unwrap();
    assert!(nodes.shops.remove(0).stop().success());
    let url = nodes.storages[0].url();
    let storages = [Storage::with(Some(url.clone())), Storage::with(Some(url))];
    nodes.shops = storages
        .iter()
        .map(|storage| {
            let mut command = default_settings(storage);
            command.args(["--database", &storage.url()]);
            command
                .args(["--tier", "shared", "--redis", &redis::url(nodes.redis.port()), "--config"])
                .arg(settings.path());
            command.env("STAMPEDE__ALERTS__WEBHOOK_URL", format!("http://{alerts}/alerts"));
            command.env("STAMPEDE_ALERT_SECRET", SECRET).env("STAMPEDE_WEBHOOK_SECRET", SECRET);
            command.env("STAMPEDE__LOGIN__SENDER", "webhook");
            command.env("STAMPEDE__LOGIN__WEBHOOK_URL", format!("http://{messages}/messages"));
            Shop::run(command)
        })
        .collect();
    // Releases fail, because the nodes may not call scripts. So does everything else that they do there.
    let live = key(&nodes, sale, "live");
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    ask(&["acl", "setuser", "default", "-evalsha"]);
    let stores = ledger(&nodes.storages[0]).await;
    let now = stampede_core::Clock::now(&stampede_core::SystemClock);
    stores.ledger.cancel(order, buyer.id, now).await.unwrap();
    let (signature, body) = tokio::time::timeout(Duration::from_secs(120), alerted.recv()).await.unwrap().unwrap();
    let told: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (told["alert"].as_str(), told["about"].as_str()),
        (Some("release_failed"), Some(&*format!("sale {sale}")))
    );
    let (seconds, hex) = signature.strip_prefix("t=").unwrap().split_once(",v1=").unwrap();
    let mut mac: Hmac<Sha256> = Hmac::new_from_slice(SECRET.as_bytes()).unwrap();
    mac.update(format!("{seconds}.{body}").as_bytes());
    let expected: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expected);
    let (_, body) = tokio::time::timeout(Duration::from_secs(10), messaged.recv()).await.unwrap().unwrap();
    let message: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(message["phone"], "13900139000");
    let text = message["text"].as_str().unwrap();
    assert!(text.contains("release_failed") && text.contains(&sale.to_string()), "{text}");
    ask(&["acl", "setuser", "default", "+evalsha"]);
    until("the mark is released", async || ask(&["hexists", &live, &buyer.id.to_string()]) != "1").await;
    let log = nodes.shops[1].client().await.get("/admin/v1/reconcile", TOKEN).await.unwrap().json();
    assert!(findings(&log).iter().any(|(what, _, outcome)| what == "release_failed" && outcome == "failed"), "{log}");
    assert!(alerted.try_recv().is_err(), "two nodes failed to release it, and one has told");
}

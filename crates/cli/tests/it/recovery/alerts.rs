//! Cases that need a person reach the operators.

use std::net::SocketAddr;
use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::Value;
use sha2::Sha256;
use stampede_core::{OrderId, UserId};
use stampede_proof::history::{Action, Attempt, Response};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::quarantine::{execute, quarantine, reject_orders_of};
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage, TOKEN, default_settings, ledger};

use super::drift::{findings, key, reconcile};

const SECRET: &str = "a-secret-of-the-operator";

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

/// The next request whose body is not of another case.
async fn received(
    requests: &mut mpsc::Receiver<(String, String)>,
    timeout: Duration,
    is_other: impl Fn(&str) -> bool,
) -> (String, String) {
    let next = async {
        loop {
            let (signature, body) = requests.recv().await.unwrap();
            if !is_other(&body) {
                return (signature, body);
            }
        }
    };
    tokio::time::timeout(timeout, next).await.unwrap()
}

/// Marks that cannot be released are reported to the webhook and to the phones, once, and are in the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_get_one_alert_for_each_case() {
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
    // As if the buyer had cancelled it, and the node had died before it answered.
    let (action, user, start_us) = (Action::Cancel, buyer.id, u64::try_from(now.ms()).unwrap() * 1000);
    let (end_us, response, order) = (u64::MAX, Response::Unknown, Some(order));
    history.add(Attempt { action, sale, user, start_us, end_us, response, order });
    // The missing right itself is another case, with an alert of its own.
    let is_other = |body: &str| body.contains("redis_unsuitable");
    let (signature, body) = received(&mut alerted, Duration::from_secs(120), is_other).await;
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
    let (_, body) = received(&mut messaged, Duration::from_secs(10), is_other).await;
    let message: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(message["phone"], "13900139000");
    let text = message["text"].as_str().unwrap();
    assert!(text.contains("release_failed") && text.contains(&sale.to_string()), "{text}");
    ask(&["acl", "setuser", "default", "+evalsha"]);
    until("the mark is released", async || ask(&["hexists", &live, &buyer.id.to_string()]) != "1").await;
    let log = nodes.shops[1].client().await.get("/admin/v1/reconcile", TOKEN).await.unwrap().json();
    assert!(findings(&log).iter().any(|(what, _, outcome)| what == "release_failed" && outcome == "failed"), "{log}");
    while let Ok((_, body)) = alerted.try_recv() {
        assert!(is_other(&body), "two nodes failed to release it, and one has reported it: {body}");
    }
    assert_eq!(nodes.verify(&history, sale).await, 0);
}

/// An order stays in quarantine: one of the nodes repeats the alert until it is discarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_that_persists_is_told_again() {
    let (alerts, mut alerted) = receiver().await;
    let nodes = Nodes::start_with(Kind::Postgres, 2, |_, mut command| {
        command.env("STAMPEDE__ALERTS__WEBHOOK_URL", format!("http://{alerts}/alerts"));
        command.env("STAMPEDE_ALERT_SECRET", SECRET);
        command.env("STAMPEDE__ALERTS__REPEAT_AFTER_MS", "2000");
        command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "500");
        command
    });
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(5).await;
    execute(Kind::Postgres, &nodes.storages[0], &reject_orders_of(Kind::Postgres, &[buyer.id])).await;
    let history = Recorder::default();
    history.buy(&mut nodes.shops[0].client().await, sale, &buyer).await;
    for _ in 0..3 {
        let (_, body) = received(&mut alerted, Duration::from_secs(30), |_| false).await;
        let told: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (told["alert"].as_str(), told["about"].as_str()),
            (Some("quarantined"), Some(&*format!("sale {sale}")))
        );
    }
    let order = quarantine(&nodes.shops[0]).await.remove(0)["id"].as_str().unwrap().to_owned();
    let discarded = nodes.shops[0].admin(&format!("quarantine/{order}/discard"), &Value::Null).await;
    assert_eq!(discarded.status, 200, "{:?}", discarded.body);
    assert_eq!(nodes.verify(&history, sale).await, 0);
}

/// How many alerts of this kind the nodes have sent.
pub(super) async fn sent(nodes: &Nodes, alert: &str) -> f64 {
    sum(nodes, &format!("stampede_alerts_total{{alert=\"{alert}\"}}")).await
}

/// The sum of a metric of all nodes, which appears with its first value.
pub(super) async fn sum(nodes: &Nodes, name: &str) -> f64 {
    let name = format!("{name} ");
    let mut sum = 0.0;
    for shop in &nodes.shops {
        let metrics = shop.client().await.get("/metrics", TOKEN).await.unwrap();
        let text = String::from_utf8(metrics.body.to_vec()).unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix(name.as_str()));
        sum += value.map_or(0.0, |value| value.parse::<f64>().unwrap());
    }
    sum
}

/// Two repairs of a sale fail, two of its orders go into quarantine, and Redis gets a setting with which it must not be used. Both nodes
/// notice each of the three cases, and one of them sends an alert.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_notice_the_same_case_send_one_alert() {
    let (alerts, mut alerted) = receiver().await;
    let nodes = Nodes::start_with(Kind::Postgres, 2, |_, mut command| {
        command.env("STAMPEDE__ALERTS__WEBHOOK_URL", format!("http://{alerts}/alerts"));
        command.env("STAMPEDE_ALERT_SECRET", SECRET);
        command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000");
        command.env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "20");
        command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "500");
        command
    });
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(5).await;
    let history = Recorder::default();
    let bought = history.buy(&mut nodes.shops[0].client().await, sale, &buyer).await.order.unwrap();
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();

    // Marks without a row, whose orders the database rejects. Each node finds one of them, and has to put its order into quarantine.
    let user = UserId::new(4_000_000_000_000_000_001).unwrap();
    execute(Kind::Postgres, &nodes.storages[0], &reject_orders_of(Kind::Postgres, &[user])).await;
    let live = key(&nodes, sale, "live");
    // The next ids of the same millisecond, which are not used.
    let ghosts = [1, 2].map(|n| OrderId::new(bought.get() + n).unwrap().to_string());
    for (n, (shop, ghost)) in nodes.shops.iter().zip(&ghosts).enumerate() {
        ask(&["hset", &live, &user.to_string(), ghost]);
        let failed = ("mark_without_row".to_owned(), ghost.clone(), "failed".to_owned());
        assert_eq!(findings(&reconcile(shop, false).await), [failed]);
        until("the order is in quarantine", async || quarantine(shop).await.len() == n + 1).await;
        until("this node has put it there", async || shop.metric("stampede_quarantined_total").await == 1.0).await;
    }
    for ghost in &ghosts {
        let discarded = nodes.shops[0].admin(&format!("quarantine/{ghost}/discard"), &Value::Null).await;
        assert_eq!(discarded.status, 200, "{:?}", discarded.body);
    }
    until("the mark is released", async || ask(&["hexists", &live, &user.to_string()]) == "0").await;

    ask(&["config", "set", "maxmemory-policy", "allkeys-lru"]);
    ask(&["script", "flush"]);
    for shop in &nodes.shops {
        until("the node says why it does not sell", async || {
            shop.client().await.get("/readyz", "").await.unwrap().text("detail").contains("allkeys-lru")
        })
        .await;
    }
    ask(&["config", "set", "maxmemory-policy", "noeviction"]);
    for shop in &nodes.shops {
        until("the sale is open again", async || {
            history.buy(&mut shop.client().await, sale, &buyer).await.order == Some(bought)
        })
        .await;
    }

    let mut told = Vec::new();
    for _ in 0..3 {
        let (_, body) = received(&mut alerted, Duration::from_secs(10), |_| false).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        told.push((body["alert"].as_str().unwrap().to_owned(), body["about"].as_str().unwrap().to_owned()));
    }
    told.sort();
    assert_eq!(told[0], ("quarantined".to_owned(), format!("sale {sale}")));
    assert_eq!(told[1].0, "redis_unsuitable");
    assert!(told[1].1.starts_with("gate: Redis evicts keys"), "{told:?}");
    assert_eq!(told[2], ("repair_failed".to_owned(), format!("sale {sale} mark_without_row")));
    assert_eq!(nodes.verify(&history, sale).await, 1);
    for (alert, _) in &told {
        assert_eq!(sent(&nodes, alert).await, 1.0, "{alert}");
    }
    assert!(alerted.try_recv().is_err(), "the webhook gets each of them once");
}

//! Cases that need a person reach the operators.

use std::net::SocketAddr;
use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::Value;
use sha2::Sha256;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage, TOKEN, default_settings, ledger};

use super::drift::{findings, key, verify_without_history};

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
    verify_without_history(&nodes, sale).await;
}

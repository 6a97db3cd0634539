//! Orders are paid, by signed callbacks and by the provider for tests.

use std::sync::Arc;
use std::time::Duration;

use hmac::{Hmac, KeyInit as _, Mac as _};
use http_body_util::Full;
use hyper::Request;
use hyper::header::{CONTENT_TYPE, HOST};
use serde_json::{Value, json};
use sha2::Sha256;
use stampede_core::{Clock as _, SystemClock};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Reply, count, until};

use super::deadline::{create_sale, unpaid_left};
use super::history::buy_recorded;
use super::{System, TierKind, in_each_tier};
use crate::receiver::Receiver;
use crate::shop::{Kind, Shop, command, default_settings, temporary_storage, verify};

/// Reports a payment, signed with this key `age_s` seconds ago.
pub async fn report(client: &mut Client, key: &str, age_s: i64, body: &Value) -> Reply {
    try_report(client, key, age_s, body).await.unwrap()
}

/// Like [`report`]; `None` if the node does not answer.
pub async fn try_report(client: &mut Client, key: &str, age_s: i64, body: &Value) -> Option<Reply> {
    let body = body.to_string();
    send(client, signature(key, age_s, &body), body).await
}

/// The signature of a callback that was signed with this key `age_s` seconds ago.
pub fn signature(key: &str, age_s: i64, body: &str) -> String {
    let seconds = SystemClock.now().ms() / 1000 - age_s;
    let mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).unwrap();
    let mac = mac.chain_update(format!("{seconds}.{body}").as_bytes()).finalize().into_bytes();
    let hex: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t={seconds},v1={hex}")
}

/// Sends a callback; `None` if the node does not answer.
pub async fn send(client: &mut Client, signature: String, body: String) -> Option<Reply> {
    let request = Request::post("/v1/payments/callback")
        .header(HOST, "localhost")
        .header(CONTENT_TYPE, "application/json")
        .header("x-stampede-signature", signature)
        .body(Full::from(body))
        .unwrap();
    client.send(request).await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_signed_callbacks_of_the_right_amount_pay() {
    let keys = ["the-key-in-use-0123456789abcdef-0123", "the-next-key-0123456789abcdef-012345"];
    let storage = temporary_storage();
    let mut command = command(&storage);
    let files: Vec<_> = (0..2).map(|n| storage.path().join(format!("key{n}"))).collect();
    for (file, key) in files.iter().zip(keys) {
        std::fs::write(file, format!("{key}\n")).unwrap();
    }
    let config = storage.path().join("settings.toml");
    std::fs::write(&config, format!("[payments]\ncallback_key_files = {files:?}\n")).unwrap();
    command.arg("--config").arg(&config);
    let shop = Shop::run(command);
    let sale = shop.create_sale(5).await;
    let buyers = shop.log_in(0, 3).await;
    let mut orders = Vec::new();
    for buyer in &buyers {
        orders.push(buy_recorded(&shop, sale, buyer).await);
    }
    let mut client = shop.client().await;
    let callback = |transaction: &str, order: &str, cents: i64| json!({ "transaction_id": transaction, "order_id": order, "amount_cents": cents });
    let status = async |n: usize| {
        let order: &String = &orders[n];
        shop.client().await.get(&format!("/v1/orders/{order}"), &buyers[n].token).await.unwrap().text("status")
    };
    let good = callback("a", &orders[0], 100);
    for (key, age_s) in [("another-key-0123456789abcdef-0123456", 0), (keys[0], 400), (keys[0], -400)] {
        let refused = report(&mut client, key, age_s, &good).await;
        assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (401, "unauthorized"));
        assert!(refused.text("detail").contains("x-stampede-signature"), "a provider cannot log in: {refused:?}");
    }
    let alerted = "stampede_alerts_total{alert=\"callback_refused\"} 1\n";
    until("an operator is told of signed callbacks that are refused", async || shop.has_metric(alerted).await).await;
    let unsigned = client.post("/v1/payments/callback", "", &good).await.unwrap();
    assert_eq!(unsigned.status, 401);
    assert_eq!(unsigned.text("detail"), "the header x-stampede-signature is missing, not valid, or too old");
    assert_eq!(status(0).await, "unpaid");

    let paid = report(&mut client, keys[0], 0, &good).await;
    assert_eq!((paid.status.as_u16(), paid.json()), (200, json!({ "status": "paid", "reason": null })));
    // The same again, with the other key: the same response.
    let again = report(&mut client, keys[1], 0, &good).await;
    assert_eq!((again.status, again.json()), (paid.status, paid.json()));
    assert_eq!(status(0).await, "paid");
    let reused = report(&mut client, keys[0], 0, &callback("a", &orders[1], 100)).await;
    assert_eq!(reused.text("code"), "request_id_reused");
    let alerted = "stampede_alerts_total{alert=\"transaction_reused\"} 1\n";
    until("an operator is told of a transaction id that is used twice", async || shop.has_metric(alerted).await).await;
    for (transaction, order, cents, reason) in [
        ("b", orders[1].as_str(), 99, "wrong_amount"),
        ("c", "12345", 100, "unknown_order"),
        ("d", orders[0].as_str(), 100, "already_paid"),
    ] {
        let kept = report(&mut client, keys[0], 0, &callback(transaction, order, cents)).await;
        assert_eq!(kept.json(), json!({ "status": "refund_due", "reason": reason }));
    }
    assert_eq!(status(1).await, "unpaid");
    client.post(&format!("/v1/orders/{}/cancel", orders[2]), &buyers[2].token, &Value::Null).await.unwrap();
    let late = report(&mut client, keys[0], 0, &callback("e", &orders[2], 100)).await;
    assert_eq!(late.json(), json!({ "status": "refund_due", "reason": "order_ended" }));
    assert_eq!(status(2).await, "refunding");
    until("each needs an operator", async || shop.has_metric("stampede_alerts_total{alert=\"refund_due\"} 4\n").await)
        .await;
    for invalid in [
        json!({}),
        callback("", &orders[1], 100),
        callback("a b", &orders[1], 100),
        callback("f", "x", 1),
        callback("f", &orders[1], -1),
    ] {
        assert_eq!(report(&mut client, keys[0], 0, &invalid).await.text("code"), "invalid_request", "{invalid}");
    }
}

/// A provider that reports many payments from one address is not limited, whatever others send from there. What has no valid signature is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_callbacks_without_a_valid_signature_are_limited() {
    const KEY: &str = "the-key-in-use-0123456789abcdef-0123";
    const LIMIT: usize = 20;
    let storage = temporary_storage();
    let mut command = default_settings(&storage);
    let (key, config) = (storage.path().join("key"), storage.path().join("settings.toml"));
    std::fs::write(&key, KEY).unwrap();
    let limit = format!("[limits]\nreads_per_address = {{ count = {LIMIT}, window_ms = 3600000 }}\n");
    std::fs::write(&config, format!("[payments]\ncallback_key_files = [{key:?}]\n{limit}")).unwrap();
    command.arg("--config").arg(&config);
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let callback = |n: usize| json!({ "transaction_id": n.to_string(), "order_id": "12345", "amount_cents": 1 });
    let is_recorded = |reply: Reply| reply.json() == json!({ "status": "refund_due", "reason": "unknown_order" });
    for n in 0..2 * LIMIT {
        assert!(is_recorded(report(&mut client, KEY, 0, &callback(n)).await), "{n}");
    }
    let good = callback(0);
    let mut answers = Vec::new();
    for n in 0..LIMIT + 4 {
        let mut client = shop.client().await;
        let refused = match n % 4 {
            0 => report(&mut client, "another-key-0123456789abcdef-0123456", 0, &good).await,
            1 => report(&mut client, KEY, 400, &good).await,
            2 => client.post("/v1/payments/callback", "", &good).await.unwrap(),
            // A body that is too long is not read, whatever its signature.
            _ => report(&mut client, KEY, 0, &json!({ "transaction_id": "x".repeat(20_000) })).await,
        };
        answers.push(refused.status.as_u16());
    }
    let (first, further) = answers.split_at(LIMIT);
    assert_eq!(first, [401, 401, 401, 413].repeat(LIMIT / 4), "and none of the signed ones was counted");
    assert_eq!(further, [429; 4]);
    assert!(is_recorded(report(&mut client, KEY, 0, &callback(2 * LIMIT)).await), "signed callbacks are answered");
}

/// A callback that a valid key has signed and that cannot be recorded is told to an operator. What nobody has signed is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signed_callback_without_valid_content_raises_an_alert() {
    let key = "the-key-in-use-0123456789abcdef-0123";
    let (storage, operator) = (temporary_storage(), Receiver::start(204).await);
    let (file, config) = (storage.path().join("key"), storage.path().join("settings.toml"));
    std::fs::write(&file, key).unwrap();
    let url = format!("http://{}/alerts", operator.address);
    let settings = format!("[payments]\ncallback_key_files = [{file:?}]\n[alerts]\nwebhook_url = \"{url}\"\n");
    std::fs::write(&config, settings).unwrap();
    let mut command = command(&storage);
    command.arg("--config").arg(&config).env("STAMPEDE_ALERT_SECRET", "a-secret-of-the-operator");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let raised = async || shop.has_metric("stampede_alerts_total{alert=\"callback_refused\"} 1\n").await;
    let negative = json!({ "transaction_id": "a", "order_id": "1", "amount_cents": -1 });
    for age_s in [0, 400] {
        let forged = report(&mut client, "another-key-0123456789abcdef-0123456", age_s, &negative).await;
        assert_eq!(forged.text("code"), "unauthorized");
    }
    assert!(!raised().await, "nobody has signed it");
    assert_eq!(report(&mut client, key, 0, &negative).await.text("code"), "invalid_request");
    until("an alert is raised", raised).await;
    until("the operator gets it", async || !operator.received().is_empty()).await;
    let [alert] = operator.received().try_into().unwrap();
    let alert = alert.json().to_string();
    assert!(alert.contains("callback_refused") && alert.contains("amount_cents"), "{alert}");
}

/// Without the provider for tests, the route by which buyers pay does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buyers_pay_without_a_provider_only_where_that_is_enabled() {
    let is_described = async |shop: &Shop| {
        let document = shop.client().await.get("/openapi.json", "").await.unwrap().json();
        assert!(document["paths"]["/v1/orders/{id}/cancel"].is_object());
        document["paths"]["/v1/orders/{id}/pay"].is_object()
    };
    for (is_demo, is_enabled) in [(false, false), (false, true), (true, false)] {
        let storage = temporary_storage();
        let mut command = if is_demo { command(&storage) } else { default_settings(&storage) };
        command.env("STAMPEDE__PAYMENTS__TEST_PROVIDER", is_enabled.to_string());
        let shop = Shop::run(command);
        let paid = shop.client().await.post("/v1/orders/12345/pay", "", &Value::Null).await.unwrap();
        let exists = is_demo || is_enabled;
        let expected = if exists { (401, "unauthorized") } else { (404, "not_found") };
        assert_eq!((paid.status.as_u16(), paid.text("code").as_str()), expected, "{is_demo}, {is_enabled}");
        assert_eq!(is_described(&shop).await, exists, "{is_demo}, {is_enabled}");
    }
}

/// Half of the buyers pay. The others' orders expire, and are bought again, until everything is paid.
async fn stock_that_is_not_paid_is_sold_until_it_is(kind: Kind, tier: TierKind) {
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let system = System::start(kind, tier, nodes);
    let (buyers, stock) = (count(300, 30), count(100, 10) as u32);
    let buyers = system.shops[0].log_in(0, buyers).await;
    let sale = create_sale(&system, stock, Duration::from_secs(1)).await;
    let history = Arc::new(Recorder::default());
    let tasks: Vec<_> = buyers
        .into_iter()
        .enumerate()
        .map(|(n, buyer)| {
            let (history, address) = (history.clone(), system.shops[n % nodes].address);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                // Those who never pay give up after a while.
                for _ in 0..if n % 2 == 0 { 200 } else { 20 } {
                    let bought = history.buy(&mut client, sale, &buyer).await;
                    let order = bought.order.filter(|_| bought.response.is_confirmation());
                    if let Some(order) = order.filter(|_| n % 2 == 0) {
                        let pay = format!("/v1/orders/{order}/pay");
                        let paid = client.post(&pay, &buyer.token, &Value::Null).await.unwrap();
                        match (paid.status.as_u16(), paid.text("code").as_str()) {
                            (200, _) => return 1,
                            // Still in the queue, or it has expired.
                            (404, "no_such_order") | (409, "illegal_step") => {}
                            other => panic!("{other:?}"),
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                0
            })
        })
        .collect();
    let mut paid = 0;
    for task in tasks {
        paid += task.await.unwrap();
    }
    assert!(history.count(Response::Created) + history.count(Response::Pending) > 0);
    until("what was not paid has expired", async || unpaid_left(&system, sale).await == 0).await;
    let shops: Vec<&Shop> = system.shops.iter().collect();
    assert_eq!(verify(&history, &system.storages[0], &shops, sale).await, paid);
    assert_eq!(paid, stock as usize, "everything was sold to those who pay");
}

in_each_tier!(all: stock_that_is_not_paid_is_sold_until_it_is);

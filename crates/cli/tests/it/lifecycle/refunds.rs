//! Operators cancel, redeem and refund orders. Payments that cannot pay are returned by the provider.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Reply, until};

use super::deadline::create_sale;
use super::history::buy_recorded;
use super::payments::report;
use super::{System, TierKind, in_each_tier};
use crate::receiver::Receiver;
use crate::shop::{Buyer, Kind, Shop, TOKEN, command, temporary_storage, verify};

async fn status(shop: &Shop, order: &str, buyer: &Buyer) -> String {
    shop.client().await.get(&format!("/v1/orders/{order}"), &buyer.token).await.unwrap().text("status")
}

async fn pay(shop: &Shop, order: &str, buyer: &Buyer) {
    let path = format!("/v1/orders/{order}/pay");
    let paid = shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
    assert_eq!(paid.text("status"), "paid", "{paid:?}");
}

async fn redeem_code(shop: &Shop, order: &str, buyer: &Buyer) -> Reply {
    let path = format!("/v1/orders/{order}/redeem-code");
    shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap()
}

async fn redeem(shop: &Shop, order: &str, code: &str) -> Reply {
    shop.admin(&format!("orders/{order}/redeem"), &json!({ "code": code })).await
}

/// The actions about an order in the audit log, with their outcomes.
async fn audited(shop: &Shop, order: &str) -> Vec<(String, String)> {
    let path = format!("/admin/v1/audit?limit=100&target=order%20{order}");
    let log = shop.client().await.get(&path, TOKEN).await.unwrap().json();
    let text = |action: &Value, member: &str| action[member].as_str().unwrap_or_default().to_owned();
    let actions = log["actions"].as_array().unwrap().iter().rev();
    actions.map(|action| (text(action, "action"), text(action, "outcome"))).collect()
}

/// Waits until the gate sells what has been returned, and buys it.
async fn buy_returned(shop: &Shop, sale: SaleId, buyer: &Buyer) -> String {
    until("the returned stock can be bought", async || {
        let path = format!("/v1/sales/{sale}/orders");
        let bought = shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
        bought.status.is_success()
    })
    .await;
    buy_recorded(shop, sale, buyer).await
}

async fn operators_cancel_redeem_and_refund(kind: Kind, tier: TierKind) {
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let system = System::start(kind, tier, nodes);
    let (first, last) = (&system.shops[0], &system.shops[nodes - 1]);
    let buyers = first.log_in(0, 5).await;
    let sale = create_sale(&system, 2, Duration::from_secs(600)).await;
    let (redeemed, refunded) =
        (buy_recorded(first, sale, &buyers[0]).await, buy_recorded(last, sale, &buyers[1]).await);

    // A code is for paid orders, and only their owners see it.
    assert_eq!(redeem_code(first, &redeemed, &buyers[0]).await.text("code"), "illegal_step");
    assert_eq!(redeem(first, &redeemed, "00000000").await.text("code"), "illegal_step");
    for (order, buyer) in [(&redeemed, &buyers[0]), (&refunded, &buyers[1])] {
        pay(first, order, buyer).await;
    }
    assert_eq!(redeem_code(first, &redeemed, &buyers[1]).await.text("code"), "no_such_order");
    let code = redeem_code(first, &redeemed, &buyers[0]).await.text("code");
    assert_eq!(redeem_code(last, &redeemed, &buyers[0]).await.text("code"), code, "the same on every node");
    let wrong = if code == "00000000" { "00000001" } else { "00000000" };
    for _ in 0..5 {
        assert_eq!(redeem(first, &redeemed, wrong).await.text("code"), "wrong_code");
    }
    assert_eq!(redeem(last, &redeemed, &code).await.text("code"), "wrong_code", "it was tried five times");
    let code = redeem_code(first, &redeemed, &buyers[0]).await.text("code");
    // Two tills at once: one hands it out.
    let typed = format!("{}-{}", code[..4].to_lowercase(), &code[4..]);
    let both = join_all([redeem(first, &redeemed, &typed), redeem(last, &redeemed, &typed)]).await;
    let mut outcomes: Vec<_> = both.iter().map(|reply| reply.status.as_u16()).collect();
    outcomes.sort_unstable();
    assert_eq!(outcomes, [200, 409], "{both:?}");
    assert_eq!(status(last, &redeemed, &buyers[0]).await, "redeemed");
    assert_eq!(last.admin(&format!("orders/{redeemed}/refund"), &Value::Null).await.text("code"), "illegal_step");

    // A refund returns the money, and the stock.
    let refund = format!("orders/{refunded}/refund");
    assert_eq!(first.admin(&refund, &Value::Null).await.text("status"), "refunding");
    until("the payment is returned", async || status(last, &refunded, &buyers[1]).await == "refunded").await;
    assert_eq!(first.admin(&refund, &Value::Null).await.text("status"), "refunded", "again");
    let cancelled = buy_returned(last, sale, &buyers[2]).await;

    // An operator cancels an unpaid order.
    let cancel = format!("orders/{cancelled}/cancel");
    assert_eq!(last.admin(&cancel, &Value::Null).await.text("status"), "cancelled");
    buy_returned(first, sale, &buyers[3]).await;
    assert_eq!(first.admin("orders/12345/cancel", &Value::Null).await.text("code"), "no_such_order");

    let record = first.client().await.get(&format!("/admin/v1/orders/{refunded}"), TOKEN).await.unwrap().json();
    let steps: Vec<_> = record["events"].as_array().unwrap().iter().map(|step| (&step["to"], &step["by"])).collect();
    let expected = [("unpaid", "system"), ("paid", "provider"), ("refunding", "operator"), ("refunded", "provider")];
    assert_eq!(json!(steps), json!(expected), "{record}");
    assert_eq!(record["payments"][0]["status"], "refunded");
    assert_eq!(record["user_id"], json!(buyers[1].id));
    let lines = async |order: &str| {
        let lines = audited(first, order).await;
        lines.iter().map(|(action, outcome)| format!("{action}: {outcome}")).collect::<Vec<_>>()
    };
    assert_eq!(lines(&refunded).await, ["refund_order: done", "refund_order: unchanged"]);
    assert_eq!(lines(&cancelled).await, ["cancel_order: done"]);
    let mut redemption = lines(&redeemed).await;
    // Of the two tills, either one is first.
    redemption[7..9].sort_unstable();
    let mut expected = vec!["redeem_order: illegal_step"];
    expected.extend(["redeem_order: wrong_code"; 6]);
    expected.extend(["redeem_order: done", "redeem_order: illegal_step", "refund_order: illegal_step"]);
    assert_eq!(redemption, expected);
    let path = format!("/admin/v1/audit?target=order%20{cancelled}");
    let log = first.client().await.get(&path, TOKEN).await.unwrap().json();
    let changes = &log["actions"][0]["changes"];
    assert_eq!(changes, &json!([{ "field": "status", "from": "unpaid", "to": "cancelled" }]), "{log}");
    let viewer =
        last.client().await.post(&format!("/admin/v1/{cancel}"), &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!(viewer.status, 401, "buyers are no operators");

    let shops: Vec<&Shop> = system.shops.iter().collect();
    assert_eq!(verify(&Recorder::default(), &system.storages[0], &shops, sale).await, 2);
}

in_each_tier!(all: operators_cancel_redeem_and_refund);

const KEY: &str = "the-key-in-use-0123456789abcdef-0123";

/// A node whose payments come from callbacks with [`KEY`], with more settings of `[payments]`.
fn shop_with(settings: &str) -> (crate::shop::Storage, Shop) {
    let storage = temporary_storage();
    let (file, config) = (storage.path().join("key"), storage.path().join("settings.toml"));
    std::fs::write(&file, KEY).unwrap();
    std::fs::write(&config, format!("[payments]\ncallback_key_files = [{file:?}]\n{settings}")).unwrap();
    let mut command = command(&storage);
    command.arg("--config").arg(&config).env("STAMPEDE_REFUND_SECRET", "a-secret-of-the-operator");
    (storage, Shop::run(command))
}

async fn has_alert(shop: &Shop, kind: &str) -> bool {
    shop.has_metric(&format!("stampede_alerts_total{{alert=\"{kind}\"}} 1\n")).await
}

/// The provider is asked until it has returned a payment. After a few attempts an operator is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_payments_are_returned_by_the_provider() {
    let provider = Receiver::start(503).await;
    let url = format!("http://{}/refunds", provider.address);
    let (storage, shop) = shop_with(&format!("refund_url = \"{url}\"\nrefund_pause_ms = 20\nrefund_tries = 3\n"));
    let sale = shop.create_sale(1).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let order = buy_recorded(&shop, sale, &buyer).await;
    let mut client = shop.client().await;
    client.post(&format!("/v1/orders/{order}/cancel"), &buyer.token, &Value::Null).await.unwrap();
    let late = json!({ "transaction_id": "late", "order_id": order, "amount_cents": 100 });
    assert_eq!(report(&mut client, KEY, 0, &late).await.text("status"), "refund_due");
    until("an alert is raised", async || has_alert(&shop, "refund_failed").await).await;
    assert_eq!(status(&shop, &order, &buyer).await, "refunding");
    assert_eq!(provider.received().len(), 3);
    let sent = json!({ "transaction_id": "late", "order_id": order, "amount_cents": 100, "reason": "order_ended" });
    for message in provider.received() {
        assert_eq!(message.json(), sent);
        assert!(message.signature.starts_with("t="), "{message:?}");
    }
    let open = client.get("/admin/v1/refunds", TOKEN).await.unwrap().json();
    assert_eq!((&open["refunds"][0]["due_at"], &open["refunds"][0]["tries"]), (&Value::Null, &json!(3)), "{open}");
    assert!(open["refunds"][0]["error"].as_str().unwrap().contains("503"), "{open}");

    provider.answer_with(204);
    let payment = json!({ "provider": "callback", "transaction_id": "late" });
    assert_eq!(shop.admin("refunds/retry", &payment).await.status, 200);
    until("the payment is returned", async || status(&shop, &order, &buyer).await == "refunded").await;
    assert_eq!(shop.metric("stampede_refunds_total").await, 1.0);
    assert_eq!(shop.admin("refunds/retry", &payment).await.text("code"), "illegal_step");
    assert_eq!(client.get("/admin/v1/refunds", TOKEN).await.unwrap().json(), json!({ "refunds": [] }));
    assert_eq!(verify(&Recorder::default(), &storage, &[&shop], sale).await, 0);
}

/// The clock of the process jumps ahead by a day and back: the next attempts to return a payment are not a day away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_was_ahead_delays_no_refund() {
    let provider = Receiver::start(503).await;
    let url = format!("http://{}/refunds", provider.address);
    let storage = temporary_storage();
    let [key, config, clock] = ["key", "settings.toml", "clock"].map(|name| storage.path().join(name));
    std::fs::write(&key, KEY).unwrap();
    std::fs::write(&clock, "0").unwrap();
    let settings = format!("callback_key_files = [{key:?}]\nrefund_url = \"{url}\"\nrefund_pause_ms = 100\n");
    std::fs::write(&config, format!("[payments]\n{settings}")).unwrap();
    let mut command = command(&storage);
    command.arg("--config").arg(&config).env("STAMPEDE_REFUND_SECRET", "a-secret-of-the-operator");
    command.env("STAMPEDE_CLOCK_FILE", &clock);
    let shop = Shop::run(command);
    let payment = json!({ "transaction_id": "stray", "order_id": "12345", "amount_cents": 1 });
    assert_eq!(report(&mut shop.client().await, KEY, 0, &payment).await.text("status"), "refund_due");
    until("the provider is asked", async || !provider.received().is_empty()).await;
    std::fs::write(&clock, (24 * 3_600_000).to_string()).unwrap();
    let before = provider.received().len();
    until("the provider is asked again", async || provider.received().len() >= before + 2).await;
    std::fs::write(&clock, "0").unwrap();
    provider.answer_with(204);
    until("the payment is returned", async || shop.metric("stampede_refunds_total").await == 1.0).await;
    assert!(shop.stop().success());
}

/// An operator has returned the payment of this transaction.
async fn complete_refund(shop: &Shop, transaction: &str) {
    let payment = json!({ "provider": "callback", "transaction_id": transaction });
    assert_eq!(shop.admin("refunds/complete", &payment).await.text("status"), "refunded");
}

/// Several operators cancel, or refund, the same order at the same moment: each gets it, and the audit log says who has changed it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_is_audited_as_done_once() {
    let (storage, shop) = shop_with("");
    let buyers = shop.log_in(0, 12).await;
    let sale = shop.create_sale(buyers.len() as u32).await;
    let mut client = shop.client().await;
    for (n, buyer) in buyers.iter().enumerate() {
        let order = buy_recorded(&shop, sale, buyer).await;
        let (step, status, from) = match n % 2 {
            0 => ("cancel", "cancelled", "unpaid"),
            _ => ("refund", "refunding", "paid"),
        };
        if step == "refund" {
            let paid = json!({ "transaction_id": order, "order_id": order, "amount_cents": 100 });
            assert_eq!(report(&mut client, KEY, 0, &paid).await.text("status"), "paid");
        }
        let path = format!("orders/{order}/{step}");
        let replies = join_all((0..4).map(|_| shop.admin(&path, &Value::Null))).await;
        for reply in replies {
            assert_eq!((reply.status.as_u16(), reply.text("status").as_str()), (200, status), "{reply:?}");
        }
        let log = format!("/admin/v1/audit?limit=100&target=order%20{order}");
        let log = client.get(&log, TOKEN).await.unwrap().json();
        let (done, others): (Vec<_>, Vec<_>) =
            log["actions"].as_array().unwrap().iter().partition(|action| action["outcome"] == "done");
        assert_eq!((done.len(), others.len()), (1, 3), "{log}");
        assert_eq!(done[0]["changes"], json!([{ "field": "status", "from": from, "to": status }]));
        assert!(
            others.iter().all(|action| action["outcome"] == "unchanged" && action["changes"] == json!([])),
            "{log}"
        );
        if step == "refund" {
            complete_refund(&shop, &order).await;
        }
    }
    assert_eq!(verify(&Recorder::default(), &storage, &[&shop], sale).await, 0);
}

/// A cancelled order is paid late. Cancelling it again has the same result as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancellation_can_be_repeated_after_a_late_payment() {
    let (storage, shop) = shop_with("");
    let buyers = shop.log_in(0, 2).await;
    let sale = shop.create_sale(2).await;
    let (cancelled, paid) = (buy_recorded(&shop, sale, &buyers[0]).await, buy_recorded(&shop, sale, &buyers[1]).await);
    let mut client = shop.client().await;
    let cancel = format!("/v1/orders/{cancelled}/cancel");
    assert_eq!(client.post(&cancel, &buyers[0].token, &Value::Null).await.unwrap().text("status"), "cancelled");
    for order in [&cancelled, &paid] {
        let payment = json!({ "transaction_id": order, "order_id": order, "amount_cents": 100 });
        assert_eq!(report(&mut client, KEY, 0, &payment).await.status, 200);
    }
    shop.admin(&format!("orders/{paid}/refund"), &Value::Null).await;
    for expected in ["refunding", "refunded"] {
        let again = client.post(&cancel, &buyers[0].token, &Value::Null).await.unwrap();
        assert_eq!((again.status.as_u16(), again.text("status").as_str()), (200, expected), "{again:?}");
        let again = shop.admin(&format!("orders/{cancelled}/cancel"), &Value::Null).await;
        assert_eq!((again.status.as_u16(), again.text("status").as_str()), (200, expected), "{again:?}");
        let refused = client.post(&format!("/v1/orders/{paid}/cancel"), &buyers[1].token, &Value::Null).await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (409, "illegal_step"), "never cancelled");
        if expected == "refunding" {
            complete_refund(&shop, &cancelled).await;
        }
    }
    complete_refund(&shop, &paid).await;
    let unchanged = ("cancel_order".to_owned(), "unchanged".to_owned());
    assert_eq!(audited(&shop, &cancelled).await, [unchanged.clone(), unchanged]);
    assert_eq!(verify(&Recorder::default(), &storage, &[&shop], sale).await, 0);
}

/// Without a provider an operator returns payments, and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_return_payments_by_hand() {
    let (storage, shop) = shop_with("");
    let sale = shop.create_sale(1).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let order = buy_recorded(&shop, sale, &buyer).await;
    let mut client = shop.client().await;
    let paid = json!({ "transaction_id": "a", "order_id": order, "amount_cents": 100 });
    let answer = report(&mut client, KEY, 0, &paid).await;
    assert_eq!(answer.text("status"), "paid");
    let payment = json!({ "provider": "callback", "transaction_id": "a" });
    assert_eq!(shop.admin("refunds/complete", &payment).await.text("code"), "illegal_step", "it has paid");
    shop.admin(&format!("orders/{order}/refund"), &Value::Null).await;
    until("an alert is raised", async || has_alert(&shop, "refund_due").await).await;
    assert_eq!(shop.admin("refunds/complete", &payment).await.text("status"), "refunded");
    assert_eq!(shop.admin("refunds/complete", &payment).await.text("code"), "illegal_step", "once");
    assert_eq!(
        shop.admin("refunds/complete", &json!({ "provider": "callback", "transaction_id": "b" })).await.status,
        404
    );
    assert_eq!(status(&shop, &order, &buyer).await, "refunded");
    let again = report(&mut client, KEY, 0, &paid).await;
    assert_eq!((again.status, again.json()), (answer.status, answer.json()), "a repeated callback");
    assert_eq!(verify(&Recorder::default(), &storage, &[&shop], sale).await, 0);
}

//! Payments that arrive after their orders have expired, in a shop that admits them again.

use std::time::Duration;

use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::process::was_killed_by;
use stampede_testkit::until;
use tempfile::TempDir;

use super::deadline::{create_sale, create_sale_with};
use super::history::buy_recorded;
use super::payments::{report, try_report};
use super::{System, TierKind, in_each_tier};
use crate::receiver::Receiver;
use crate::shop::{Buyer, Kind, Shop, TOKEN, verify};

const KEY: &str = "the-key-in-use-0123456789abcdef-0123";
/// How long orders may be unpaid: long enough for a payment that is moved to a new one.
const DEADLINE: Duration = Duration::from_secs(3);
const SIGABRT: i32 = 6;

/// Nodes that admit late payments again, and the provider that returns the others.
struct Readmitting {
    system: System,
    provider: Receiver,
    _files: TempDir,
}

impl Readmitting {
    async fn start(kind: Kind, tier: TierKind, environment: &[(&'static str, &str)]) -> Self {
        let provider = Receiver::start(204).await;
        let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (key, config) = (files.path().join("key"), files.path().join("settings.toml"));
        std::fs::write(&key, KEY).unwrap();
        let url = format!("http://{}/refunds", provider.address);
        let settings = format!(
            "[payments]\ncallback_key_files = [{key:?}]\nlate = \"readmit\"\nrefund_url = \"{url}\"\nrefund_pause_ms = 50\n"
        );
        std::fs::write(&config, settings).unwrap();
        let mut environment: Vec<_> = environment.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        environment.push(("STAMPEDE_REFUND_SECRET", "a-secret-of-the-operator".to_owned()));
        let nodes = if tier == TierKind::Solo { 1 } else { 2 };
        let system = System::start_from(kind, tier, nodes, environment, Some(config));
        Self { system, provider, _files: files }
    }

    fn nodes(&self) -> Vec<&Shop> {
        self.system.shops.iter().collect()
    }

    /// The number of the node that gets the callbacks.
    fn last(&self) -> usize {
        self.system.shops.len() - 1
    }
}

fn late(transaction: &str, order: &str) -> Value {
    json!({ "transaction_id": transaction, "order_id": order, "amount_cents": 100 })
}

async fn status(shop: &Shop, order: &str, buyer: &Buyer) -> String {
    shop.client().await.get(&format!("/v1/orders/{order}"), &buyer.token).await.unwrap().text("status")
}

/// Buys, as soon as there is stock. Returns the id of the order.
async fn buy(history: &Recorder, shop: &Shop, sale: SaleId, buyer: &Buyer) -> String {
    let mut client = shop.client().await;
    let mut order = None;
    until("there is stock", async || {
        let bought = history.buy(&mut client, sale, buyer).await;
        order = bought.order.filter(|_| bought.response.is_confirmation());
        order.is_some()
    })
    .await;
    order.unwrap().to_string()
}

async fn let_expire(history: &Recorder, shop: &Shop, sale: SaleId, buyer: &Buyer) -> String {
    let order = buy(history, shop, sale, buyer).await;
    until("the order expires", async || status(shop, &order, buyer).await == "cancelled").await;
    order
}

/// Buys, and pays at once.
async fn buy_and_pay(history: &Recorder, shop: &Shop, sale: SaleId, buyer: &Buyer) -> String {
    let order = buy(history, shop, sale, buyer).await;
    let path = format!("/v1/orders/{order}/pay");
    until("it is paid", async || {
        shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap().status == 200
    })
    .await;
    order
}

/// The orders of a buyer, newest first, with their statuses.
async fn orders(shop: &Shop, buyer: &Buyer) -> Vec<(String, String)> {
    let page = shop.client().await.get("/v1/orders", &buyer.token).await.unwrap().json();
    let text = |order: &Value, member: &str| order[member].as_str().unwrap().to_owned();
    page["orders"].as_array().unwrap().iter().map(|order| (text(order, "id"), text(order, "status"))).collect()
}

async fn late_payment_pays_a_new_order(kind: Kind, tier: TierKind) {
    let shop = Readmitting::start(kind, tier, &[]).await;
    let (first, last) = (&shop.system.shops[0], &shop.system.shops[shop.last()]);
    let buyers = first.log_in(0, 2).await;
    let sale = create_sale(&shop.system, 1, DEADLINE).await;
    let history = Recorder::default();
    let ended = let_expire(&history, first, sale, &buyers[0]).await;
    let callback = late("late", &ended);
    let paid = report(&mut last.client().await, KEY, 0, &callback).await;
    let new = paid.text("order_id");
    assert_eq!(
        (paid.status.as_u16(), paid.json()),
        (200, json!({ "status": "paid", "reason": null, "order_id": new }))
    );
    assert_ne!(new, ended);
    for node in [first, last] {
        let again = report(&mut node.client().await, KEY, 0, &callback).await;
        assert_eq!((again.status, again.json()), (paid.status, paid.json()), "a repeated callback");
    }
    let reused = report(&mut first.client().await, KEY, 0, &late("late", &new)).await;
    assert_eq!(reused.text("code"), "request_id_reused");

    let expected = [(new.clone(), "paid".to_owned()), (ended.clone(), "cancelled".to_owned())];
    assert_eq!(orders(first, &buyers[0]).await, expected);
    for order in [&new, &ended] {
        let record = first.client().await.get(&format!("/admin/v1/orders/{order}"), TOKEN).await.unwrap().json();
        let payment = &record["payments"][0];
        assert_eq!((&payment["order_id"], &payment["reported_order_id"]), (&json!(new), &json!(ended)), "{record}");
        assert_eq!((&payment["status"], &payment["reason"]), (&json!("paid"), &Value::Null), "{record}");
    }
    assert_eq!(history.buy(&mut first.client().await, sale, &buyers[1]).await.response, Response::SoldOut);
    assert_eq!(last.metric("stampede_payments_readmitted_total").await, 1.0);
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 1);

    // A refund of the new order returns the payment under the order for which it was reported.
    let refund = first.admin(&format!("orders/{new}/refund"), &Value::Null).await;
    assert_eq!(refund.text("status"), "refunding", "{refund:?}");
    until("it is refunded", async || status(last, &new, &buyers[0]).await == "refunded").await;
    let [returned] = shop.provider.received().try_into().unwrap();
    let expected = json!({ "transaction_id": "late", "order_id": ended, "amount_cents": 100, "reason": "requested" });
    assert_eq!(returned.json(), expected);
    let again = report(&mut first.client().await, KEY, 0, &callback).await;
    assert_eq!((again.status, again.json()), (paid.status, paid.json()), "a repeated callback after the refund");
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 0);
}

async fn late_payment_that_finds_no_new_order_is_returned(kind: Kind, tier: TierKind) {
    let shop = Readmitting::start(kind, tier, &[]).await;
    let (first, last) = (&shop.system.shops[0], &shop.system.shops[shop.last()]);
    let buyers = first.log_in(0, 2).await;
    let returns = async |transaction: &str, order: &str| {
        let reply = report(&mut last.client().await, KEY, 0, &late(transaction, order)).await;
        assert_eq!(reply.json(), json!({ "status": "refund_due", "reason": "order_ended" }));
        until("the payment is returned", async || status(first, order, &buyers[0]).await == "refunded").await;
        let again = report(&mut first.client().await, KEY, 0, &late(transaction, order)).await;
        assert_eq!((again.status, again.json()), (reply.status, reply.json()), "a repeated callback");
    };

    // The stock was sold to someone else.
    let (sale, history) = (create_sale(&shop.system, 1, DEADLINE).await, Recorder::default());
    let ended = let_expire(&history, first, sale, &buyers[0]).await;
    let sold = buy_and_pay(&history, last, sale, &buyers[1]).await;
    returns("sold-out", &ended).await;
    assert_eq!(status(first, &sold, &buyers[1]).await, "paid");
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 1);

    // The buyer has bought again.
    let (sale, history) = (create_sale(&shop.system, 5, DEADLINE).await, Recorder::default());
    let ended = let_expire(&history, first, sale, &buyers[0]).await;
    let bought = buy_and_pay(&history, last, sale, &buyers[0]).await;
    returns("bought-again", &ended).await;
    assert_eq!(status(first, &bought, &buyers[0]).await, "paid");
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 1);
    assert_eq!(shop.provider.received().len(), 2, "{:?}", shop.provider.received());

    // Nobody may buy again in this sale.
    let members = json!({ "buy_again": false, "payment_deadline_ms": DEADLINE.as_millis() as u64 });
    let (sale, history) = (create_sale_with(&shop.system, 5, members).await, Recorder::default());
    let ended = let_expire(&history, first, sale, &buyers[0]).await;
    returns("forbidden", &ended).await;
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 0);
    assert_eq!(shop.provider.received().len(), 3, "{:?}", shop.provider.received());

    // The buyer's account is disabled.
    let (sale, history) = (create_sale(&shop.system, 5, DEADLINE).await, Recorder::default());
    let ended = let_expire(&history, first, sale, &buyers[1]).await;
    assert_eq!(first.admin(&format!("users/{}/disable", buyers[1].id), &Value::Null).await.status, 200);
    let reply = report(&mut last.client().await, KEY, 0, &late("disabled", &ended)).await;
    assert_eq!(reply.json(), json!({ "status": "refund_due", "reason": "order_ended" }));
    until("the payment is returned", async || shop.provider.received().len() == 4).await;
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 0);
}

/// A node dies after it has bought the new order, and before it moves the payment.
async fn payment_whose_node_dies_is_returned(kind: Kind, tier: TierKind) {
    let abort = ("STAMPEDE_FAILPOINTS", "payments.readmitted=abort");
    // A payment is held for six times the answer timeout.
    let environment = [abort, ("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "3000")];
    let mut shop = Readmitting::start(kind, tier, &environment).await;
    let n = shop.last();
    let buyers = shop.system.shops[0].log_in(0, 2).await;
    let sale = create_sale(&shop.system, 1, DEADLINE).await;
    let history = Recorder::default();
    let ended = let_expire(&history, &shop.system.shops[n], sale, &buyers[0]).await;
    let callback = late("late", &ended);
    let mut client = shop.system.shops[n].client().await;
    assert!(try_report(&mut client, KEY, 0, &callback).await.is_none(), "the node has answered");
    let ended_with = shop.system.shops[n].process.wait(Duration::from_secs(10)).unwrap();
    assert!(was_killed_by(ended_with, SIGABRT), "{ended_with:?}");

    shop.system.environment.retain(|variable| variable.0 != abort.0);
    shop.system.shops[n] = shop.system.run(n);
    shop.system.wait_for_sale(sale).await;
    let (first, last) = (&shop.system.shops[0], &shop.system.shops[n]);
    let returned = json!({ "status": "refund_due", "reason": "order_ended" });
    let known = report(&mut last.client().await, KEY, 0, &callback).await;
    // Not before it is decided, which it is once the hold is over.
    let is_undecided = known.text("code") == "outcome_unknown";
    assert!(is_undecided || known.json() == returned, "{known:?}");
    until("the payment is returned", async || status(first, &ended, &buyers[0]).await == "refunded").await;
    let again = report(&mut first.client().await, KEY, 0, &callback).await;
    assert_eq!((again.status.as_u16(), again.json()), (200, returned));
    assert_eq!(shop.provider.received().len(), 1);
    let is_expired = async || {
        let found = orders(first, &buyers[0]).await;
        found.len() == 2 && found[0].1 == "cancelled"
    };
    until("the new order has expired", is_expired).await;
    buy_and_pay(&history, first, sale, &buyers[1]).await;
    assert_eq!(verify(&history, &shop.system.storages[0], &shop.nodes(), sale).await, 1);
}

/// With a queue, the new order is recorded only after its payment had to be returned. The sale has no deadline.
async fn order_that_is_recorded_too_late_is_cancelled(kind: Kind, tier: TierKind) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hold");
    let held = file.with_extension("reached");
    let hold = format!("record.begin=hold:{}", file.display());
    let environment = [("STAMPEDE_FAILPOINTS", hold.as_str()), ("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "2000")];
    let shop = Readmitting::start(kind, tier, &environment).await;
    let (first, last) = (&shop.system.shops[0], &shop.system.shops[shop.last()]);
    let buyers = first.log_in(0, 2).await;
    let sale = create_sale(&shop.system, 1, Duration::ZERO).await;
    let history = Recorder::default();
    let ended = buy_recorded(first, sale, &buyers[0]).await;
    let cancel = format!("/v1/orders/{ended}/cancel");
    let cancelled = first.client().await.post(&cancel, &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!(cancelled.text("status"), "cancelled", "{cancelled:?}");

    std::fs::write(&file, "").unwrap();
    let reply = report(&mut last.client().await, KEY, 0, &late("late", &ended)).await;
    assert_eq!(reply.json(), json!({ "status": "refund_due", "reason": "order_ended" }));
    until("the payment is returned", async || status(first, &ended, &buyers[0]).await == "refunded").await;
    assert_eq!(orders(first, &buyers[0]).await.len(), 1, "the new order is not recorded");
    std::fs::remove_file(&held).unwrap();
    let is_cancelled = async || {
        let found = orders(first, &buyers[0]).await;
        found.len() == 2 && found[0].1 == "cancelled"
    };
    until("the new order is cancelled", is_cancelled).await;
    let path = format!("/v1/orders/{}/history", orders(first, &buyers[0]).await[0].0);
    let steps = first.client().await.get(&path, &buyers[0].token).await.unwrap().json();
    assert_eq!(steps["events"][1]["reason"], "payment_returned", "{steps}");
    buy_and_pay(&history, first, sale, &buyers[1]).await;
    assert_eq!(verify(&Recorder::default(), &shop.system.storages[0], &shop.nodes(), sale).await, 1);
}

macro_rules! with_a_queue {
    ($($test:ident: $kind:ident, $tier:ident;)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            order_that_is_recorded_too_late_is_cancelled(Kind::$kind, TierKind::$tier).await;
        })*
    };
}
with_a_queue!(
    order_that_is_recorded_too_late_is_cancelled_with_redis: MariaDb, Queued;
    order_that_is_recorded_too_late_is_cancelled_with_rabbitmq: Postgres, QueuedRabbitMq;
);

in_each_tier!(
    all: late_payment_pays_a_new_order,
    late_payment_that_finds_no_new_order_is_returned,
    payment_whose_node_dies_is_returned
);

//! Hostile and unusual callbacks of payments, many at once and over all nodes: none pays an order that it should not, and every payment that
//! was accepted ends paid or refunded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use stampede_core::{OrderStatus, PaymentStatus, SaleId};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Reply, count, until};

use super::deadline::create_sale_with;
use super::history::buy_recorded_with;
use super::payments::{report, send, signature};
use super::{System, TierKind, in_each_tier};
use crate::receiver::{Message, Receiver};
use crate::shop::{Buyer, Kind, Shop, read_only, verify};

/// How many buyers and their callbacks are under way at once.
const AT_ONCE: usize = 64;
/// The price of an order.
const CENTS: i64 = 100;
pub const KEY: &str = "the-key-in-use-0123456789abcdef-0123";
const OTHER_KEY: &str = "another-key-0123456789abcdef-0123456";
/// Signed so long ago, or ahead, that a callback is refused.
const OUTSIDE_S: i64 = 400;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// The signature is not that of the key and the body.
    Forged,
    /// The same again on both nodes at once, and later again.
    Replayed,
    /// Signed too long ago, or by a clock that is ahead.
    OutsideWindow,
    /// The callback that was signed first arrives last.
    Reordered,
    WrongAmount,
    UnknownOrder,
    /// The order was cancelled before.
    DeadOrder,
    /// Two payments of one order, on both nodes at once.
    TwoTransactions,
    /// A transaction id is used again for something else.
    ReusedTransaction,
}

/// What has become of one order.
struct Attacked {
    order: String,
    /// Whether it must be paid; `None` if it was cancelled, and its payment must be returned.
    is_paid: Option<bool>,
    /// The transactions that were accepted.
    accepted: Vec<String>,
    /// Those that were refused.
    refused: Vec<String>,
}

pub fn callback(transaction: &str, order: &str, cents: i64) -> Value {
    json!({ "transaction_id": transaction, "order_id": order, "amount_cents": cents })
}

/// Starts nodes that accept callbacks with `KEY`, and the provider that returns payments. The settings are in this folder.
pub async fn start_with_provider(
    kind: Kind,
    tier: TierKind,
    mut environment: Vec<(&'static str, String)>,
    files: &Path,
) -> (System, Receiver) {
    let provider = Receiver::start(204).await;
    let (key, config) = (files.join("key"), files.join("settings.toml"));
    std::fs::write(&key, KEY).unwrap();
    let url = format!("http://{}/refunds", provider.address);
    let settings = format!("[payments]\ncallback_key_files = [{key:?}]\nrefund_url = \"{url}\"\n");
    std::fs::write(&config, settings).unwrap();
    environment.push(("STAMPEDE_REFUND_SECRET", "a-secret-of-the-operator".to_owned()));
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    (System::start_from(kind, tier, nodes, environment, Some(config)), provider)
}

/// The transactions that the provider was asked to return.
pub fn transactions_returned(provider: &Receiver) -> Vec<String> {
    let transaction = |message: Message| message.json()["transaction_id"].as_str().unwrap().to_owned();
    provider.received().into_iter().map(transaction).collect()
}

/// The status and the reason of an accepted payment.
fn accepted(reply: &Reply) -> (String, String) {
    assert_eq!(reply.status, 200, "{reply:?}");
    (reply.text("status"), reply.json()["reason"].as_str().unwrap_or_default().to_owned())
}

fn paid() -> (String, String) {
    ("paid".to_owned(), String::new())
}

/// The callback was not authentic.
fn assert_unauthorized(reply: &Reply) {
    assert_eq!((reply.status.as_u16(), reply.text("code").as_str()), (401, "unauthorized"), "{reply:?}");
}

/// Asserts that the payment must be returned, or was already, for this reason.
fn assert_returned(reply: &Reply, expected: &str) {
    let (status, reason) = accepted(reply);
    assert!(["refund_due", "refunded"].contains(&status.as_str()) && reason == expected, "{reply:?}");
}

/// A callback whose signature is wrong in one of several ways.
fn forge(n: usize, good: &Value) -> (String, String) {
    let body = good.to_string();
    match n % 5 {
        0 => (signature(OTHER_KEY, 0, &body), body),
        // The amount was changed, or everything.
        1 => {
            let mut changed = good.clone();
            changed["amount_cents"] = json!(CENTS + 1);
            (signature(KEY, 0, &body), changed.to_string())
        }
        2 => (signature(KEY, 0, &callback("x", "12345", CENTS).to_string()), body),
        // The time is not the one that was signed.
        3 => {
            let old = signature(KEY, OUTSIDE_S, &body);
            let (_, hex) = old.split_once(',').unwrap();
            let now = signature(KEY, 0, &body);
            (format!("{},{hex}", now.split_once(',').unwrap().0), body)
        }
        _ => {
            let mut signature = signature(KEY, 0, &body);
            signature.truncate(signature.len() - 2);
            (signature, body)
        }
    }
}

/// Sends the callbacks of a variant for one new order of the buyer.
async fn attack(system: &System, variant: Variant, sale: SaleId, n: usize, buyer: &Buyer) -> Attacked {
    let last = system.shops.len() - 1;
    let (first, other) = if n.is_multiple_of(2) { (0, last) } else { (last, 0) };
    let (mut one, mut other) = (system.shops[first].client().await, system.shops[other].client().await);
    let order = buy_recorded_with(&mut one, sale, buyer).await;
    let (a, b) = (format!("{variant:?}-{n}-a"), format!("{variant:?}-{n}-b"));
    let good = callback(&a, &order, CENTS);
    let mut attacked =
        Attacked { order: order.clone(), is_paid: Some(true), accepted: vec![a.clone()], refused: vec![] };
    match variant {
        Variant::Forged => {
            let (signature, body) = forge(n, &good);
            for client in [&mut one, &mut other] {
                assert_unauthorized(&send(client, signature.clone(), body.clone()).await.unwrap());
            }
            attacked = Attacked { is_paid: Some(false), accepted: vec![], refused: vec![a], ..attacked };
        }
        Variant::Replayed => {
            let (signature, body) = (signature(KEY, 0, &good.to_string()), good.to_string());
            let both = tokio::join!(
                send(&mut one, signature.clone(), body.clone()),
                send(&mut other, signature.clone(), body.clone())
            );
            let again = send(&mut other, signature, body).await;
            for reply in [both.0, both.1, again] {
                assert_eq!(accepted(&reply.unwrap()), paid());
            }
            assert_unauthorized(&report(&mut one, KEY, OUTSIDE_S, &good).await);
        }
        Variant::OutsideWindow => {
            for (client, age_s) in [(&mut one, OUTSIDE_S), (&mut other, -OUTSIDE_S)] {
                assert_unauthorized(&report(client, KEY, age_s, &good).await);
            }
            attacked = Attacked { is_paid: Some(false), accepted: vec![], refused: vec![a], ..attacked };
        }
        Variant::Reordered => {
            assert_eq!(accepted(&report(&mut one, KEY, 0, &callback(&b, &order, CENTS)).await), paid());
            assert_returned(&report(&mut other, KEY, 200, &good).await, "already_paid");
            attacked.accepted.push(b);
        }
        Variant::WrongAmount => {
            let cents = [0, CENTS - 1, CENTS + 1, i64::MAX][n % 4];
            for client in [&mut one, &mut other] {
                assert_returned(&report(client, KEY, 0, &callback(&a, &order, cents)).await, "wrong_amount");
            }
            attacked.is_paid = Some(false);
        }
        Variant::UnknownOrder => {
            let unknown = (n + 1).to_string();
            for client in [&mut one, &mut other] {
                assert_returned(&report(client, KEY, 0, &callback(&a, &unknown, CENTS)).await, "unknown_order");
            }
            attacked.is_paid = Some(false);
        }
        Variant::DeadOrder => {
            let path = format!("/v1/orders/{order}/cancel");
            let cancelled = one.post(&path, &buyer.token, &Value::Null).await.unwrap();
            assert_eq!(cancelled.text("status"), "cancelled", "{cancelled:?}");
            for client in [&mut other, &mut one] {
                assert_returned(&report(client, KEY, 0, &good).await, "order_ended");
            }
            attacked.is_paid = None;
        }
        Variant::TwoTransactions => {
            let second = callback(&b, &order, CENTS);
            let (one, other) = tokio::join!(report(&mut one, KEY, 0, &good), report(&mut other, KEY, 0, &second));
            let (winner, loser) = if one.text("status") == "paid" { (one, other) } else { (other, one) };
            assert_eq!(accepted(&winner), paid());
            assert_returned(&loser, "already_paid");
            attacked.accepted.push(b);
        }
        Variant::ReusedTransaction => {
            assert_eq!(accepted(&report(&mut one, KEY, 0, &good).await), paid());
            for (client, body) in
                [(&mut one, callback(&a, &order, CENTS + 1)), (&mut other, callback(&a, "12345", CENTS))]
            {
                let reused = report(client, KEY, 0, &body).await;
                assert_eq!((reused.status.as_u16(), reused.text("code").as_str()), (409, "request_id_reused"));
            }
        }
    }
    attacked
}

/// Waits until every accepted payment has ended, and checks how. Returns how many orders are live, and the transactions that were returned.
async fn judge(system: &System, sale: SaleId, attacked: &[Attacked]) -> (usize, BTreeSet<String>) {
    let ledger = read_only(&system.storages[0]).await;
    let mut ended: BTreeMap<&str, PaymentStatus> = BTreeMap::new();
    until("every accepted payment ends", async || {
        for transaction in attacked.iter().flat_map(|one| &one.accepted) {
            if !ended.contains_key(transaction.as_str()) {
                let payment = ledger.payment("callback", transaction).await.unwrap().expect("it was accepted");
                if payment.status == PaymentStatus::RefundDue {
                    return false;
                }
                ended.insert(transaction, payment.status);
            }
        }
        true
    })
    .await;
    let rows = ledger.orders_in(sale, None, 100_000).await.unwrap();
    assert_eq!(rows.len(), attacked.len());
    let statuses: BTreeMap<String, OrderStatus> =
        rows.iter().map(|row| (row.order.id.to_string(), row.order.status)).collect();
    let mut returned = BTreeSet::new();
    for Attacked { order, is_paid, accepted, refused } in attacked {
        let expected = match is_paid {
            Some(true) => OrderStatus::Paid,
            Some(false) => OrderStatus::Unpaid,
            None => OrderStatus::Refunded,
        };
        assert_eq!(statuses[order], expected, "order {order} with {accepted:?}");
        let (paying, others): (Vec<_>, Vec<_>) =
            accepted.iter().partition(|transaction| ended[transaction.as_str()] == PaymentStatus::Paid);
        assert_eq!(paying.len(), usize::from(*is_paid == Some(true)), "order {order} was paid by {paying:?}");
        returned.extend(others.into_iter().cloned());
        for transaction in refused {
            let payment = ledger.payment("callback", transaction).await.unwrap();
            assert!(payment.is_none(), "{payment:?} was refused");
        }
    }
    ledger.close().await;
    (rows.iter().filter(|row| row.live).count(), returned)
}

async fn callbacks_pay_only_what_they_should(kind: Kind, tier: TierKind) {
    let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (system, provider) = start_with_provider(kind, tier, Vec::new(), files.path()).await;
    // 10,000 orders of each variant over all tiers and databases.
    let buyers = system.shops[0].log_in(0, count(1250, 20)).await;
    let shops: Vec<&Shop> = system.shops.iter().collect();
    let mut returned = BTreeSet::new();
    for variant in [
        Variant::Forged,
        Variant::Replayed,
        Variant::OutsideWindow,
        Variant::Reordered,
        Variant::WrongAmount,
        Variant::UnknownOrder,
        Variant::DeadOrder,
        Variant::TwoTransactions,
        Variant::ReusedTransaction,
    ] {
        let members = json!({ "payment_deadline_ms": 3_600_000 });
        let sale = create_sale_with(&system, u32::try_from(buyers.len()).unwrap(), members).await;
        let attacks = buyers.iter().enumerate().map(|(n, buyer)| attack(&system, variant, sale, n, buyer));
        let attacked: Vec<Attacked> = stream::iter(attacks).buffer_unordered(AT_ONCE).collect().await;
        let (live, of_variant) = judge(&system, sale, &attacked).await;
        let expected = match variant {
            Variant::Reordered
            | Variant::WrongAmount
            | Variant::UnknownOrder
            | Variant::DeadOrder
            | Variant::TwoTransactions => buyers.len(),
            Variant::Forged | Variant::Replayed | Variant::OutsideWindow | Variant::ReusedTransaction => 0,
        };
        assert_eq!(of_variant.len(), expected, "{variant:?}");
        returned.extend(of_variant);
        assert_eq!(verify(&Recorder::default(), &system.storages[0], &shops, sale).await, live, "{variant:?}");
    }
    // The provider has returned exactly the payments that have paid nothing.
    assert_eq!(BTreeSet::from_iter(transactions_returned(&provider)), returned);
}

in_each_tier!(all: callbacks_pay_only_what_they_should);

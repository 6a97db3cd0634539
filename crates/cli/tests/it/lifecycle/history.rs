//! Every step of an order is kept, shown to its owner, and streamed.

use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_testkit::{Client, until};
use tokio::task::JoinHandle;

use super::{System, TierKind, in_each_tier};
use crate::shop::{Buyer, Kind, Shop};

/// Buys, and waits until the ledger has the order. Returns its id.
pub async fn buy_recorded(shop: &Shop, sale: SaleId, buyer: &Buyer) -> String {
    buy_recorded_with(&mut shop.client().await, sale, buyer).await
}

/// The same over a connection that is open.
pub async fn buy_recorded_with(client: &mut Client, sale: SaleId, buyer: &Buyer) -> String {
    let bought = client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap();
    assert!([200, 201, 202].contains(&bought.status.as_u16()), "{bought:?}");
    let order = bought.text("id");
    let path = format!("/v1/orders/{order}");
    until("the order is recorded", async || client.get(&path, &buyer.token).await.unwrap().status == 200).await;
    order
}

/// Follows an order until the stream ends. Returns the data of its events.
async fn follow(shop: &Shop, order: &str, buyer: &Buyer) -> JoinHandle<Vec<Value>> {
    until("nothing is followed", async || shop.metric("stampede_followed_orders").await == 0.0).await;
    let (mut client, token) = (shop.client().await, buyer.token.clone());
    let path = format!("/v1/orders/{order}/events?follow=true");
    let following = tokio::spawn(async move {
        let stream = client.get(&path, &token).await.unwrap();
        let stream = String::from_utf8(stream.body.to_vec()).unwrap();
        stream.lines().filter_map(|line| line.strip_prefix("data: ")).map(|data| data.parse().unwrap()).collect()
    });
    until("the order is followed", async || shop.metric("stampede_followed_orders").await == 1.0).await;
    following
}

/// The statuses in a stream of events.
fn statuses(stream: &[Value]) -> Vec<&str> {
    stream.iter().map(|state| state["status"].as_str().unwrap()).collect()
}

async fn owner_sees_every_step(kind: Kind, tier: TierKind) {
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let system = System::start(kind, tier, nodes);
    let (first, last) = (&system.shops[0], &system.shops[nodes - 1]);
    let buyers = first.log_in(0, 2).await;
    let sale = first.create_sale(5).await;
    system.wait_for_sale(sale).await;
    let order = buy_recorded(first, sale, &buyers[0]).await;
    let path = format!("/v1/orders/{order}");

    let following = follow(first, &order, &buyers[0]).await;
    // Another node cancels it.
    let mut client = last.client().await;
    let cancelled = client.post(&format!("{path}/cancel"), &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!(cancelled.text("status"), "cancelled");
    assert_eq!(statuses(&following.await.unwrap()), ["unpaid", "cancelled"]);

    let history = client.get(&format!("{path}/history"), &buyers[0].token).await.unwrap().json();
    let at = |n: usize| history["events"][n]["at"].clone();
    let expected = json!({ "events": [
        { "from": "pending", "to": "unpaid", "at": at(0), "reason": null, "by": "system" },
        { "from": "unpaid", "to": "cancelled", "at": at(1), "reason": "requested", "by": "buyer" },
    ] });
    assert_eq!(history, expected);
    assert_eq!(history["events"][1]["at"], cancelled.json()["updated_at"]);
    let other = client.get(&format!("{path}/history"), &buyers[1].token).await.unwrap();
    assert_eq!(other.text("code"), "no_such_order", "another user's order is not shown");

    // Steps that follow each other quickly are streamed one by one.
    let order = buy_recorded(first, sale, &buyers[1]).await;
    let path = format!("/v1/orders/{order}");
    let following = follow(first, &order, &buyers[1]).await;
    let paid = client.post(&format!("{path}/pay"), &buyers[1].token, &Value::Null).await.unwrap();
    assert_eq!(paid.text("status"), "paid");
    assert_eq!(last.admin(&format!("orders/{order}/refund"), &Value::Null).await.text("status"), "refunding");
    let states = following.await.unwrap();
    assert_eq!(statuses(&states), ["unpaid", "paid", "refunding", "refunded"]);
    let history = client.get(&format!("{path}/history"), &buyers[1].token).await.unwrap().json();
    let steps: Vec<&Value> = states.iter().map(|state| &state["step"]).collect();
    let events = history["events"].as_array().unwrap();
    assert_eq!(steps, [&Value::Null, &events[1], &events[2], &events[3]]);
    assert!(states.iter().skip(1).all(|state| state["updated_at"] == state["step"]["at"]), "{states:?}");
}

in_each_tier!(all: owner_sees_every_step);

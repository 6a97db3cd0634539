//! Every step of an order is counted, by the status that was reached and by whom.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use stampede_testkit::until;

use super::deadline::create_sale;
use super::history::buy_recorded;
use super::{System, TierKind};
use crate::shop::{Kind, Shop, TOKEN};

/// How many steps of each kind the node has counted.
async fn counted(shop: &Shop) -> BTreeMap<String, u64> {
    let metrics = shop.client().await.get("/metrics", TOKEN).await.unwrap();
    let metrics = String::from_utf8(metrics.body.to_vec()).unwrap();
    let steps = metrics.lines().filter_map(|line| line.strip_prefix("stampede_order_steps_total{")?.split_once("} "));
    steps.map(|(labels, count)| (labels.to_owned(), count.parse().unwrap())).collect()
}

async fn steps_are_counted(kind: Kind) {
    let system = System::start(kind, TierKind::Solo, 1);
    let shop = &system.shops[0];
    let buyers = shop.log_in(0, 5).await;
    let (sale, expiring) = (
        create_sale(&system, 4, Duration::from_secs(3600)).await,
        create_sale(&system, 1, Duration::from_secs(1)).await,
    );
    // Orders of the demonstration data are counted, too.
    let before = counted(shop).await;
    let mut client = shop.client().await;
    let mut orders = Vec::new();
    for buyer in &buyers[..4] {
        orders.push(buy_recorded(shop, sale, buyer).await);
    }
    for (order, buyer) in orders[..2].iter().zip(&buyers) {
        client.post(&format!("/v1/orders/{order}/pay"), &buyer.token, &Value::Null).await.unwrap();
    }
    let path = format!("/v1/orders/{}/redeem-code", orders[0]);
    let code = client.post(&path, &buyers[0].token, &Value::Null).await.unwrap().text("code");
    for _twice in 0..2 {
        shop.admin(&format!("orders/{}/redeem", orders[0]), &json!({ "code": code })).await;
        shop.admin(&format!("orders/{}/refund", orders[1]), &Value::Null).await;
        shop.admin(&format!("orders/{}/cancel", orders[2]), &Value::Null).await;
        client.post(&format!("/v1/orders/{}/cancel", orders[3]), &buyers[3].token, &Value::Null).await.unwrap();
    }
    buy_recorded(shop, expiring, &buyers[4]).await;
    let expected = [
        ("to=\"cancelled\",by=\"buyer\"", 1),
        ("to=\"cancelled\",by=\"operator\"", 1),
        ("to=\"cancelled\",by=\"system\"", 1),
        ("to=\"paid\",by=\"provider\"", 2),
        ("to=\"redeemed\",by=\"operator\"", 1),
        ("to=\"refunded\",by=\"provider\"", 1),
        ("to=\"refunding\",by=\"operator\"", 1),
        ("to=\"unpaid\",by=\"system\"", 5),
    ];
    let expected = expected.map(|(kind, count)| (kind.to_owned(), count));
    let mut steps = BTreeMap::new();
    until("every step is counted", async || {
        steps = counted(shop).await;
        for (kind, count) in &before {
            *steps.entry(kind.clone()).or_default() -= count;
        }
        steps.retain(|_, count| *count > 0);
        steps == BTreeMap::from(expected.clone())
    })
    .await;
}

on_each_database!(steps_are_counted);

//! Two processes on one database.

use std::sync::Arc;

use serde_json::Value;
use stampede_testkit::{Client, count};
use tokio::sync::Barrier;

use crate::history::{Heard, History};
use crate::shop::{Buyer, Kind, Place, Shop};

/// Two shops, each with a data folder of its own, that sell from one database.
struct Nodes {
    place: Place,
    _other: Place,
    shops: [Shop; 2],
}

impl Nodes {
    fn on(kind: Kind) -> Self {
        let server = kind.server().unwrap();
        let url = kind.create_database(server, server.port());
        let (place, other) = (Place::with(Some(url.clone())), Place::with(Some(url)));
        let shops = [Shop::open(&place), Shop::open(&other)];
        Self { place, _other: other, shops }
    }
}

/// Every buyer presses on both nodes at once, several times; all hear the truth, and exactly the stock is sold.
async fn sell_exactly_the_stock(kind: Kind) {
    let (people, tries, stock) = (count(300, 80), count(8, 3), 50);
    let nodes = Nodes::on(kind);
    let sale = nodes.shops[0].put_up(stock).await;
    nodes.shops[1].knows(sale).await;
    let buyers = nodes.shops[0].log_in(0, people).await;
    let history = Arc::new(History::default());
    let start = Arc::new(Barrier::new(2 * people as usize));
    let crowd: Vec<_> = buyers
        .iter()
        .flat_map(|buyer| nodes.shops.iter().map(|shop| (buyer.clone(), shop.address)))
        .map(|(buyer, address)| {
            let (history, start) = (history.clone(), start.clone());
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                start.wait().await;
                for _ in 0..tries {
                    let heard = history.buy(&mut client, sale, &buyer).await.heard;
                    let real = matches!(heard, Heard::Created | Heard::Already | Heard::SoldOut);
                    assert!(real, "not the real reason: {heard:?}");
                }
            })
        })
        .collect();
    for one in crowd {
        one.await.unwrap();
    }
    assert_eq!(history.count(Heard::Created), stock as usize);
    let [one, other] = &nodes.shops;
    assert_eq!(history.check(&nodes.place, &[one, other], sale).await, stock as usize);
    for shop in nodes.shops {
        assert!(shop.stop().success());
    }
}

/// What is done on one node is seen on the other: edits, cancellations, sessions.
async fn one_sees_what_the_other_did(kind: Kind) {
    let nodes = Nodes::on(kind);
    let [one, other] = &nodes.shops;
    // Whoever looks on the other node sees at once what was made on this one.
    for _ in 0..5 {
        let sale = one.put_up(1).await;
        let seen = other.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
        assert_eq!((seen.status.as_u16(), seen.json()["remaining"].as_u64()), (200, Some(1)));
    }
    let nobody = other.client().await.get("/v1/sales/12345", "").await.unwrap();
    assert_eq!(nobody.text("code"), "no_such_sale");
    let sale = one.put_up(1).await;
    other.knows(sale).await;
    let buyers = one.log_in(0, 2).await;
    let path = format!("/v1/sales/{sale}/orders");
    let press =
        async |shop: &Shop, buyer: &Buyer| shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
    let bought = press(one, &buyers[0]).await;
    assert_eq!(bought.status, 201);
    let again = press(other, &buyers[0]).await;
    assert_eq!((again.status.as_u16(), again.text("id")), (200, bought.text("id")), "the same order from the other");
    assert_eq!(press(other, &buyers[1]).await.text("code"), "sold_out");

    // The stock comes back on the node that did not cancel.
    let cancel = format!("/v1/orders/{}/cancel", bought.text("id"));
    let cancelled = one.client().await.post(&cancel, &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!(cancelled.text("status"), "cancelled");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let heard = press(other, &buyers[1]).await;
        if heard.status == 201 {
            break;
        }
        assert_eq!(heard.text("code"), "sold_out");
        assert!(std::time::Instant::now() < deadline, "the stock never came back");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }

    assert_eq!(one.admin(&format!("sales/{sale}/end"), &Value::Null).await.text("state"), "ended");
    loop {
        let seen = other.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
        if seen.text("state") == "ended" {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "the end was never seen");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(press(other, &buyers[0]).await.text("code"), "ended");
}

/// An order that dies on one node and another that is sold there leave as many sold as before: the other node learns of it all the same.
async fn marks_follow_a_cancellation_and_a_sale_elsewhere(kind: Kind) {
    let nodes = Nodes::on(kind);
    let [one, other] = &nodes.shops;
    let sale = one.put_up(1).await;
    let buyers = one.log_in(0, 2).await;
    let history = History::default();
    let mut client = one.client().await;
    let order = history.buy(&mut client, sale, &buyers[0]).await.order.unwrap();
    other.knows(sale).await;
    // Only when both gates have the first order does its death change anything.
    history.check(&nodes.place, &[one, other], sale).await;
    assert_eq!(history.cancel(&mut client, sale, &buyers[0], order).await.heard, Heard::Cancelled);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while history.buy(&mut client, sale, &buyers[1]).await.heard != Heard::Created {
        assert!(std::time::Instant::now() < deadline, "what was given back is never sold");
    }
    assert_eq!(history.check(&nodes.place, &[one, other], sale).await, 1);
}

macro_rules! on_each_server {
    ($($module:ident = $kind:expr),*) => {
        $(mod $module {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn sell_exactly_the_stock() {
                super::sell_exactly_the_stock($kind).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn marks_follow_a_cancellation_and_a_sale_elsewhere() {
                super::marks_follow_a_cancellation_and_a_sale_elsewhere($kind).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn one_sees_what_the_other_did() {
                super::one_sees_what_the_other_did($kind).await;
            }
        })*
    };
}

on_each_server! { mariadb = Kind::MariaDb, postgres = Kind::Postgres }

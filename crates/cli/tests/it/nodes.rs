//! Two processes on one database.

use std::sync::Arc;

use serde_json::Value;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, until};
use tokio::sync::Barrier;

use crate::shop::{Kind, Shop, Storage, verify};

/// Two servers with separate data directories on one database.
struct Nodes {
    storage: Storage,
    _other: Storage,
    shops: [Shop; 2],
}

impl Nodes {
    fn on(kind: Kind) -> Self {
        let server = kind.server().unwrap();
        let url = kind.create_database(server, server.port());
        let (storage, other) = (Storage::with(Some(url.clone())), Storage::with(Some(url)));
        let shops = [Shop::open(&storage), Shop::open(&other)];
        Self { storage, _other: other, shops }
    }
}

/// Every buyer tries on both nodes at once, several times: every response is correct, and exactly the stock is sold.
async fn two_nodes_sell_exactly_the_stock(kind: Kind) {
    let (buyer_count, tries, stock) = (count(300, 80), count(8, 3), 50);
    let nodes = Nodes::on(kind);
    let sale = nodes.shops[0].create_sale(stock).await;
    nodes.shops[1].wait_for_sale(sale).await;
    let buyers = nodes.shops[0].log_in(0, buyer_count).await;
    let history = Arc::new(Recorder::default());
    let start = Arc::new(Barrier::new(2 * buyer_count as usize));
    let tasks: Vec<_> = buyers
        .iter()
        .flat_map(|buyer| nodes.shops.iter().map(|shop| (buyer.clone(), shop.address)))
        .map(|(buyer, address)| {
            let (history, start) = (history.clone(), start.clone());
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                start.wait().await;
                for _ in 0..tries {
                    let response = history.buy(&mut client, sale, &buyer).await.response;
                    let real = matches!(response, Response::Created | Response::Already | Response::SoldOut);
                    assert!(real, "not the real reason: {response:?}");
                }
            })
        })
        .collect();
    for one in tasks {
        one.await.unwrap();
    }
    assert_eq!(history.count(Response::Created), stock as usize);
    let [one, other] = &nodes.shops;
    assert_eq!(verify(&history, &nodes.storage, &[one, other], sale).await, stock as usize);
    for shop in nodes.shops {
        assert!(shop.stop().success());
    }
}

/// Edits, cancellations and sessions of one node reach the other.
async fn changes_on_one_node_reach_the_other(kind: Kind) {
    let nodes = Nodes::on(kind);
    let [one, other] = &nodes.shops;
    // A new sale is visible on the other node at once.
    for _ in 0..5 {
        let sale = one.create_sale(1).await;
        let seen = other.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
        assert_eq!((seen.status.as_u16(), seen.json()["remaining"].as_u64()), (200, Some(1)));
    }
    let nobody = other.client().await.get("/v1/sales/12345", "").await.unwrap();
    assert_eq!(nobody.text("code"), "no_such_sale");
    let sale = one.create_sale(1).await;
    other.wait_for_sale(sale).await;
    let buyers = one.log_in(0, 2).await;
    let history = Recorder::default();
    let (mut here, mut there) = (one.client().await, other.client().await);
    let bought = history.buy(&mut here, sale, &buyers[0]).await;
    assert_eq!(bought.response, Response::Created);
    let again = history.buy(&mut there, sale, &buyers[0]).await;
    assert_eq!((again.response, again.order), (Response::Already, bought.order), "the same order from the other");
    assert_eq!(history.buy(&mut there, sale, &buyers[1]).await.response, Response::SoldOut);

    // The stock is returned on the node that did not cancel.
    let cancelled = history.cancel(&mut here, sale, &buyers[0], bought.order.unwrap()).await;
    assert_eq!(cancelled.response, Response::Cancelled);
    until("the stock is returned", async || {
        let response = history.buy(&mut there, sale, &buyers[1]).await.response;
        assert!(matches!(response, Response::Created | Response::SoldOut), "{response:?}");
        response == Response::Created
    })
    .await;

    assert_eq!(one.admin(&format!("sales/{sale}/end"), &Value::Null).await.text("state"), "ended");
    until("the other node sees the end", async || {
        other.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap().text("state") == "ended"
    })
    .await;
    assert_eq!(history.buy(&mut there, sale, &buyers[0]).await.response, Response::Ended);
    assert_eq!(verify(&history, &nodes.storage, &[one, other], sale).await, 1);
}

/// After a cancellation and a sale on one node, the number of sold orders is the same as before; the other node still updates its marks.
async fn cancellation_and_sale_on_one_node_update_the_marks_of_the_other(kind: Kind) {
    let nodes = Nodes::on(kind);
    let [one, other] = &nodes.shops;
    let sale = one.create_sale(1).await;
    let buyers = one.log_in(0, 2).await;
    let history = Recorder::default();
    let mut client = one.client().await;
    let order = history.buy(&mut client, sale, &buyers[0]).await.order.unwrap();
    other.wait_for_sale(sale).await;
    // Both gates have the first order before it is cancelled.
    verify(&history, &nodes.storage, &[one, other], sale).await;
    assert_eq!(history.cancel(&mut client, sale, &buyers[0], order).await.response, Response::Cancelled);
    until("the returned stock is sold", async || {
        history.buy(&mut client, sale, &buyers[1]).await.response == Response::Created
    })
    .await;
    assert_eq!(verify(&history, &nodes.storage, &[one, other], sale).await, 1);
}

on_each_database!(
    servers: two_nodes_sell_exactly_the_stock,
    changes_on_one_node_reach_the_other,
    cancellation_and_sale_on_one_node_update_the_marks_of_the_other
);

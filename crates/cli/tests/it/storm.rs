//! Many more buyers than stock, all at once.

use std::sync::Arc;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count};
use tokio::sync::Barrier;

use crate::shop::{Kind, Shop, Storage, verify};

/// Every buyer tries many times: exactly the stock is sold, one order per user.
async fn exactly_the_stock_is_sold_and_one_order_per_user(kind: Kind) {
    let (buyer_count, tries, stock) = (count(500, 150), count(20, 5), 100);
    let storage = Storage::on(kind);
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(stock).await;
    let buyers = shop.log_in(0, buyer_count).await;
    let history = Arc::new(Recorder::default());
    let start = Arc::new(Barrier::new(buyer_count as usize));
    let tasks: Vec<_> = buyers
        .into_iter()
        .map(|buyer| {
            let (history, start, address) = (history.clone(), start.clone(), shop.address);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                start.wait().await;
                for _ in 0..tries {
                    let response = history.buy(&mut client, sale, &buyer).await.response;
                    assert_ne!(response, Response::Unknown, "every attempt gets a response");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(history.count(Response::Created), stock as usize);
    let expected = |response| matches!(response, Response::Created | Response::Already | Response::SoldOut);
    assert!(history.ended().iter().all(|attempt| expected(attempt.response)), "sold out is the only refusal");
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, stock as usize);
    let seen = shop.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
    assert_eq!((seen.text("state").as_str(), seen.json()["remaining"].as_u64()), ("sold_out", Some(0)));
    assert!(shop.stop().success());
}

/// 64 concurrent attempts of one user: one order, and every response names it.
async fn concurrent_attempts_of_one_user_get_one_order(kind: Kind) {
    let storage = Storage::on(kind);
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(10).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let history = Arc::new(Recorder::default());
    let start = Arc::new(Barrier::new(64));
    let tries: Vec<_> = (0..64)
        .map(|_| {
            let (history, start, address, buyer) = (history.clone(), start.clone(), shop.address, buyer.clone());
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                start.wait().await;
                history.buy(&mut client, sale, &buyer).await
            })
        })
        .collect();
    let mut orders = std::collections::HashSet::new();
    for one in tries {
        orders.insert(one.await.unwrap().order.expect("an order"));
    }
    assert_eq!(orders.len(), 1);
    assert_eq!(history.count(Response::Created), 1, "one 201, the others 200");
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 1);
}

on_each_database!(exactly_the_stock_is_sold_and_one_order_per_user, concurrent_attempts_of_one_user_get_one_order);

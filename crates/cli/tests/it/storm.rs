//! The crowd.

use std::sync::Arc;

use stampede_testkit::{Client, count};
use tokio::sync::Barrier;

use crate::history::{Heard, History};
use crate::shop::{Kind, Place, Shop};

/// Many more people than stock, each tries many times, all at once: exactly the stock, one each.
async fn exactly_the_stock_and_one_each(kind: Kind) {
    let (people, tries, stock) = (count(500, 150), count(20, 5), 100);
    let folder = Place::on(kind);
    let shop = Shop::open(&folder);
    let sale = shop.put_up(stock).await;
    let buyers = shop.log_in(0, people).await;
    let history = Arc::new(History::default());
    let start = Arc::new(Barrier::new(people as usize));
    let crowd: Vec<_> = buyers
        .into_iter()
        .map(|buyer| {
            let (history, start, address) = (history.clone(), start.clone(), shop.address);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                start.wait().await;
                for _ in 0..tries {
                    let heard = history.buy(&mut client, sale, &buyer).await.heard;
                    assert_ne!(heard, Heard::Unknown, "nothing failed, so every attempt is answered");
                }
            })
        })
        .collect();
    for one in crowd {
        one.await.unwrap();
    }
    assert_eq!(history.count(Heard::Created), stock as usize);
    let known = |heard| matches!(heard, Heard::Created | Heard::Already | Heard::SoldOut);
    assert!(history.all().iter().all(|attempt| known(attempt.heard)), "sold out is the only reason there is");
    assert_eq!(history.check(&folder, &[&shop], sale).await, stock as usize);
    let seen = shop.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
    assert_eq!((seen.text("state").as_str(), seen.json()["remaining"].as_u64()), ("sold_out", Some(0)));
    assert!(shop.stop().success());
}

/// One person, 64 tries at once: one order, and every answer names it.
async fn one_person_many_tries_at_once(kind: Kind) {
    let folder = Place::on(kind);
    let shop = Shop::open(&folder);
    let sale = shop.put_up(10).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let history = Arc::new(History::default());
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
    assert_eq!(history.count(Heard::Created), 1, "one 201, the others 200");
    assert_eq!(history.check(&folder, &[&shop], sale).await, 1);
}

macro_rules! on_each_database {
    ($($module:ident = $kind:expr),*) => {
        $(mod $module {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn exactly_the_stock_and_one_each() {
                super::exactly_the_stock_and_one_each($kind).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn one_person_many_tries_at_once() {
                super::one_person_many_tries_at_once($kind).await;
            }
        })*
    };
}

on_each_database! { sqlite = Kind::Sqlite, mariadb = Kind::MariaDb, postgres = Kind::Postgres }

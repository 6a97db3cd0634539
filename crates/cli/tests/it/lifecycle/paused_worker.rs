//! A process is stopped after its worker has read which orders are due, and before it has locked them. Another process takes over.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_core::{OrderStatus, SaleId};
use stampede_proof::recorder::Recorder;
use stampede_testkit::until;

use super::deadline::{create_sale, unpaid_left};
use super::history::buy_recorded;
use super::{System, TierKind, in_each_tier};
use crate::shop::{Buyer, Kind, Shop, read_only, verify};

const STOCK: usize = 6;
/// How long another process may need to take over what a stopped one was doing.
const TAKE_OVER: Duration = Duration::from_secs(90);

/// Waits as `until` does, for longer.
async fn until_taken_over(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < TAKE_OVER, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The file that exists while a worker is held.
fn held(file: &Path) -> PathBuf {
    file.with_extension("reached")
}

/// Buys returned stock as soon as the node sells it, and pays it. An order that is still in the queue cannot be paid yet.
async fn buy_and_pay(shop: &Shop, sale: SaleId, buyer: &Buyer) {
    let mut client = shop.client().await;
    until("returned stock is bought and paid", async || {
        let bought = client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap();
        if !bought.status.is_success() {
            return false;
        }
        let path = format!("/v1/orders/{}/pay", bought.text("id"));
        client.post(&path, &buyer.token, &Value::Null).await.unwrap().status == 200
    })
    .await;
}

async fn stock_is_returned_once_though_a_worker_is_paused(kind: Kind, tier: TierKind) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hold");
    let hold = vec![("STAMPEDE_FAILPOINTS", format!("expire.read=hold:{}", file.display()))];
    let system = System::start_with(kind, tier, 2, hold);
    let [paused, other] = &system.shops[..] else { panic!("two nodes") };
    let buyers = paused.log_in(0, 2 * STOCK as u64 + 1).await;
    // One remains for the end.
    let sale = create_sale(&system, STOCK as u32 + 1, Duration::from_secs(2)).await;
    std::fs::write(&file, "").unwrap();
    other.process.signal("STOP").unwrap();
    for buyer in &buyers[..STOCK] {
        buy_recorded(paused, sale, buyer).await;
    }
    until("the worker has read what is due", async || held(&file).exists()).await;
    paused.process.signal("STOP").unwrap();
    other.process.signal("CONT").unwrap();

    until_taken_over("another process expires the orders", async || unpaid_left(&system, sale).await == 0).await;
    for buyer in &buyers[STOCK..2 * STOCK] {
        buy_and_pay(other, sale, buyer).await;
    }
    // The first process goes on with the orders that it has read. It expires another one after that.
    std::fs::remove_file(held(&file)).unwrap();
    paused.process.signal("CONT").unwrap();
    other.process.signal("STOP").unwrap();
    let last = &buyers[2 * STOCK];
    // A broker has closed the connections of a process that was paused for long: until they are replaced, its buyers are asked to repeat.
    until("the process sells again", async || {
        let path = format!("/v1/sales/{sale}/orders");
        paused.client().await.post(&path, &last.token, &Value::Null).await.unwrap().status != 503
    })
    .await;
    let order = buy_recorded(paused, sale, last).await;
    until_taken_over("the worker goes on", async || {
        let seen = paused.client().await.get(&format!("/v1/orders/{order}"), &last.token).await.unwrap();
        seen.text("status") == "cancelled"
    })
    .await;
    other.process.signal("CONT").unwrap();

    let shops: Vec<&Shop> = system.shops.iter().collect();
    assert_eq!(verify(&Recorder::default(), &system.storages[0], &shops, sale).await, STOCK);
    let ledger = read_only(&system.storages[0]).await;
    let (row, orders) = (ledger.sale(sale).await.unwrap().unwrap(), ledger.orders_in(sale, None, 1000).await.unwrap());
    ledger.close().await;
    let dead = orders.iter().filter(|row| row.order.status == OrderStatus::Cancelled).count();
    assert_eq!((row.sold, row.released), (STOCK as u32, dead as i64), "returned once each");
}

in_each_tier!(servers: stock_is_returned_once_though_a_worker_is_paused);
in_each_tier!(@module queued_rabbitmq, Postgres, QueuedRabbitMq, stock_is_returned_once_though_a_worker_is_paused);
in_each_tier!(@module shielded_mariadb, MariaDb, Shielded, stock_is_returned_once_though_a_worker_is_paused);

//! Orders that are not paid in time are cancelled, and their stock is sold again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::{Clock as _, OrderId, OrderStatus, SaleId, StepReason, SystemClock, Timestamp};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, until};

use super::history::buy_recorded;
use super::{System, TierKind, in_each_tier};
use crate::recovery::foreign_lock::ForeignLock;
use crate::shop::{Buyer, Kind, Shop, read_only, verify};

/// Creates a sale whose orders must be paid within this time, and waits until every node sells it.
pub async fn create_sale(system: &System, stock: u32, deadline: Duration) -> SaleId {
    create_sale_with(system, stock, json!({ "payment_deadline_ms": deadline.as_millis() as u64 })).await
}

/// Creates a sale with these further members, and waits until every node sells it.
pub async fn create_sale_with(system: &System, stock: u32, members: Value) -> SaleId {
    let shop = &system.shops[0];
    let owner = shop.admin("shops", &json!({ "type_id": "1", "name": "Test shop" })).await.text("id");
    let voucher =
        json!({ "shop_id": owner, "kind": "flash_sale", "title": "Test", "price_cents": 100, "worth_cents": 200 });
    let voucher = shop.admin("vouchers", &voucher).await.text("id");
    let begin = SystemClock.now();
    let mut new = json!({
        "voucher_id": voucher, "stock": stock, "begin": begin, "end": begin.plus(Duration::from_secs(3600)),
    });
    for (member, value) in members.as_object().unwrap() {
        new[member] = value.clone();
    }
    let made = shop.admin("sales", &new).await;
    assert_eq!(made.status, 201, "{made:?}");
    for (member, value) in members.as_object().unwrap() {
        assert_eq!(made.json()[member], *value);
    }
    let sale = made.text("id").parse().unwrap();
    system.wait_for_sale(sale).await;
    sale
}

/// How many orders of the sale are unpaid in the ledger.
pub async fn unpaid_left(system: &System, sale: SaleId) -> usize {
    let ledger = read_only(&system.storages[0]).await;
    let rows = ledger.orders_in(sale, None, 100_000).await.unwrap();
    ledger.close().await;
    rows.iter().filter(|row| row.order.status == OrderStatus::Unpaid).count()
}

/// Waits until the ledger has no unpaid order of the sale, and the invariants hold. Returns the number of live orders.
async fn all_expired(system: &System, history: &Recorder, sale: SaleId) -> usize {
    until("every order has expired", async || unpaid_left(system, sale).await == 0).await;
    let nodes: Vec<&Shop> = system.shops.iter().collect();
    verify(history, &system.storages[0], &nodes, sale).await
}

async fn unpaid_stock_is_sold_again_on_every_node(kind: Kind, tier: TierKind) {
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let system = System::start(kind, tier, nodes);
    let (first, last) = (&system.shops[0], &system.shops[nodes - 1]);
    let buyers = first.log_in(0, 4).await;
    let sale = create_sale(&system, 2, Duration::from_secs(2)).await;
    let history = Recorder::default();
    let (mut one, mut other) = (first.client().await, last.client().await);
    for buyer in &buyers[..2] {
        let bought = history.buy(&mut one, sale, buyer).await;
        assert!(matches!(bought.response, Response::Created | Response::Pending), "{bought:?}");
    }
    assert_eq!(history.buy(&mut other, sale, &buyers[2]).await.response, Response::SoldOut);
    let order = history.ended()[0].order.unwrap();
    let path = format!("/v1/orders/{order}");
    let mine = async |client: &mut Client, path: &str| client.get(path, &buyers[0].token).await.unwrap();
    until("the order is recorded", async || mine(&mut other, &path).await.text("status") == "unpaid").await;
    let seen = mine(&mut other, &path).await.json();
    let at = |member: &str| serde_json::from_value::<Timestamp>(seen[member].clone()).unwrap();
    let left = at("pay_by").ms() - at("created_at").ms();
    assert!((2000..4000).contains(&left), "{left} ms to pay");

    until("the stock is sold again", async || {
        let bought = history.buy(&mut other, sale, &buyers[2]).await.response;
        assert_ne!(bought, Response::Unknown);
        matches!(bought, Response::Created | Response::Pending | Response::Already)
    })
    .await;
    let expired = mine(&mut one, &path).await;
    assert_eq!(expired.text("status"), "cancelled");
    let steps = mine(&mut one, &format!("{path}/history")).await.json();
    assert_eq!((&steps["events"][1]["reason"], &steps["events"][1]["by"]), (&json!("expired"), &json!("system")));
    until("the owner of an expired order buys again", async || {
        matches!(history.buy(&mut one, sale, &buyers[0]).await.response, Response::Created | Response::Pending)
    })
    .await;
    assert_eq!(all_expired(&system, &history, sale).await, 0);
    let mut counted = 0.0;
    for shop in &system.shops {
        counted += shop.metric("stampede_expired_orders_total").await;
    }
    assert!(counted >= 4.0, "{counted}");
}

/// Without a deadline of its own, a sale has that of the settings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_have_the_deadline_of_their_sale_or_of_the_settings() {
    for (setting, expected) in [(None, 900_000), (Some("0"), 0), (Some("7000"), 7000)] {
        let mut environment = Vec::new();
        environment.extend(setting.map(|ms| ("STAMPEDE__ORDERS__PAYMENT_DEADLINE_MS", ms.to_owned())));
        let system = System::start_with(Kind::Sqlite, TierKind::Solo, 1, environment);
        let shop = &system.shops[0];
        let buyer = shop.log_in(0, 1).await.remove(0);
        let of_settings = create_sale_with(&system, 1, json!({})).await;
        let without = create_sale_with(&system, 1, json!({ "payment_deadline_ms": 0 })).await;
        let own = create_sale_with(&system, 1, json!({ "payment_deadline_ms": 5000 })).await;
        for (sale, deadline_ms) in [(of_settings, expected), (without, 0), (own, 5000)] {
            let order = buy_recorded(shop, sale, &buyer).await;
            let mut client = shop.client().await;
            let shown = client.get(&format!("/v1/sales/{sale}"), "").await.unwrap().json();
            assert_eq!(shown["payment_deadline_ms"], deadline_ms, "{setting:?}");
            let seen = client.get(&format!("/v1/orders/{order}"), &buyer.token).await.unwrap().json();
            let at = |member: &str| serde_json::from_value::<Option<Timestamp>>(seen[member].clone()).unwrap();
            let left = at("pay_by").map(|at_most| at_most.ms() - at("created_at").unwrap().ms());
            match left {
                None => assert_eq!(deadline_ms, 0, "{seen}"),
                Some(left) => assert!((deadline_ms..deadline_ms + 2000).contains(&left), "{left} ms to pay: {seen}"),
            }
        }
    }
}

/// A buyer of the sale. Tries until `stop`, also when the order has expired; from `pays_from` on, pays what was bought. Returns the order that
/// was paid.
async fn buy_until(
    stop: Instant,
    pays_from: Option<Instant>,
    address: impl Fn() -> SocketAddr,
    history: Arc<Recorder>,
    sale: SaleId,
    buyer: Buyer,
) -> Option<OrderId> {
    while Instant::now() < stop {
        // The node may have been killed.
        if let Ok(mut client) = Client::connect(address()).await {
            let bought = history.buy(&mut client, sale, &buyer).await;
            let order = bought.order.filter(|_| bought.response.is_confirmation());
            if let Some(order) = order.filter(|_| pays_from.is_some_and(|from| from <= Instant::now())) {
                let paid = client.post(&format!("/v1/orders/{order}/pay"), &buyer.token, &Value::Null).await;
                if paid.is_ok_and(|reply| reply.status == 200) {
                    return Some(order);
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    None
}

/// A random half of the buyers never pays; orders expire and are bought again, while random nodes are killed: in the end the live orders and
/// what remains are the whole stock.
async fn unpaid_stock_is_sold_again_while_nodes_are_killed(kind: Kind, tier: TierKind) {
    let seed = std::env::var("LIFECYCLE_SEED").map_or(1, |seed| seed.parse().expect("a whole number"));
    eprintln!("{kind:?}, {tier:?}: LIFECYCLE_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let mut system = System::start(kind, tier, nodes);
    let (stock, duration) = (count(100, 10) as u32, Duration::from_secs(count(60, 8)));
    let buyers = system.shops[0].log_in(0, 3 * u64::from(stock)).await;
    let sale = create_sale(&system, stock, Duration::from_secs(1)).await;
    let history = Arc::new(Recorder::default());
    let (started, stop) = (Instant::now(), Instant::now() + duration);
    // The address of a node changes when it is started again.
    let addresses = Arc::new(std::sync::Mutex::new(system.shops.iter().map(|shop| shop.address).collect::<Vec<_>>()));
    let buying: Vec<_> = buyers
        .into_iter()
        .enumerate()
        .map(|(n, buyer)| {
            // Those who pay begin with it one after another, so that orders expire until the end.
            let pays_from = rng.random_bool(0.5).then(|| started + duration.mul_f64(rng.random_range(0.0..1.0)));
            let (addresses, history) = (addresses.clone(), history.clone());
            tokio::spawn(buy_until(stop, pays_from, move || addresses.lock().unwrap()[n % nodes], history, sale, buyer))
        })
        .collect();
    while Instant::now() + Duration::from_secs(2) < stop {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let node = rng.random_range(0..nodes);
        system.shops[node].process.kill().unwrap();
        system.shops[node] = system.run(node);
        addresses.lock().unwrap()[node] = system.shops[node].address;
    }
    let mut paid = Vec::new();
    for task in buying {
        paid.extend(task.await.unwrap());
    }
    system.wait_for_sale(sale).await;
    let live = all_expired(&system, &history, sale).await;
    let ledger = read_only(&system.storages[0]).await;
    let rows = ledger.orders_in(sale, None, 100_000).await.unwrap();
    ledger.close().await;
    let status = |order: &OrderId| rows.iter().find(|row| row.order.id == *order).map(|row| row.order.status);
    assert!(paid.iter().all(|order| status(order) == Some(OrderStatus::Paid)), "what was paid stays paid");
    // The answer to a payment may have been lost with its node.
    assert!(live > 0 && live >= paid.len(), "{live} live orders, {} of them paid", paid.len());
    let expired = rows.iter().filter(|row| row.reason == Some(StepReason::Expired)).count() as u64;
    assert!(expired >= count(200, 5), "{expired} of {} orders expired", rows.len());
    let remaining = u64::from(stock) - live as u64;
    for shop in &system.shops {
        let path = format!("/v1/sales/{sale}");
        let what_remains = async || shop.client().await.get(&path, "").await.unwrap().json()["remaining"].as_u64();
        until("what is not sold remains", async || what_remains().await == Some(remaining)).await;
    }
}

/// Another client of the database keeps the row of one sale locked.
async fn a_locked_sale_holds_up_no_other(kind: Kind) {
    let system = System::start(kind, TierKind::Shared, 2);
    let [first, last] = &system.shops[..] else { panic!("two nodes") };
    let buyers = first.log_in(0, 2).await;
    let deadline = Duration::from_secs(4);
    let (locked, other) = (create_sale(&system, 5, deadline).await, create_sale(&system, 5, deadline).await);
    buy_recorded(first, locked, &buyers[0]).await;
    let lock = ForeignLock::on_sales(kind, &system.storages[0], &[locked]).await;
    for buyer in &buyers {
        buy_recorded(last, other, buyer).await;
        until("the order of the other sale expires", async || unpaid_left(&system, other).await == 0).await;
    }
    assert_eq!(unpaid_left(&system, locked).await, 1, "it is locked");
    lock.release().await;
    until("the order of the locked sale expires", async || unpaid_left(&system, locked).await == 0).await;
    for sale in [locked, other] {
        assert_eq!(verify(&Recorder::default(), &system.storages[0], &[first, last], sale).await, 0);
    }
}

/// Another client of the database keeps the row of one order locked: the others of its sale expire, and the sale is sold.
async fn a_locked_order_holds_up_no_other(kind: Kind) {
    let system = System::start(kind, TierKind::Shared, 2);
    let [first, last] = &system.shops[..] else { panic!("two nodes") };
    let buyers = first.log_in(0, 20).await;
    let sale = create_sale(&system, 20, Duration::from_secs(3)).await;
    let history = Recorder::default();
    let locked = history.buy(&mut first.client().await, sale, &buyers[0]).await.order.unwrap();
    assert_eq!(history.buy(&mut last.client().await, sale, &buyers[1]).await.response, Response::Created);
    let lock = ForeignLock::on_order(kind, &system.storages[0], locked).await;
    until("the other order expires", async || unpaid_left(&system, sale).await == 1).await;
    // The nodes go on trying.
    for buyer in &buyers[2..] {
        for shop in [first, last] {
            let bought = history.buy(&mut shop.client().await, sale, buyer).await;
            assert!(bought.response.is_confirmation(), "{bought:?}");
        }
    }
    until("these expire as well", async || unpaid_left(&system, sale).await == 1).await;
    lock.release().await;
    assert_eq!(all_expired(&system, &history, sale).await, 0);
}

/// Another client keeps the row of one sale locked while its buyers cancel: the connections of the node are left to the other sales.
async fn cancels_in_a_locked_sale_hold_up_no_other(kind: Kind) {
    let system = System::start(kind, TierKind::Shared, 1);
    let shop = &system.shops[0];
    let buyers = shop.log_in(0, 24).await;
    let (locked, other) =
        (create_sale(&system, 24, Duration::ZERO).await, create_sale(&system, 24, Duration::ZERO).await);
    let (of_locked, of_other) = (Recorder::default(), Recorder::default());
    let cancel = async |buyer: &Buyer, order: OrderId| {
        of_locked.cancel(&mut shop.client().await, locked, buyer, order).await.response
    };
    let mut orders = Vec::new();
    for buyer in &buyers {
        let bought = of_locked.buy(&mut shop.client().await, locked, buyer).await;
        orders.push(bought.order.unwrap());
    }
    assert_eq!(cancel(&buyers[0], orders[0]).await, Response::Cancelled);

    let lock = ForeignLock::on_sales(kind, &system.storages[0], &[locked]).await;
    let cancelling =
        futures_util::future::join_all(buyers.iter().zip(&orders).skip(1).map(|(buyer, order)| cancel(buyer, *order)));
    let meanwhile = async {
        assert_eq!(cancel(&buyers[0], orders[0]).await, Response::Cancelled, "it is cancelled already");
        for buyer in &buyers {
            let bought = of_other.buy(&mut shop.client().await, other, buyer).await;
            assert_eq!(bought.response, Response::Created, "{bought:?}");
        }
        shop.metric("stampede_ledger_breaker_opened_total").await
    };
    let (cancelled, opened) = futures_util::future::join(cancelling, meanwhile).await;
    assert_eq!(opened, 0.0, "the database answers");
    assert!(!cancelled.contains(&Response::Cancelled), "{cancelled:?}");
    lock.release().await;
    for (buyer, order) in buyers.iter().zip(&orders) {
        until("the order is cancelled", async || cancel(buyer, *order).await == Response::Cancelled).await;
    }
    assert_eq!(verify(&of_locked, &system.storages[0], &[shop], locked).await, 0);
    assert_eq!(verify(&of_other, &system.storages[0], &[shop], other).await, 24);
}

/// The lock in Redis only avoids double work.
async fn orders_expire_while_redis_is_away(kind: Kind) {
    let system = System::start(kind, TierKind::Shared, 2);
    let shop = &system.shops[0];
    let buyers = shop.log_in(0, 3).await;
    let sale = create_sale(&system, 3, Duration::from_secs(3)).await;
    for buyer in &buyers {
        buy_recorded(shop, sale, buyer).await;
    }
    let redis = system.redis.as_ref().unwrap();
    redis.kill().unwrap();
    until("the orders expire", async || unpaid_left(&system, sale).await == 0).await;
    redis.restart().unwrap();
    let path = format!("/v1/sales/{sale}/orders");
    until("the stock is sold again", async || {
        shop.client().await.post(&path, &buyers[0].token, &Value::Null).await.unwrap().status == 201
    })
    .await;
    assert_eq!(all_expired(&system, &Recorder::default(), sale).await, 0);
}

on_each_database!(
    servers: a_locked_order_holds_up_no_other,
    a_locked_sale_holds_up_no_other,
    cancels_in_a_locked_sale_hold_up_no_other,
    orders_expire_while_redis_is_away
);
in_each_tier!(all: unpaid_stock_is_sold_again_on_every_node, unpaid_stock_is_sold_again_while_nodes_are_killed);
in_each_tier!(@module queued_rabbitmq_mariadb, MariaDb, QueuedRabbitMq, unpaid_stock_is_sold_again_while_nodes_are_killed);

//! Many orders of one sale fall due together: they are cancelled within seconds, and buyers of the same sale go on buying meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stampede_core::ports::Admitted;
use stampede_core::{Clock as _, OrderId, SaleId, SystemClock, UserId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, until};

use super::deadline::create_sale;
use super::{System, TierKind};
use crate::shop::{Buyer, Kind, Storage, ledger, read_only, verify};

const BUYERS: u64 = 16;
/// For how long purchases are counted before the orders expire.
const ALONE: Duration = Duration::from_secs(2);
pub const DEADLINE: Duration = Duration::from_secs(1);
/// How long the expiry may take.
const LONGEST_EXPIRY: Duration = Duration::from_secs(30);
/// The part of the purchases per second that must remain while orders expire.
const MINIMUM_RATIO: f64 = 0.25;

/// Records this many orders in batches of a usual size, without asking the gate.
pub async fn record(storage: &Storage, sale: SaleId, orders: i64) {
    let stores = ledger(storage).await;
    let epoch = stores.ledger.sale(sale).await.unwrap().unwrap().epoch;
    let at = SystemClock.now();
    let order = |n| Admitted { order: OrderId::new(n).unwrap(), user: UserId::new(n).unwrap(), seq: n, at };
    let recorded: Vec<Admitted> = (1..=orders).map(order).collect();
    for batch in recorded.chunks(256) {
        stores.ledger.record(sale, epoch, batch).await.unwrap();
    }
    stores.ledger.close().await;
}

/// Buys and cancels in turns.
async fn buy_and_cancel(mut client: Client, history: Arc<Recorder>, sale: SaleId, buyer: Buyer, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let bought = history.buy(&mut client, sale, &buyer).await;
        assert_eq!(bought.response, Response::Created, "there is enough for everyone");
        let cancelled = history.cancel(&mut client, sale, &buyer, bought.order.unwrap()).await;
        assert_eq!(cancelled.response, Response::Cancelled);
    }
}

async fn orders_that_fall_due_together_hold_up_no_buyers(kind: Kind) {
    let orders = count(100_000, 5000);
    // The worker finds the first orders that are due, and is held until all are.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hold");
    let held = file.with_extension("reached");
    let hold = vec![("STAMPEDE_FAILPOINTS", format!("expire.read=hold:{}", file.display()))];
    let system = System::start_with(kind, TierKind::Solo, 1, hold);
    let (shop, storage) = (&system.shops[0], &system.storages[0]);
    let buyers = shop.log_in(0, BUYERS).await;
    let sale = create_sale(&system, u32::try_from(2 * orders).unwrap(), DEADLINE).await;
    std::fs::write(&file, "").unwrap();
    record(storage, sale, i64::try_from(orders).unwrap()).await;
    until("the worker has read what is due", async || held.exists()).await;

    let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
    let mut buying = Vec::new();
    for buyer in buyers {
        let (client, history, stop) = (shop.client().await, history.clone(), stop.clone());
        buying.push(tokio::spawn(buy_and_cancel(client, history, sale, buyer, stop)));
    }
    let purchases_per_s =
        |since: (Instant, usize)| (history.count(Response::Created) - since.1) as f64 / since.0.elapsed().as_secs_f64();
    until("everyone buys", async || history.count(Response::Created) > 2 * BUYERS as usize).await;
    let now = || (Instant::now(), history.count(Response::Created));
    let alone = now();
    tokio::time::sleep(ALONE).await;
    let alone = purchases_per_s(alone);

    let before = now();
    std::fs::remove_file(&held).unwrap();
    until("the orders expire", async || shop.metric("stampede_expired_orders_total").await >= orders as f64).await;
    let (expiry, beside) = (before.0.elapsed(), purchases_per_s(before));
    stop.store(true, Ordering::Relaxed);
    for task in buying {
        task.await.unwrap();
    }
    eprintln!("{kind:?}: {orders} orders expired in {expiry:?}; {alone:.0} purchases/s before, {beside:.0} meanwhile");
    assert!(expiry < LONGEST_EXPIRY, "{expiry:?}");
    assert!(beside >= alone * MINIMUM_RATIO, "{alone:.0} purchases/s before, {beside:.0} meanwhile");

    let ledger = read_only(storage).await;
    until("every mark is released", async || ledger.pending_releases(None, 1).await.unwrap().is_empty()).await;
    let row = ledger.sale(sale).await.unwrap().unwrap();
    ledger.close().await;
    let ended = history.count(Response::Created) as u64 + orders;
    assert_eq!((row.sold, row.released), (0, i64::try_from(ended).unwrap()), "returned once each");
    // Without the history: no user has requested the orders that were recorded directly.
    assert_eq!(verify(&Recorder::default(), storage, &[shop], sale).await, 0);
}

on_each_database!(orders_that_fall_due_together_hold_up_no_buyers);

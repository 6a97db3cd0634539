//! Changes that other processes make to sales.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stampede_core::ports::SaleDraft;
use stampede_core::*;
use stampede_engine::Bought;

use crate::faulty::{Cut, Faults, Faulty};
use crate::tier::{CONFIG, Tier, tier, tier_by, user};

/// Creates a sale as another process would: in the ledger alone.
async fn make_elsewhere(tier: &Tier, id: i64, window: Window) -> SaleId {
    let ledger = &tier.stores.ledger;
    let known = ledger.sale(tier.sale).await.unwrap().unwrap();
    let first = tier.stores.catalogue.voucher(known.voucher).await.unwrap().unwrap();
    let voucher = Voucher { id: VoucherId::new(id).unwrap(), ..first };
    tier.stores.catalogue.create_voucher(&voucher).await.unwrap();
    let sale = SaleId::new(id).unwrap();
    let (voucher, status) = (voucher.id, SaleStatus::OnSale);
    let draft = SaleDraft { id: sale, voucher, stock: 5, window, status, payment_deadline_ms: 0, buy_again: true };
    ledger.create_sale(draft, known.window.begin).await.unwrap();
    sale
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sale_created_by_another_process_can_be_bought_at_once() {
    let tier = tier(CONFIG, 1, |inner| inner).await;
    let window = tier.engine.sale(tier.sale).await.unwrap().sale.window;
    for n in 0..5 {
        let sale = make_elsewhere(&tier, 1000 + n, window).await;
        let bought = tier.engine.buy(sale, user(1)).await.unwrap();
        let Bought::Created(order) = bought else { panic!("{bought:?}") };
        assert_eq!(order.sale, sale);
    }
    let nowhere = SaleId::new(77).unwrap();
    assert_eq!(tier.engine.buy(nowhere, user(1)).await.unwrap_err().code(), Code::NoSuchSale);
}

/// The ledger alone knows who has an order in a sale that has left the gate. It is not asked for every request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_a_sale_that_is_long_over_do_not_all_read_the_ledger() {
    let clock = Arc::new(clock::ManualClock::at(SystemClock.now()));
    let faults = Arc::new(Faults::default());
    let wire = faults.clone();
    let tier = tier_by(clock.clone(), CONFIG, 10, |inner| Arc::new(Faulty { inner, faults: wire })).await;
    let bought = tier.engine.buy(tier.sale, user(1)).await.unwrap();
    clock.set(clock.now().plus(Duration::from_secs(30 * 3600)));
    let deadline = Instant::now() + Duration::from_secs(20);
    while tier.engine.gate_snapshot(tier.sale).await.is_ok() {
        assert!(Instant::now() < deadline, "the sale was not retired");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let before = faults.live_orders.load(Ordering::SeqCst);
    for _ in 0..50 {
        assert_eq!(tier.engine.buy(tier.sale, user(2)).await.unwrap_err().code(), Code::Ended);
    }
    let read = faults.live_orders.load(Ordering::SeqCst) - before;
    assert!(read < 5, "read {read} times");
    assert_eq!(tier.engine.buy(tier.sale, user(1)).await.unwrap().id(), bought.id(), "an owner gets the order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stuck_sale_does_not_delay_edits_of_others() {
    let clock = Arc::new(clock::ManualClock::at(SystemClock.now()));
    let faults = Arc::new(Faults::default());
    let wire = faults.clone();
    let tier = tier_by(clock.clone(), CONFIG, 10, |inner| Arc::new(Faulty { inner, faults: wire })).await;
    let begin = clock.now();
    let other = make_elsewhere(&tier, 500, Window { begin, end: begin.plus(Duration::from_secs(90 * 3600)) }).await;
    tier.engine.buy(other, user(2)).await.unwrap();

    // The first sale's order is stuck in the ledger while the sale becomes long over and is retired.
    faults.cuts.lock().unwrap().push_back(Cut::Slow(Duration::from_secs(3600)));
    let (engine, sale) = (tier.engine.clone(), tier.sale);
    let stuck = tokio::spawn(async move { engine.buy(sale, user(1)).await });
    while !faults.cuts.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    clock.set(begin.plus(Duration::from_secs(30 * 3600)));
    let deadline = Instant::now() + Duration::from_secs(20);
    while tier.engine.gate_snapshot(tier.sale).await.is_ok() {
        assert!(Instant::now() < deadline, "the sale was never put away");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tier.stores.ledger.set_status(other, SaleStatus::Paused, None, clock.now()).await.unwrap();
    while tier.engine.sale(other).await.unwrap().sale.status != SaleStatus::Paused {
        assert!(Instant::now() < deadline, "the edit was never seen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stuck.abort();
}

//! The worker on a real ledger that refuses to change the orders of one sale.

use sqlx::{Connection as _, SqliteConnection, raw_sql};
use stampede_core::ports::{Admitted, SaleDraft, ScheduledWork, Stores};
use stampede_core::{
    Epoch, Money, OrderId, OrderStatus, SaleStatus, Shop, ShopId, ShopTypeId, SystemClock, UserId, Voucher, VoucherId,
    VoucherKind, Window,
};
use stampede_ledger::{Database, open};
use stampede_testkit::until;

use super::*;
use crate::alerts::AlertConfig;

fn sale(id: i64) -> SaleId {
    SaleId::new(id).unwrap()
}

async fn create_sale(stores: &Stores, id: i64) {
    let voucher = Voucher {
        id: VoucherId::new(id).unwrap(),
        shop: ShopId::new(1).unwrap(),
        kind: VoucherKind::FlashSale,
        title: "t".into(),
        subtitle: String::new(),
        rules: String::new(),
        price: Money::from_cents(100).unwrap(),
        worth: Money::from_cents(200).unwrap(),
        on_shelf: true,
    };
    stores.catalogue.create_voucher(&voucher).await.unwrap();
    let now = SystemClock.now();
    let draft = SaleDraft {
        id: sale(id),
        voucher: voucher.id,
        stock: 10_000,
        window: Window { begin: now, end: now.plus(Duration::from_secs(3600)) },
        status: SaleStatus::OnSale,
        payment_deadline_ms: 1,
        buy_again: true,
    };
    stores.ledger.create_sale(draft, now).await.unwrap();
}

async fn record(stores: &Stores, id: i64, order: i64) {
    let (order, user) = (OrderId::new(order).unwrap(), UserId::new(order).unwrap());
    let admitted = Admitted { order, user, seq: order.get(), at: SystemClock.now() };
    stores.ledger.record(sale(id), Epoch(1), &[admitted]).await.unwrap();
}

async fn status(stores: &Stores, order: i64) -> OrderStatus {
    stores.ledger.order(OrderId::new(order).unwrap()).await.unwrap().unwrap().status
}

#[test]
fn failing_sales_are_left_out_for_growing_times() {
    let (mut delayed, start) = (Delayed::default(), Instant::now());
    let second = Duration::from_secs(1);
    let mut now = start;
    for (failures, left_out_s) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 60), (8, 60)] {
        assert_eq!(delayed.add_failure(sale(1), now), Some(failures));
        assert_eq!(delayed.left_out(now + left_out_s * second - second / 2), [sale(1)]);
        now += left_out_s * second;
        assert_eq!(delayed.left_out(now), []);
    }
    assert_eq!(delayed.left_out(now + LONGEST_RETRY), []);
    assert_eq!(delayed.add_failure(sale(1), now), Some(1), "it was forgotten");
    for id in 2..=MAX_FAILING as i64 {
        assert_eq!(delayed.add_failure(sale(id), now), Some(1));
    }
    assert_eq!(delayed.add_failure(sale(MAX_FAILING as i64 + 1), now), None);
    assert_eq!(delayed.add_failure(sale(1), now), Some(2));
}

#[test]
fn a_success_ends_a_row_of_failures() {
    let (mut delayed, start) = (Delayed::default(), Instant::now());
    assert_eq!(delayed.add_failure(sale(1), start), Some(1));
    let now = start + FIRST_RETRY;
    assert_eq!(delayed.add_failure(sale(1), now), Some(2));
    assert_eq!(delayed.add_failure(sale(2), now), Some(1));
    delayed.remove(&[sale(1)], &[]);
    assert_eq!(delayed.left_out(now), [sale(2)]);
    assert_eq!(delayed.add_failure(sale(1), now), Some(1), "it is left out for a second again");
    assert_eq!(delayed.left_out(now + FIRST_RETRY), []);
}

/// Orders that are being paid are found locked again and again. That is no failure, and each of them for a moment only.
#[test]
fn only_one_order_that_stays_locked_is_reported() {
    let (mut delayed, start) = (Delayed::default(), Instant::now());
    let order = |id| OrderId::new(id).unwrap();
    let second = Duration::from_secs(1);
    for n in 0..100_u32 {
        let now = start + n * second;
        assert_eq!(delayed.add_locked(sale(1), order(1 + i64::from(n)), true, now), Duration::ZERO);
        assert_eq!(delayed.left_out(now), [], "others of the sale were cancelled");
    }
    let start = start + 100 * second;
    for n in 0..=60_u32 {
        let now = start + n * second;
        let is_done = n % 2 == 0;
        let done = if is_done { vec![sale(1)] } else { vec![] };
        delayed.remove(&done, &[(sale(1), order(1000))]);
        assert_eq!(delayed.add_locked(sale(1), order(1000), is_done, now), n * second);
        assert_eq!(delayed.left_out(now), if is_done { vec![] } else { vec![sale(1)] });
        assert_eq!(delayed.left_out(now + INTERVAL), [], "until the next round only");
    }
    delayed.remove(&[sale(1)], &[]);
    assert_eq!(delayed.add_locked(sale(1), order(1000), false, start + 61 * second), Duration::ZERO);
    assert!(delayed.failing.is_empty());
}

/// A sale fails that has more due batches than are read at once: the orders of another sale expire, and an operator hears of the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_that_fails_holds_up_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("db");
    let stores = open(&Database::Sqlite(file.clone())).await.unwrap();
    let shop = Shop {
        id: ShopId::new(1).unwrap(),
        type_id: ShopTypeId::new(1).unwrap(),
        name: "s".into(),
        address: String::new(),
    };
    stores.catalogue.create_shop(&shop).await.unwrap();
    for id in 1..=2 {
        create_sale(&stores, id).await;
    }
    let first = i64::from(BATCHES) + 1;
    for order in 1..=first {
        record(&stores, 1, order).await;
    }
    record(&stores, 2, first + 1).await;
    let mut connection = SqliteConnection::connect(&format!("sqlite:{}", file.display())).await.unwrap();
    let trigger =
        "CREATE TRIGGER stuck BEFORE UPDATE ON orders WHEN NEW.sale_id = 1 BEGIN SELECT RAISE(ABORT, 'stuck'); END";
    raw_sql(trigger).execute(&mut connection).await.unwrap();

    let alerts = AlertConfig { sender: None, repeat_after: Duration::from_secs(3600) };
    let clock = Arc::new(SystemClock);
    let worker = PaymentDeadlines {
        ledger: stores.ledger.clone(),
        clock: clock.clone(),
        schedule: Schedule::new(ScheduledWork::ExpireOrders, None).unwrap(),
        release_added: Arc::default(),
        alerts: Arc::new(Alerts::new(alerts, stores.ledger.clone())),
    };
    let (mut delayed, counter) = (Delayed::default(), Counter::noop());
    until("the other sale's order expires", async || {
        worker.expire_all(&mut delayed, &counter).await.unwrap();
        status(&stores, first + 1).await == OrderStatus::Cancelled
    })
    .await;
    assert_eq!(delayed.left_out(Instant::now()), [sale(1)]);
    assert_eq!(status(&stores, 1).await, OrderStatus::Unpaid);

    while delayed.failing[&sale(1)].failures < MAX_FAILURES {
        delayed.failing.get_mut(&sale(1)).unwrap().retry_at = Instant::now();
        worker.expire_all(&mut delayed, &counter).await.unwrap();
    }
    let repeat_after = Duration::from_secs(3600);
    let claimed =
        stores.ledger.claim_alert("orders_not_expired sale 1", SystemClock.now(), repeat_after).await.unwrap();
    assert!(!claimed, "the alert was raised");
    raw_sql("DROP TRIGGER stuck").execute(&mut connection).await.unwrap();
    delayed.failing.get_mut(&sale(1)).unwrap().retry_at = Instant::now();
    worker.expire_all(&mut delayed, &counter).await.unwrap();
    assert_eq!(stores.ledger.load(sale(1)).await.unwrap().unwrap().marks, []);
}

//! Marks that cannot be released, and reports about them, on a real ledger.

use async_trait::async_trait;
use parking_lot::Mutex;
use stampede_core::ports::gate::{AdmitRequest, Snapshot};
use stampede_core::ports::{Admitted, Decision, LoadedSale, SaleDraft, Stores};
use stampede_core::{
    Epoch, Money, Sale, SaleStatus, Shop, ShopId, ShopTypeId, SystemClock, Timestamp, UserId, Voucher, VoucherId,
    VoucherKind, Window,
};
use stampede_ledger::{Database, LedgerConfig, open, open_with};
use stampede_testkit::until;

use super::*;
use crate::alerts::{Alert, AlertConfig, AlertSender};

#[derive(Debug, Default)]
struct Receiver(Mutex<Vec<Alert>>);

#[async_trait]
impl AlertSender for Receiver {
    async fn send(&self, alert: &Alert) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.lock().push(alert.clone());
        Ok(())
    }
}

/// The first round that would have reported the sale could not write: a later one does. The alert is repeated for as long as the marks cannot
/// be released, and the log has one row, whichever nodes notice it. If they fail again later, that is another case.
#[tokio::test]
async fn failing_releases_are_reported_until_they_succeed() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::Sqlite(folder.path().join("db"));
    let ledger = open_with(&database, LedgerConfig::default()).await.unwrap().ledger;
    let receiver = Arc::new(Receiver::default());
    let config = AlertConfig { sender: Some(receiver.clone()), repeat_after: Duration::from_millis(20) };
    let alerts = Alerts::new(config.clone(), ledger.clone());
    let rows = async || ledger.reconciled(None, 10).await.unwrap().len();
    let [failing, other] = [1, 2].map(|id| SaleId::new(id).unwrap());
    let failed = |failures| Failing { failures, retry_at: Instant::now() };
    let mut sales =
        FailingSales(HashMap::from([(failing, failed(MAX_FAILURES + 1)), (other, failed(MAX_FAILURES - 1))]));
    let mut reported = HashMap::new();
    until("it is told again", async || {
        report(ledger.as_ref(), &alerts, &sales, &mut reported).await;
        receiver.0.lock().len() == 2
    })
    .await;
    let about = format!("sale {failing}");
    assert!(receiver.0.lock().iter().all(|alert| (alert.kind, &alert.about) == (AlertKind::ReleaseFailed, &about)));
    assert_eq!(rows().await, 1);

    let nodes = [(); 2].map(|()| {
        let config = AlertConfig { repeat_after: Duration::from_secs(3600), ..config.clone() };
        (Alerts::new(config, ledger.clone()), Mutex::new(HashMap::new()))
    });
    let report_all = async |sales: &FailingSales| {
        for (alerts, reported) in &nodes {
            let mut of_node = std::mem::take(&mut *reported.lock());
            report(ledger.as_ref(), alerts, sales, &mut of_node).await;
            *reported.lock() = of_node;
        }
    };
    sales.0.remove(&failing);
    report(ledger.as_ref(), &alerts, &sales, &mut reported).await;
    for case in 1..=2 {
        sales.0.insert(failing, failed(MAX_FAILURES));
        report_all(&sales).await;
        report_all(&sales).await;
        let sent = receiver.0.lock().len();
        assert_eq!((sent, rows().await), (2 + case, 1 + case), "a case of its own");
        sales.0.remove(&failing);
        report_all(&sales).await;
    }
}

fn sale(id: i64) -> SaleId {
    SaleId::new(id).unwrap()
}

#[test]
fn failing_sales_are_left_out_for_growing_times() {
    let (mut failing, mut now) = (FailingSales::default(), Instant::now());
    for longest_ms in [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
        let longest = Duration::from_millis(longest_ms);
        assert!(!failing.is_left_out(sale(1), now));
        failing.add(sale(1), now);
        assert!(failing.is_left_out(sale(1), now + longest / 2 - Duration::from_millis(1)));
        let pause = failing.pause(now);
        assert!(pause >= INTERVAL.min(longest / 2) && pause <= INTERVAL.min(longest), "{pause:?}");
        now += longest;
    }
    assert_eq!(failing.reported().collect::<Vec<_>>(), [sale(1)]);
    // Another sale begins with the first pause, and is what the worker waits for.
    failing.add(sale(2), now);
    assert!(failing.pause(now) <= FIRST_PAUSE);
    assert!(!failing.is_left_out(sale(2), now + FIRST_PAUSE));
    for id in 3..=MAX_FAILING as i64 + 1 {
        failing.add(sale(id), now);
    }
    assert_eq!(failing.0.len(), MAX_FAILING);
    assert!(!failing.is_left_out(sale(MAX_FAILING as i64 + 1), now), "it is tried in every round");
}

/// A gate in which one sale is not open.
#[derive(Debug, Default)]
struct PartlyOpen {
    /// The calls for the sale that is not open, which has the id 1.
    refused: Mutex<u32>,
    released: Mutex<Vec<OrderId>>,
}

#[async_trait]
impl Gate for PartlyOpen {
    async fn release(&self, of: SaleId, releases: &[Release]) -> Result<Vec<bool>, GateError> {
        if of == sale(1) {
            *self.refused.lock() += 1;
            return Err(GateError::NotOpen);
        }
        self.released.lock().extend(releases.iter().map(|release| release.order));
        Ok(vec![true; releases.len()])
    }

    async fn admit(&self, _: SaleId, _: &[AdmitRequest], _: Timestamp) -> Result<Option<Vec<Decision>>, GateError> {
        unreachable!("the worker only releases")
    }

    async fn edit(&self, _: &Sale) -> Result<Option<u32>, GateError> {
        unreachable!("the worker only releases")
    }

    async fn open(&self, _: LoadedSale) -> Result<(), GateError> {
        unreachable!("the worker only releases")
    }

    async fn snapshot(&self, _: SaleId) -> Result<Option<Snapshot>, GateError> {
        unreachable!("the worker only releases")
    }

    async fn digest(&self, _: SaleId) -> Result<Option<(Snapshot, u64)>, GateError> {
        unreachable!("the worker only releases")
    }

    async fn marks(&self, _: SaleId) -> Result<Option<Vec<(UserId, OrderId)>>, GateError> {
        unreachable!("the worker only releases")
    }
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
        stock: 100,
        window: Window { begin: now, end: now.plus(Duration::from_secs(3600)) },
        status: SaleStatus::OnSale,
        payment_deadline_ms: 0,
        buy_again: true,
    };
    stores.ledger.create_sale(draft, now).await.unwrap();
}

/// Records an order and cancels it, so that its mark must be released.
async fn cancelled_order(stores: &Stores, id: i64, order: i64) {
    let (order, user, now) = (OrderId::new(order).unwrap(), UserId::new(order).unwrap(), SystemClock.now());
    let admitted = Admitted { order, user, seq: order.get(), at: now };
    stores.ledger.record(sale(id), Epoch(1), &[admitted]).await.unwrap();
    stores.ledger.cancel(order, user, now).await.unwrap();
}

/// The marks of a sale cannot be released for a while: those of another sale are released as soon as they are added.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_that_fails_holds_up_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let stores = open(&Database::Sqlite(folder.path().join("db"))).await.unwrap();
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
    cancelled_order(&stores, 1, 1).await;

    let (gate, added) = (Arc::new(PartlyOpen::default()), Arc::new(Notify::new()));
    let worker = {
        let (ledger, gate, added) = (stores.ledger.clone(), gate.clone(), added.clone());
        let config = AlertConfig { sender: None, repeat_after: Duration::from_secs(3600) };
        let alerts = Alerts::new(config, ledger.clone());
        tokio::spawn(async move {
            run_on(ledger.as_ref(), gate.as_ref(), &|_| false, &added, &alerts).await;
        })
    };
    // After so many failures the next attempt follows after 1.6 s at the earliest.
    until("the sale has failed for a while", async || *gate.refused.lock() >= 6).await;
    cancelled_order(&stores, 2, 2).await;
    added.notify_one();
    let delay = until("the mark of the other sale is released", async || !gate.released.lock().is_empty()).await;
    assert!(delay < Duration::from_millis(1200), "{delay:?}");
    until("its release is deleted", async || stores.ledger.pending_releases(None, 10).await.unwrap().len() == 1).await;
    assert_eq!(*gate.released.lock(), [OrderId::new(2).unwrap()]);
    worker.abort();
}

//! The committer on a real ledger to which another process writes as well.

use std::sync::atomic::AtomicBool;

use stampede_core::ports::{Admitted, Ledger, RecordOutcome, SaleDraft};
use stampede_core::{
    Clock as _, Epoch, Money, OrderId, SaleStatus, Shop, ShopId, ShopTypeId, SystemClock, UserId, Voucher, VoucherId,
    VoucherKind, Window,
};
use stampede_ledger::{Database, open};

use super::*;
use crate::alerts::{AlertConfig, Alerts};
use crate::sessions::Sessions;
use crate::tier::Context;
use crate::without_order::WithoutOrder;

async fn create_sale(folder: &tempfile::TempDir) -> (Arc<dyn Ledger>, SaleId) {
    let stores = open(&Database::Sqlite(folder.path().join("db"))).await.unwrap();
    let (shop, voucher, sale) = (ShopId::new(1).unwrap(), VoucherId::new(1).unwrap(), SaleId::new(1).unwrap());
    let type_id = ShopTypeId::new(1).unwrap();
    stores.catalogue.create_shop(&Shop { id: shop, type_id, name: "s".into(), address: String::new() }).await.unwrap();
    let price = Money::from_cents(100).unwrap();
    let voucher = Voucher {
        id: voucher,
        shop,
        kind: VoucherKind::FlashSale,
        title: "t".into(),
        subtitle: String::new(),
        rules: String::new(),
        price,
        worth: price,
        on_shelf: true,
    };
    stores.catalogue.create_voucher(&voucher).await.unwrap();
    let now = SystemClock.now();
    let window = Window { begin: now, end: now.plus(Duration::from_secs(3600)) };
    let (voucher, status) = (voucher.id, SaleStatus::OnSale);
    let draft = SaleDraft { id: sale, voucher, stock: 10, window, status, payment_deadline_ms: 0, buy_again: true };
    stores.ledger.create_sale(draft, now).await.unwrap();
    (stores.ledger, sale)
}

fn context(ledger: Arc<dyn Ledger>) -> Context {
    let clock = Arc::new(SystemClock);
    let alerts = AlertConfig { sender: None, repeat_after: Duration::from_secs(3600) };
    Context {
        ledger: ledger.clone(),
        clock,
        holder: "test".to_owned(),
        sale_index: Arc::default(),
        sessions: Arc::new(Sessions::new(1)),
        has_others: Arc::new(AtomicBool::new(true)),
        alerts: Arc::new(Alerts::new(alerts, ledger)),
        locks: None,
        ledger_breaker: Arc::default(),
        without_order: Arc::new(WithoutOrder::new()),
    }
}

/// Two changes elsewhere that follow each other closely are both in the gate after their refreshes, whenever the last reload was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refresh_right_after_another_is_not_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, sale) = create_sale(&folder).await;
    let (context, gate) = (context(ledger.clone()), Arc::new(MemoryGate::new()));
    gate.open(ledger.load(sale).await.unwrap().unwrap());
    let recording = Recording::new(sale, &context, Duration::from_secs(30));
    let committer = Committer::new(sale, ledger.clone(), gate.clone(), recording);
    for id in 1..=3 {
        let (order, user) = (OrderId::new(id).unwrap(), UserId::new(id).unwrap());
        let elsewhere = Admitted { order, user, seq: id, at: SystemClock.now() };
        assert_eq!(ledger.record(sale, Epoch(1), &[elsewhere]).await.unwrap(), [RecordOutcome::Inserted]);
        committer.refresh().await;
        assert!(gate.marks(sale).unwrap().contains(&(user, order)), "order {id}");
    }
}

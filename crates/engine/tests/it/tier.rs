//! A tier on a database of its own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ports::Ledger;
use stampede_core::ports::Stores;
use stampede_core::*;
use stampede_engine::{Config, Engine, IdConfig, LatePayments, PaymentConfig, Sender, SoloConfig, TierConfig};
use stampede_ledger::{Database, open};
use tempfile::TempDir;

use crate::config::{ALERTS, AUTH, CACHE};

pub const SOLO: SoloConfig = SoloConfig {
    shared_ledger: true,
    max_batch: 64,
    queue_per_sale: 100,
    queue_total: 150,
    quarantine_after: Duration::from_millis(700),
    abandon_queue: false,
};

pub const CONFIG: Config = Config {
    answer_timeout: Duration::from_secs(5),
    payment_deadline_ms: 900_000,
    buy_again: true,
    payments: PaymentConfig {
        callback_keys: Vec::new(),
        replay_window: Duration::ZERO,
        test_provider: false,
        late: LatePayments::Refund,
        provider: None,
        refund_pause: Duration::from_secs(1),
        refund_tries: 10,
    },
    events: None,
    tier: TierConfig::Solo(SOLO),
    ids: IdConfig::Snowflake,
    alerts: ALERTS,
    cache: CACHE,
    auth: AUTH,
};

#[derive(Debug)]
pub struct Nowhere;

#[async_trait]
impl Sender for Nowhere {
    async fn send(&self, _: &Phone, _: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }

    async fn send_text(&self, _: &Phone, _: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}

pub struct Tier {
    pub engine: Arc<Engine>,
    /// The same database without the engine, as another process would use it.
    pub stores: Stores,
    pub sale: SaleId,
    _folder: TempDir,
}

/// A sale of `stock` in an engine whose ledger is what `wrap` makes of the real one.
pub async fn tier(config: Config, stock: u32, wrap: impl FnOnce(Arc<dyn Ledger>) -> Arc<dyn Ledger>) -> Tier {
    tier_by(Arc::new(SystemClock), config, stock, wrap).await
}

/// The same, by another clock.
pub async fn tier_by(
    clock: Arc<dyn Clock>,
    config: Config,
    stock: u32,
    wrap: impl FnOnce(Arc<dyn Ledger>) -> Arc<dyn Ledger>,
) -> Tier {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let url = format!("sqlite:{}", folder.path().join("ledger.db").display());
    let stores = open(&Database::parse(&url).unwrap()).await.unwrap();
    let wrapped = Stores { ledger: wrap(stores.ledger.clone()), ..stores.clone() };
    let engine = Engine::start(config, wrapped, clock, Some(Arc::new(Nowhere))).await.unwrap();
    let new = NewShop { type_id: ShopTypeId::new(1).unwrap(), name: "s".into(), address: String::new() };
    let shop = engine.create_shop(new).await.unwrap();
    let voucher = NewVoucher {
        shop_id: shop.id,
        kind: VoucherKind::FlashSale,
        title: "t".into(),
        subtitle: String::new(),
        rules: String::new(),
        price_cents: 1,
        worth_cents: 2,
    };
    let voucher_id = engine.create_voucher(voucher).await.unwrap().id;
    let begin = engine.clock().now();
    let end = begin.plus(Duration::from_secs(3600));
    let sale = NewSale {
        voucher_id,
        stock,
        begin,
        end,
        status: SaleStatus::OnSale,
        payment_deadline_ms: None,
        buy_again: None,
    };
    let sale = engine.create_sale(sale).await.unwrap().sale.id;
    Tier { engine, stores, sale, _folder: folder }
}

pub fn user(n: i64) -> UserId {
    UserId::new(n).unwrap()
}

impl Tier {
    /// sold = live rows ≤ total and, at rest, nothing remains in the gate that the ledger has not.
    pub async fn check_at_rest(&self) -> u32 {
        let loaded = self.stores.ledger.load(self.sale).await.unwrap().unwrap();
        assert_eq!(loaded.marks.len(), loaded.sale.sold as usize);
        assert!(loaded.sale.sold <= loaded.sale.total);
        let view = self.engine.sale(self.sale).await.unwrap();
        assert_eq!(view.remaining, loaded.sale.total - loaded.sale.sold, "gate and ledger agree on what is left");
        loaded.sale.sold
    }
}

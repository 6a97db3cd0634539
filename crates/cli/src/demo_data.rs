//! Demonstration data: a few shops and three sales: open, starting in a minute, sold out.
//!
//! On existing data, only the missing sales are added: yesterday's have ended.

use std::time::Duration;

use anyhow::Context as _;
use stampede_core::{NewSale, NewShop, NewVoucher, Refusal, SaleId, SaleState, SaleStatus, ShopTypeId, VoucherKind};
use stampede_engine::{Engine, Error};

const DAY: Duration = Duration::from_secs(24 * 3600);

struct Offer {
    state: SaleState,
    shop: &'static str,
    address: &'static str,
    type_id: i64,
    title: &'static str,
    price_cents: i64,
    worth_cents: i64,
    stock: u32,
    begins_in: Duration,
}

const OFFERS: [Offer; 3] = [
    Offer {
        state: SaleState::SoldOut,
        shop: "Cloud Nine Karaoke 九霄云外",
        address: "88 Harbour Road",
        type_id: 2,
        title: "Karaoke night for six · 六人欢唱夜",
        price_cents: 990,
        worth_cents: 29_900,
        stock: 3,
        begins_in: Duration::ZERO,
    },
    Offer {
        state: SaleState::NotStarted,
        shop: "Third Wave Coffee 第三浪",
        address: "5 Canal Street",
        type_id: 1,
        title: "Hand-drip coffee for two · 手冲双人",
        price_cents: 100,
        worth_cents: 7_600,
        stock: 50,
        begins_in: Duration::from_secs(60),
    },
    Offer {
        state: SaleState::On,
        shop: "Red Lantern Hot Pot 红灯笼火锅",
        address: "12 Drum Tower Lane",
        type_id: 1,
        title: "Hot pot dinner for four · 四人火锅",
        price_cents: 4_900,
        worth_cents: 39_800,
        stock: 100,
        begins_in: Duration::ZERO,
    },
];

/// How long the start waits until everything can be used.
const READY_TIMEOUT: Duration = Duration::from_secs(15);
const READY_INTERVAL: Duration = Duration::from_millis(200);

/// Creates what is missing, once everything can be used. If that takes too long, the node starts without, and `/readyz` says why.
pub async fn fill(engine: &Engine) -> anyhow::Result<()> {
    let missing: Vec<&Offer> =
        OFFERS.iter().filter(|offer| engine.sales(Some(offer.state), None, 1).is_empty()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !wait_until_ready(engine).await {
        return Ok(());
    }
    for offer in missing {
        let sale = create_sale(engine, offer).await.context("cannot create the demonstration data")?;
        if offer.state == SaleState::SoldOut {
            sell_out(engine, sale, offer.stock).await.context("cannot create the demonstration data")?;
        }
    }
    Ok(())
}

/// Redis may be started together with this node. Returns whether everything can be used.
async fn wait_until_ready(engine: &Engine) -> bool {
    let Err(error) = engine.ready().await else { return true };
    tracing::warn!(%error, "waiting until the demonstration data can be created");
    let ready = async {
        while engine.ready().await.is_err() {
            tokio::time::sleep(READY_INTERVAL).await;
        }
    };
    let is_ready = tokio::time::timeout(READY_TIMEOUT, ready).await.is_ok();
    if !is_ready {
        tracing::warn!(%error, "starting without the demonstration data; start the node again to create it");
    }
    is_ready
}

async fn create_sale(engine: &Engine, offer: &Offer) -> anyhow::Result<SaleId> {
    let shop =
        NewShop { type_id: ShopTypeId::new(offer.type_id)?, name: offer.shop.into(), address: offer.address.into() };
    let shop = engine.create_shop(shop).await?;
    let voucher = NewVoucher {
        shop_id: shop.id,
        kind: VoucherKind::FlashSale,
        title: offer.title.into(),
        subtitle: String::new(),
        rules: String::new(),
        price_cents: offer.price_cents,
        worth_cents: offer.worth_cents,
    };
    let voucher = engine.create_voucher(voucher).await?;
    let begin = engine.clock().now().plus(offer.begins_in);
    let sale = NewSale {
        voucher_id: voucher.id,
        stock: offer.stock,
        begin,
        end: begin.plus(DAY),
        status: SaleStatus::OnSale,
        payment_deadline_ms: None,
        buy_again: None,
    };
    Ok(engine.create_sale(sale).await?.sale.id)
}

/// Test buyers buy the whole stock; no login codes are sent to them.
async fn sell_out(engine: &Engine, sale: SaleId, stock: u32) -> anyhow::Result<()> {
    for (buyer, token) in engine.open_test_sessions(0, stock).await? {
        let bought = engine.buy(sale, buyer).await;
        engine.log_out(&token).await?;
        match bought {
            // The gate decides by another clock, which may be behind.
            Err(Error::Refused(Refusal::NotStarted)) => {
                tracing::warn!(%sale, "not sold out: by the clock of the gate, the sale has not started yet");
                return Ok(());
            }
            bought => bought.map(drop)?,
        }
    }
    Ok(())
}

//! Refusing in the process after the sell-out, on two nodes. The stock is in Redis, and every admission is an order.
//!
//! In order: [`none`], [`local`], [`pub_sub`]. This file has the sell-out and the top-up that they go through.

pub mod local;
pub mod none;
pub mod pub_sub;

use std::time::{Duration, Instant};

use redis::AsyncCommands as _;

use crate::driver::{Answer, Crowd, Shop, send};
use crate::measured::{Flaw, Measured};
use crate::meter::Counters;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::Version;
use crate::{Error, Result};

pub const VERSIONS: &[&Version] = &[&none::VERSION, &local::VERSION, &pub_sub::VERSION];

/// Stock that is added after the sell-out.
const TOP_UP: u64 = 10;
/// How long the other node may take to sell it.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(3);
/// More calls of Redis per refused request than this are too many.
const MAX_CALLS: f64 = 0.1;
const POLL: Duration = Duration::from_millis(20);

pub trait SoldOutShop: Shop {
    /// Adds stock.
    fn top_up(&self, stock: u64) -> impl Future<Output = Result<()>> + Send;
}

/// Two nodes, each with half of the buyers.
struct TwoNodes<S>([S; 2]);

impl<S: SoldOutShop> Shop for TwoNodes<S> {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self([S::open(site).await?, S::open(site).await?]))
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.0[usize::from(user.is_multiple_of(2))].buy(user).await
    }
}

/// Sells everything, counts what the refusals after that cost, and then adds stock at one node, which the other must sell.
async fn sell_out_and_top_up<S: SoldOutShop>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = lab.site(version, lab.options.stock, RacePoint::open()).await?;
    let nodes = std::sync::Arc::new(TwoNodes::<S>::open(&site).await?);
    let crowd = Crowd { buyers: lab.options.buyers, tries: 1, stock: site.stock };
    send(&nodes, crowd, lab.seed).await?;
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&nodes, crowd, lab.seed.wrapping_add(1)).await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    let calls = measured.redis_calls_per_request.unwrap_or_default();
    measured.count(Flaw::Overload, u64::from(calls > MAX_CALLS), |_| {
        format!("{calls:.2} calls of Redis per request after the sell-out")
    });
    #[expect(clippy::cast_precision_loss, reason = "a number of requests")]
    let refused_per_s = answers.requests as f64 / answers.elapsed.as_secs_f64();
    measured.orders_per_s = None;
    measured.figures.push(("refusals per second", refused_per_s));

    let [first, second] = &nodes.0;
    first.top_up(TOP_UP).await?;
    let (deadline, mut user) = (Instant::now() + REOPEN_TIMEOUT, crowd.buyers);
    let mut redis = site.redis()?;
    let mut left = TOP_UP;
    while left > 0 && Instant::now() < deadline {
        user += 1;
        if second.buy(user).await? != Answer::Bought {
            tokio::time::sleep(POLL).await;
        }
        let sold: u64 = redis.scard("buyers").await?;
        left = (site.stock + TOP_UP).checked_sub(sold).ok_or_else(|| Error::Failed(format!("{sold} sold")))?;
    }
    measured.count(Flaw::Undersold, left, |left| {
        format!("{left} of {TOP_UP} added items not sold by the other node within {REOPEN_TIMEOUT:?}")
    });
    site.close().await;
    Ok(measured)
}

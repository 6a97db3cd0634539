//! Refusing in the process after the sell-out, on two nodes. The stock is in Redis, and every admission is an order.
//!
//! In order: [`none`], [`local`], [`pub_sub`]. This file has the sell-out and the top-up that they go through.

pub mod local;
pub mod none;
pub mod pub_sub;

use std::time::{Duration, Instant};

use redis::AsyncCommands as _;

use crate::driver::{Answer, CONCURRENCY, Crowd, Shop, send};
use crate::measured::{Flaw, Measured};
use crate::meter::{CountedRedis, Counters};
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::Version;
use crate::{Error, Result};

pub const VERSIONS: &[&Version] = &[&none::VERSION, &local::VERSION, &pub_sub::VERSION];

/// How long a node refuses by itself if no message ends that.
pub const EXPIRY: Duration = Duration::from_secs(3);
/// Stock that is added after the sell-out, each time.
const TOP_UP: u64 = 10;
/// How long the other node may take to sell it after a message: less than the expiry, which would end the refusals too.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it may take if the message is lost.
const LOST_MESSAGE_TIMEOUT: Duration = EXPIRY.saturating_add(REOPEN_TIMEOUT);
/// Requests after the sell-out, at least.
const MIN_REFUSED: u64 = 2_000;
/// One call of Redis for this many refused requests is too many, beside those of the moments at which a mark expires: then all requests that
/// are under way ask and publish.
const REFUSED_PER_CALL: u64 = 10;
const CALLS_PER_EXPIRY: u64 = 2 * CONCURRENCY as u64;
const POLL: Duration = Duration::from_millis(20);

pub trait SoldOutShop: Shop {
    /// Adds stock, and tells the other nodes if the version does.
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

/// Sells everything, counts what the refusals after that cost, and then adds stock at one node, which the other must sell: first with a
/// message, if the version sends one, and then as if the message was lost.
async fn sell_out_and_top_up<S: SoldOutShop>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = lab.site(version, lab.options.stock, RacePoint::open()).await?;
    let nodes = std::sync::Arc::new(TwoNodes::<S>::open(&site).await?);
    let crowd = Crowd { buyers: lab.options.buyers, tries: 1, stock: site.stock };
    let selling = send(&nodes, crowd, lab.seed).await?;
    let mut redis = site.redis()?;
    let sold: u64 = redis.scard("buyers").await?;
    measured.count(Flaw::Oversold, sold.saturating_sub(site.stock), |_| {
        format!("{sold} buyers for a stock of {}", site.stock)
    });
    measured.count(Flaw::Undersold, site.stock.saturating_sub(sold), |left| {
        format!("{left} of {} left after the sell-out", site.stock)
    });
    let late = Crowd { tries: MIN_REFUSED.div_ceil(crowd.buyers), ..crowd };
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&nodes, late, lab.seed.wrapping_add(1)).await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    let expiries = answers.elapsed.as_secs() / EXPIRY.as_secs() + 1;
    let allowed = answers.requests / REFUSED_PER_CALL + CALLS_PER_EXPIRY * expiries;
    let too_many = counted.redis_sent.unwrap_or_default().saturating_sub(allowed);
    let calls = measured.redis_calls_per_request.unwrap_or_default();
    measured.count(Flaw::Overload, too_many, |_| format!("{calls:.2} calls of Redis per request after the sell-out"));
    #[expect(clippy::cast_precision_loss, reason = "a number of requests")]
    let refused_per_s = answers.requests as f64 / answers.elapsed.as_secs_f64();
    measured.orders_per_s = Some(selling.orders_per_s());
    measured.figures.push(("refusals per second", refused_per_s));

    drop(nodes);
    let mut newcomers = Newcomers { last: crowd.buyers, redis };
    let [first, second] = newcomers.sold_out_nodes::<S>(&site).await?;
    first.top_up(TOP_UP).await?;
    let left = newcomers.buy_within(&second, site.stock + TOP_UP, REOPEN_TIMEOUT, &mut measured).await?;
    measured.count(Flaw::Undersold, left, |left| {
        format!("{left} of {TOP_UP} added items not sold by the other node within {REOPEN_TIMEOUT:?}")
    });
    if left == 0 {
        let [_first, second] = newcomers.sold_out_nodes::<S>(&site).await?;
        let _: u64 = newcomers.redis.incr("stock", TOP_UP).await?;
        let items = site.stock + 2 * TOP_UP;
        let left = newcomers.buy_within(&second, items, LOST_MESSAGE_TIMEOUT, &mut measured).await?;
        measured.count(Flaw::Undersold, left, |left| {
            format!("{left} of {TOP_UP} added items not sold within {LOST_MESSAGE_TIMEOUT:?} after a message was lost")
        });
    }
    measured.count_lasting_keys(lab, &site).await?;
    site.close().await;
    Ok(measured)
}

/// Users who have not come before, and Redis, which knows how many have bought.
struct Newcomers {
    last: u64,
    redis: CountedRedis,
}

impl Newcomers {
    /// Two nodes that have just learned of the sell-out, so that what they remember of it does not expire soon.
    async fn sold_out_nodes<S: SoldOutShop>(&mut self, site: &Site) -> Result<[S; 2]> {
        let nodes = [S::open(site).await?, S::open(site).await?];
        for node in &nodes {
            let answer = self.buy(node).await?;
            if answer != Answer::SoldOut {
                return Err(Error::Failed(format!("{answer:?} after the sell-out")));
            }
        }
        Ok(nodes)
    }

    /// Buys at a node until this many items are sold. Returns how many are left after the time limit.
    async fn buy_within<S: SoldOutShop>(
        &mut self,
        node: &S,
        items: u64,
        limit: Duration,
        measured: &mut Measured,
    ) -> Result<u64> {
        let deadline = Instant::now() + limit;
        loop {
            let sold: u64 = self.redis.scard("buyers").await?;
            let left = items.saturating_sub(sold);
            measured.count(Flaw::Oversold, sold.saturating_sub(items), |_| format!("{sold} buyers for {items} items"));
            if left == 0 || Instant::now() > deadline {
                return Ok(left);
            }
            if self.buy(node).await? != Answer::Bought {
                tokio::time::sleep(POLL).await;
            }
        }
    }

    async fn buy<S: SoldOutShop>(&mut self, node: &S) -> Result<Answer> {
        self.last += 1;
        node.buy(self.last).await
    }
}

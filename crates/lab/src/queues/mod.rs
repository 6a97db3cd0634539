//! Answering the buyer first and writing to the database later. The buyer is told yes once the script in Redis has admitted them.
//!
//! In order: [`memory`], [`list`], [`processing_list`], [`pub_sub`], [`stream_from_end`], [`stream_group`], [`rabbitmq_unconfirmed`],
//! [`rabbitmq_early_ack`], [`rabbitmq_key_deleted`], [`rabbitmq_ack_after_commit`]. This file has the crash that they go through.

pub mod list;
pub mod memory;
pub mod processing_list;
pub mod pub_sub;
pub mod rabbitmq_ack_after_commit;
pub mod rabbitmq_early_ack;
pub mod rabbitmq_key_deleted;
pub mod rabbitmq_unconfirmed;
pub mod stream_from_end;
pub mod stream_group;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Answer, Crowd, Shop, judge, send};
use crate::kill::{KillPoint, Node};
use crate::meter::Counters;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::Version;
use crate::{Error, Measured, Result};

pub const VERSIONS: &[&Version] = &[
    &memory::VERSION,
    &list::VERSION,
    &processing_list::VERSION,
    &pub_sub::VERSION,
    &stream_from_end::VERSION,
    &stream_group::VERSION,
    &rabbitmq_unconfirmed::VERSION,
    &rabbitmq_early_ack::VERSION,
    &rabbitmq_key_deleted::VERSION,
    &rabbitmq_ack_after_commit::VERSION,
];

/// The crowd before and during a crash.
const CRASH: Crowd = Crowd { buyers: 60, tries: 2, stock: 40 };
/// How long the queue may take to be worked off.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Orders count as lost if the queue has been empty and no order was written for this long. What a consumer has taken and not yet written
/// is not in the queue.
const QUIET: Duration = Duration::from_millis(1_500);
/// How long a worker may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// A shop whose orders are written by a worker.
pub trait QueuedShop: Shop {
    /// Writes orders until it is killed. Passes `site.kill` between taking an order and committing it.
    fn work(self: Arc<Self>) -> impl Future<Output = Result<()>> + Send;

    /// Whether orders that are sent from now on reach the worker.
    fn is_listening(&self) -> impl Future<Output = Result<bool>> + Send {
        async { Ok(true) }
    }

    /// Orders that the queue still has.
    fn queued(&self) -> impl Future<Output = Result<u64>> + Send;
}

/// Kills the node while it writes an order, starts another one, and then runs the load of the options.
pub async fn crash_and_load<S: QueuedShop>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let mut site = lab.site(version, CRASH.stock, RacePoint::open()).await?;
    site.kill = KillPoint::at(1 + lab.seed % 20);
    let node = start::<S>(&site).await?;
    let answers = send(&node.shop, CRASH, lab.seed).await?;
    site.kill.reached().await?;
    node.kill().await;
    site.kill = KillPoint::never();
    let mut node = start::<S>(&site).await?;
    drain(&mut node, &site, answers.bought.len() as u64).await?;
    judge(&site, CRASH, &answers, &mut measured).await?;
    node.kill().await;
    site.close().await;
    load::<S>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// Kills the broker while it has all orders.
async fn broker_crash<S: QueuedShop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let site = lab.site(version, CRASH.stock, RacePoint::open()).await?;
    let shop = Arc::new(S::open(&site).await?);
    // The definition of a queue is in memory for a moment, and a queue of a real shop is older than that.
    lab.servers.sync_rabbitmq().await?;
    let answers = send(&shop, CRASH, lab.seed).await?;
    lab.servers.kill_rabbitmq().await?;
    let mut node = start::<S>(&site).await?;
    drain(&mut node, &site, answers.bought.len() as u64).await?;
    judge(&site, CRASH, &answers, measured).await?;
    node.kill().await;
    site.close().await;
    Ok(())
}

/// The load of the options, without a crash.
async fn load<S: QueuedShop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let load = Crowd { buyers: lab.options.buyers, tries: 2, stock: lab.options.stock };
    let site = lab.site(version, load.stock, RacePoint::open()).await?;
    let mut node = start::<S>(&site).await?;
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&node.shop, load, lab.seed).await?;
    let answered = Instant::now();
    drain(&mut node, &site, answers.bought.len() as u64).await?;
    let drained = answered.elapsed();
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    measured.figures.push(("ms from the last answer to the last order", drained.as_secs_f64() * 1000.0));
    judge(&site, load, &answers, measured).await?;
    node.kill().await;
    site.close().await;
    Ok(())
}

/// Starts a node, whose worker listens before the first order is sent.
pub(crate) async fn start<S: QueuedShop>(site: &Site) -> Result<Node<S>> {
    let shop = Arc::new(S::open(site).await?);
    let worker = tokio::spawn(shop.clone().work());
    let mut node = Node::new(shop, worker);
    let deadline = Instant::now() + START_TIMEOUT;
    while !node.shop.is_listening().await? {
        node.check().await?;
        if Instant::now() > deadline {
            return Err(Error::TimedOut("the worker listens"));
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(node)
}

/// Waits until all confirmed orders are written, or until no more can come.
pub(crate) async fn drain<S: QueuedShop>(node: &mut Node<S>, site: &Site, confirmed: u64) -> Result<()> {
    let (deadline, mut last, mut since) = (Instant::now() + DRAIN_TIMEOUT, 0, Instant::now());
    loop {
        node.check().await?;
        let (orders,): (i64,) = sqlx::query_as("SELECT COUNT(*) FROM orders").fetch_one(&site.db()?).await?;
        if orders.unsigned_abs() != last {
            (last, since) = (orders.unsigned_abs(), Instant::now());
        }
        let queued = node.shop.queued().await?;
        if queued > 0 {
            since = Instant::now();
        }
        if queued == 0 && (last >= confirmed || since.elapsed() > QUIET) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::TimedOut("the queue is worked off"));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// What the scripts of this family answer.
fn answer(admitted: u8) -> Answer {
    match admitted {
        0 => Answer::Bought,
        1 => Answer::SoldOut,
        _ => Answer::AlreadyBought,
    }
}

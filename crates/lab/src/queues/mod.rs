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
use crate::version::{Expected, Version};
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
/// How long a queue that is not empty may take to write the next order.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Orders count as lost if the queue has been empty and no order was written for this long. What a consumer has taken and not yet written
/// is not in the queue, and a broker takes a moment to notice that a consumer is gone. A version that must not lose anything is given much
/// longer: it only waits for as long as an order is missing.
const QUIET: Duration = Duration::from_millis(1_500);
const QUIET_OF_SOUND: Duration = Duration::from_secs(20);
/// How long a worker may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// A shop whose orders are written by a worker.
pub trait QueuedShop: Shop {
    /// Writes orders until it is killed. Passes `site.kill` between taking an order and committing it, and in a sound version
    /// `site.kill_after_commit` between committing it and telling the queue.
    fn work(self: Arc<Self>) -> impl Future<Output = Result<()>> + Send;

    /// Whether orders that are sent from now on reach the worker.
    fn is_listening(&self) -> impl Future<Output = Result<bool>> + Send {
        async { Ok(true) }
    }

    /// Orders that the queue still has.
    fn queued(&self) -> impl Future<Output = Result<u64>> + Send;
}

/// Where a node dies while it writes an order.
#[derive(Debug, Clone, Copy)]
enum Crash {
    /// The order is not written yet.
    BeforeCommit,
    /// The order is written, and the queue still has it: it is written a second time.
    AfterCommit,
}

/// Kills the node while it writes an order, starts another one, and then runs the load of the options.
pub async fn crash_and_load<S: QueuedShop>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let order = order_of_crash(lab);
    crash::<S>(lab, version, Crash::BeforeCommit, order, &mut measured).await?;
    if version.expected == Expected::Sound {
        crash::<S>(lab, version, Crash::AfterCommit, order, &mut measured).await?;
    }
    load::<S>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// The order, counted from one, at which the node dies.
const fn order_of_crash(lab: &Lab) -> u64 {
    1 + lab.seed % 20
}

/// Kills the node while it writes its n-th order, and starts another one.
async fn crash<S: QueuedShop>(
    lab: &Lab,
    version: &Version,
    at: Crash,
    order: u64,
    measured: &mut Measured,
) -> Result<()> {
    let mut site = lab.site(version, CRASH.stock, RacePoint::open()).await?;
    let point = KillPoint::at(order);
    match at {
        Crash::BeforeCommit => site.kill = point.clone(),
        Crash::AfterCommit => site.kill_after_commit = point.clone(),
    }
    let node = start::<S>(&site).await?;
    let answers = send(&node.shop, CRASH, lab.seed).await?;
    point.reached().await?;
    node.kill().await;
    measured.killed();
    (site.kill, site.kill_after_commit) = (KillPoint::never(), KillPoint::never());
    let mut node = start::<S>(&site).await?;
    drain(&mut node, &site, answers.bought.len() as u64, quiet(version)).await?;
    judge(&site, CRASH, &answers, measured).await?;
    node.kill().await;
    site.close().await;
    Ok(())
}

/// Kills the broker while it has all orders.
async fn broker_crash<S: QueuedShop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let site = lab.site(version, CRASH.stock, RacePoint::open()).await?;
    let shop = Arc::new(S::open(&site).await?);
    // The definition of a durable queue is in memory for a moment, and a queue of a real shop is older than that.
    if version.expected == Expected::Sound {
        lab.servers.sync_rabbitmq().await?;
    }
    let answers = send(&shop, CRASH, lab.seed).await?;
    lab.servers.kill_rabbitmq().await?;
    measured.killed();
    let mut node = start::<S>(&site).await?;
    drain(&mut node, &site, answers.bought.len() as u64, quiet(version)).await?;
    judge(&site, CRASH, &answers, measured).await?;
    node.kill().await;
    site.close().await;
    Ok(())
}

/// The load of the options, without a crash.
async fn load<S: QueuedShop>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let load = Crowd { buyers: lab.options.buyers, tries: 2, stock: lab.options.stock };
    let site = lab.site(version, load.stock, RacePoint::open()).await?;
    let cost = cost_of_poll::<S>(lab, &site).await?;
    let mut node = start::<S>(&site).await?;
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&node.shop, load, lab.seed).await?;
    let answered = Instant::now();
    let polls = drain(&mut node, &site, answers.bought.len() as u64, quiet(version)).await?;
    let drained = answered.elapsed();
    let counted = Counters::read(&lab.servers, &site).await?.since(before).without(polls, cost);
    measured.set_load(&answers, counted);
    measured.figures.push(("ms from the last answer to the last order", drained.as_secs_f64() * 1000.0));
    judge(&site, load, &answers, measured).await?;
    measured.count_lasting_keys(lab, &site).await?;
    node.kill().await;
    site.close().await;
    Ok(())
}

/// Starts a node, whose worker listens before the first order is sent.
pub(crate) async fn start<S: QueuedShop>(site: &Site) -> Result<Node<S>> {
    let shop = Arc::new(S::open(site).await?);
    let mut node = Node::start(shop.clone(), shop.work());
    let deadline = Instant::now() + START_TIMEOUT;
    while !node.shop.is_listening().await? {
        node.check()?;
        if Instant::now() > deadline {
            return Err(Error::TimedOut("the worker listens"));
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(node)
}

/// How long the orders of a version may be missing before they count as lost.
const fn quiet(version: &Version) -> Duration {
    match version.expected {
        Expected::Sound => QUIET_OF_SOUND,
        Expected::Flawed(_) => QUIET,
    }
}

/// Waits until all confirmed orders are written, or until the queue was empty for a while. Returns how often it has polled.
pub(crate) async fn drain<S: QueuedShop>(
    node: &mut Node<S>,
    site: &Site,
    confirmed: u64,
    quiet: Duration,
) -> Result<u64> {
    let (mut polls, mut last, mut written, mut empty_since) = (0, 0, Instant::now(), Instant::now());
    loop {
        node.check()?;
        let (orders, queued) = poll(&*node.shop, site).await?;
        polls += 1;
        if orders != last {
            (last, written, empty_since) = (orders, Instant::now(), Instant::now());
        }
        if queued > 0 {
            empty_since = Instant::now();
        }
        if queued == 0 && (last >= confirmed || empty_since.elapsed() > quiet) {
            return Ok(polls);
        }
        if written.elapsed() > DRAIN_TIMEOUT {
            return Err(Error::TimedOut("the queue is worked off"));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How many orders are written, and how many the queue still has.
async fn poll<S: QueuedShop>(shop: &S, site: &Site) -> Result<(u64, u64)> {
    let (orders,): (i64,) = sqlx::query_as("SELECT COUNT(*) FROM orders").fetch_one(&site.db()?).await?;
    Ok((orders.unsigned_abs(), shop.queued().await?))
}

/// The statements and commands of one poll, which are not those of the version. Measured while nothing else is under way.
async fn cost_of_poll<S: QueuedShop>(lab: &Lab, site: &Site) -> Result<Counters> {
    let shop = S::open(site).await?;
    let before = Counters::read(&lab.servers, site).await?;
    poll(&shop, site).await?;
    Ok(Counters::read(&lab.servers, site).await?.since(before))
}

/// What the scripts of this family answer.
fn answer(admitted: u8) -> Answer {
    match admitted {
        0 => Answer::Bought,
        1 => Answer::SoldOut,
        _ => Answer::AlreadyBought,
    }
}

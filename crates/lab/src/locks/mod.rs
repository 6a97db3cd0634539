//! Locks that several nodes share, on Redis. The lock of a user protects their one order; two holders at a time are two orders.
//!
//! In order: [`setnx_expire`], [`no_owner`], [`thread_id`], [`two_steps`], [`compare_and_delete`], [`watchdog`]; then one master, several
//! masters and a majority while a master is lost: [`one_master`], [`multi_lock`], [`red_lock`]. This file has what they go through.

pub mod compare_and_delete;
pub mod failover;
pub mod multi_lock;
pub mod no_owner;
pub mod one_master;
pub mod red_lock;
pub mod setnx_expire;
pub mod thread_id;
pub mod two_steps;
pub mod watchdog;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{Answer, Crowd, Shop, send};
use crate::kill::KillPoint;
use crate::measured::{Flaw, Measured};
use crate::meter::Counters;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::{Expected, Version};
use crate::{Error, Result};

pub const VERSIONS: &[&Version] = &[
    &setnx_expire::VERSION,
    &no_owner::VERSION,
    &thread_id::VERSION,
    &two_steps::VERSION,
    &compare_and_delete::VERSION,
    &watchdog::VERSION,
    &one_master::VERSION,
    &multi_lock::VERSION,
    &red_lock::VERSION,
];

/// How long a lock lasts without renewal.
pub const LEASE: Duration = Duration::from_millis(300);
/// How long a holder works.
const LONG_WORK: Duration = Duration::from_secs(3);
/// When a lock must be free after its holder has died.
const FREE_AFTER: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// How often a scenario is begun again because the machine was too slow for it.
const TRIES: u32 = 5;
const USER: u64 = 1;

/// A lock per user. One value is one node.
pub trait NodeLock: Sized + Send + Sync + 'static {
    /// What proves that the node holds the lock.
    type Held: Send + 'static;

    fn connect(site: &Site) -> impl Future<Output = Result<Self>> + Send;

    /// The lock if it is free. In the versions that go through [`Scenario::DeadHolder`], passes `site.kill` once Redis has the lock.
    fn acquire(&self, user: u64) -> impl Future<Output = Result<Option<Self::Held>>> + Send;

    /// Whether the holder still believes that it holds the lock. One that knows that the lease has ended stops working.
    fn is_held(&self, _held: &Self::Held) -> bool {
        true
    }

    /// Whether the lease of a lock that was asked for at this time cannot have ended yet.
    fn is_leased(&self, _held: &Self::Held, asked_at: Instant) -> bool {
        asked_at.elapsed() < LEASE
    }

    /// Passes `site.race` before what deletes the lock.
    fn release(&self, held: Self::Held) -> impl Future<Output = Result<()>> + Send;
}

/// What can happen to a lock on one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// A node dies just after Redis has given it the lock. Another one must get it in the end.
    DeadHolder,
    /// A release begins in time and hangs until the lease has ended and another node holds the lock. A third one must not get it.
    LateRelease,
    /// A node works for longer than the lease. No other node may get the lock.
    LongWork,
}

impl Scenario {
    /// What goes wrong in it, as a flaw and in words.
    fn flaw(self) -> (Flaw, String) {
        match self {
            Self::DeadHolder => (Flaw::Leaked, format!("the lock is still taken {FREE_AFTER:?} after its holder died")),
            Self::LateRelease => (Flaw::Duplicated, two_holders("a late release deleted the lock of another node")),
            Self::LongWork => (Flaw::Duplicated, two_holders("the lease ended while its holder worked")),
        }
    }

    /// Whether that happens.
    async fn fails<L: NodeLock>(self, lab: &Lab, version: &Version) -> Result<bool> {
        match self {
            Self::DeadHolder => dead_holder::<L>(lab, version).await,
            Self::LateRelease => late_release::<L>(lab, version).await,
            Self::LongWork => long_work::<L>(lab, version).await,
        }
    }
}

fn two_holders(how: &str) -> String {
    format!("two nodes held the lock at once: {how}")
}

/// Runs scenarios, and then the load of the options. A flawed version has its flaw in the last scenario. Those before it are what it has
/// repaired: if one of them fails, the version is not what its story says, whatever happens in the last one.
pub async fn scenarios<L: NodeLock>(lab: &Lab, version: &Version, scenarios: &[Scenario]) -> Result<Measured> {
    let mut measured = Measured::default();
    for (n, scenario) in scenarios.iter().enumerate() {
        let fails = scenario.fails::<L>(lab, version).await?;
        let (flaw, seen) = scenario.flaw();
        if fails && version.expected != Expected::Sound && n + 1 < scenarios.len() {
            return Err(Error::Failed(format!("{seen}, which this version prevents")));
        }
        measured.count(flaw, fails.into(), |_| seen);
    }
    load::<L>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// See [`Scenario::DeadHolder`].
async fn dead_holder<L: NodeLock>(lab: &Lab, version: &Version) -> Result<bool> {
    let mut site = lab.site(version, 0, RacePoint::open()).await?;
    site.kill = KillPoint::at(1);
    let dying = L::connect(&site).await?;
    let acquiring = tokio::spawn(async move { dying.acquire(USER).await.map(drop) });
    site.kill.reached().await?;
    acquiring.abort();
    site.kill = KillPoint::never();
    Ok(acquire_within(&L::connect(&site).await?, FREE_AFTER).await?.is_none())
}

/// See [`Scenario::LateRelease`].
async fn late_release<L: NodeLock>(lab: &Lab, version: &Version) -> Result<bool> {
    for _ in 0..TRIES {
        let site = lab.site(version, 0, RacePoint::within(2, FREE_AFTER)).await?;
        let (first, second, third) = (L::connect(&site).await?, L::connect(&site).await?, L::connect(&site).await?);
        let (held, _) = acquire_first(&first).await?;
        let releasing = tokio::spawn(async move { first.release(held).await });
        site.race.arrived(1).await;
        // With a lock that is renewed, the release has to end first.
        let mut second_held = acquire_within(&second, LEASE * 3).await?;
        site.race.pass().await;
        // The release may report that the lock was lost.
        let _ = releasing.await;
        if second_held.is_none() {
            second_held = acquire_within(&second, FREE_AFTER).await?;
        }
        let third_held = third.acquire(USER).await?;
        let (Some((held, asked_at)), Some(_)) = (second_held, third_held) else { return Ok(false) };
        // If the lease of the second node may have ended by itself, the late release is not what let the third one in.
        if second.is_leased(&held, asked_at) {
            return Ok(true);
        }
    }
    Err(Error::TimedOut("a late release, and another node within one lease"))
}

/// See [`Scenario::LongWork`].
async fn long_work<L: NodeLock>(lab: &Lab, version: &Version) -> Result<bool> {
    let site = lab.site(version, 0, RacePoint::open()).await?;
    let (first, second) = (L::connect(&site).await?, L::connect(&site).await?);
    let (held, _) = acquire_first(&first).await?;
    let both = acquire_within(&second, LONG_WORK).await?.is_some() && first.is_held(&held);
    // It may have been lost.
    let _ = first.release(held).await;
    Ok(both)
}

/// Acquires a lock that no other node holds. Also returns when it was asked for.
async fn acquire_first<L: NodeLock>(lock: &L) -> Result<(L::Held, Instant)> {
    acquire_within(lock, FREE_AFTER).await?.ok_or(Error::TimedOut("the first node gets the lock"))
}

/// Acquires the lock within a time, and returns when it was asked for.
async fn acquire_within<L: NodeLock>(lock: &L, limit: Duration) -> Result<Option<(L::Held, Instant)>> {
    let deadline = Instant::now() + limit;
    loop {
        let asked_at = Instant::now();
        if let Some(held) = lock.acquire(USER).await? {
            return Ok(Some((held, asked_at)));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Acquires and releases the lock of one user after another.
async fn load<L: NodeLock>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let crowd = Crowd { buyers: lab.options.buyers, tries: 1, stock: 0 };
    let site = lab.site(version, 0, RacePoint::open()).await?;
    let shop = Arc::new(Locked::<L>::open(&site).await?);
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&shop, crowd, lab.seed).await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    measured.count_lasting_keys(lab, &site).await
}

/// An order is its lock, acquired and released.
struct Locked<L>(L);

impl<L: NodeLock> Shop for Locked<L> {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self(L::connect(site).await?))
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let Some(held) = self.0.acquire(user).await? else { return Ok(Answer::Busy) };
        self.0.release(held).await?;
        Ok(Answer::Bought)
    }
}

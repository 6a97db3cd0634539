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
use crate::version::Version;
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
const LONG_WORK: Duration = Duration::from_millis(2_400);
/// When a lock must be free after its holder has died.
const FREE_AFTER: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
const USER: u64 = 1;

/// A lock per user. One value is one node.
pub trait NodeLock: Sized + Send + Sync + 'static {
    /// What proves that the node holds the lock.
    type Held: Send + 'static;

    fn connect(site: &Site) -> impl Future<Output = Result<Self>> + Send;

    /// The lock if it is free.
    fn acquire(&self, user: u64) -> impl Future<Output = Result<Option<Self::Held>>> + Send;

    /// Passes `site.race` before what deletes the lock.
    fn release(&self, held: Self::Held) -> impl Future<Output = Result<()>> + Send;
}

/// Everything that one server can do to a lock, and the load of the options.
pub async fn all<L: NodeLock>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    hung_release::<L>(lab, version, &mut measured).await?;
    long_work::<L>(lab, version, &mut measured).await?;
    load::<L>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// A node dies while it acquires the lock. Another one must get it in the end.
async fn crash<L: NodeLock>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let mut site = lab.site(version, 0, RacePoint::open()).await?;
    site.kill = KillPoint::at(1);
    let dying = L::connect(&site).await?;
    let acquiring = tokio::spawn(async move { dying.acquire(USER).await.map(drop) });
    site.kill.reached().await?;
    acquiring.abort();
    site.kill = KillPoint::never();
    let got = acquire_within(&L::connect(&site).await?, FREE_AFTER).await?;
    let stuck = u64::from(got.is_none());
    measured.count(Flaw::Leaked, stuck, |_| format!("the lock is still taken {FREE_AFTER:?} after its holder died"));
    Ok(())
}

/// A release begins in time and hangs until the lease has ended and another node holds the lock. A third one must not get it.
async fn hung_release<L: NodeLock>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let site = lab.site(version, 0, RacePoint::within(2, FREE_AFTER)).await?;
    let (first, second, third) = (L::connect(&site).await?, L::connect(&site).await?, L::connect(&site).await?);
    let held = acquire_within(&first, FREE_AFTER).await?.ok_or(Error::TimedOut("the first node gets the lock"))?;
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
    let both = second_held.is_some() && third_held.is_some();
    measured.count(Flaw::Duplicated, both.into(), |_| {
        "two nodes held the lock at once: a late release deleted the lock of another node".to_owned()
    });
    Ok(())
}

/// A node works for longer than the lease. No other node may get the lock.
async fn long_work<L: NodeLock>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let site = lab.site(version, 0, RacePoint::open()).await?;
    let (first, second) = (L::connect(&site).await?, L::connect(&site).await?);
    let held = acquire_within(&first, FREE_AFTER).await?.ok_or(Error::TimedOut("the first node gets the lock"))?;
    let both = acquire_within(&second, LONG_WORK).await?.is_some();
    // It may have been lost.
    let _ = first.release(held).await;
    measured.count(Flaw::Duplicated, both.into(), |_| {
        "two nodes held the lock at once: the lease ended while its holder worked".to_owned()
    });
    Ok(())
}

async fn acquire_within<L: NodeLock>(lock: &L, limit: Duration) -> Result<Option<L::Held>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(held) = lock.acquire(USER).await? {
            return Ok(Some(held));
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
    Ok(())
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

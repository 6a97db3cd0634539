//! A re-entrant lock with a watchdog.
//!
//! Adds: the lock of `stampede-lock`. A watchdog renews the lease while the holder lives, its owner may enter it again, and waiters are woken
//! by a message instead of polling.
//! Wrong: it is as reliable as its one server. A process that stops for longer than the lease still loses the lock without noticing at once;
//! that is what fencing tokens are for.
//! Next: what happens if the server is lost.

use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Guard, Lock, Locks, Owner};

use super::failover::acquired;
use super::{FREE_AFTER, NodeLock, Scenario, TRIES, USER, acquire_within};
use crate::race::RacePoint;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/watchdog",
    family: Family::Locks,
    expected: Expected::Sound,
    because: "the lease is renewed while the holder lives, and only the owner releases it",
    needs: &[ServerKind::Redis],
    source: include_str!("watchdog.rs"),
    story_zh: "使用 stampede-lock 的锁：持有期间看门狗自动续期，同一持有者可重入，等待者靠消息唤醒而不是轮询。\n\
        问题：可靠性取决于唯一的 Redis；进程停顿超过租期仍会失去锁，要靠围栏令牌（fencing token）兜底。\n\
        下一版：Redis 主节点宕机时会怎样。",
    run: |lab, version| Box::pin(run(lab, version)),
};

/// Long enough that a busy machine renews it in time, and shorter than the work of a holder.
const TTL: Duration = Duration::from_secs(2);

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let scenarios = [Scenario::LateRelease, Scenario::LongWork];
    let mut measured = super::scenarios::<Watchdog>(lab, version, &scenarios).await?;
    reenter(lab, version, &mut measured).await?;
    Ok(measured)
}

/// The owner enters the lock once more while it holds it. The lock is free after as many releases, and not before.
async fn reenter(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    for _ in 0..TRIES {
        let site = lab.site(version, 0, RacePoint::open()).await?;
        let (node, other) = (Watchdog::connect(&site).await?, Watchdog::connect(&site).await?);
        let lock = node.lock(USER, &Owner::new())?;
        let outer = lock.try_lock().await?;
        // An owner that had to wait for itself would get an error here.
        let inner = lock.try_lock().await?;
        if is_lost(inner.release().await)? {
            continue;
        }
        let early = other.acquire(USER).await?;
        let freed = early.is_some() && outer.is_valid();
        let seen = "two nodes held the lock at once: the first of two releases freed it";
        measured.count(Flaw::Duplicated, freed.into(), |_| seen.to_owned());
        if freed {
            return Ok(());
        }
        if is_lost(outer.release().await)? {
            continue;
        }
        let free = acquire_within(&other, FREE_AFTER).await?;
        let stuck = u64::from(free.is_none());
        measured.count(Flaw::Leaked, stuck, |_| "the lock is still taken after the last release".to_owned());
        return Ok(());
    }
    Err(crate::Error::TimedOut("a lock is entered twice and released within its lease"))
}

/// Whether the lease had ended before the release: the machine was too slow for it.
fn is_lost(released: Result<(), Error>) -> Result<bool> {
    match released {
        Ok(()) => Ok(false),
        Err(Error::Lost | Error::HeldByOther) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

struct Watchdog {
    locks: Locks,
    site: Site,
}

impl Watchdog {
    fn lock(&self, user: u64, owner: &Owner) -> Result<Lock> {
        Ok(self.locks.reentrant(&format!("order:{user}"), owner)?)
    }
}

impl NodeLock for Watchdog {
    type Held = Guard;

    async fn connect(site: &Site) -> Result<Self> {
        let config = Config { watchdog_ttl: TTL, ..Config::default() };
        Ok(Self { locks: Locks::connect(site.redis_url()?, config).await?, site: site.clone() })
    }

    async fn acquire(&self, user: u64) -> Result<Option<Guard>> {
        acquired(self.lock(user, &Owner::new())?.try_lock().await)
    }

    fn is_held(&self, guard: &Guard) -> bool {
        guard.is_valid()
    }

    fn is_leased(&self, guard: &Guard, _: Instant) -> bool {
        guard.is_valid()
    }

    async fn release(&self, guard: Guard) -> Result<()> {
        self.site.race.pass().await;
        guard.release().await?;
        Ok(())
    }
}

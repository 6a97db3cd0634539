//! A re-entrant lock with a watchdog.
//!
//! Adds: the lock of `stampede-lock`. A watchdog renews the lease while the holder lives, its owner may enter it again, and waiters are woken
//! by a message instead of polling.
//! Wrong: it is as reliable as its one server. A process that stops for longer than the lease still loses the lock without noticing at once;
//! that is what fencing tokens are for.
//! Next: what happens if the server is lost.

use std::time::Duration;

use stampede_lock::{Config, Error, Guard, Locks, Owner};

use super::NodeLock;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

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
    run: |lab, version| Box::pin(super::all::<Watchdog>(lab, version)),
};

/// Long enough that a busy machine renews it in time.
const TTL: Duration = Duration::from_secs(1);

struct Watchdog {
    locks: Locks,
    site: Site,
}

impl NodeLock for Watchdog {
    type Held = Guard;

    async fn connect(site: &Site) -> Result<Self> {
        let config = Config { watchdog_ttl: TTL, ..Config::default() };
        Ok(Self { locks: Locks::connect(site.redis_url()?, config).await?, site: site.clone() })
    }

    async fn acquire(&self, user: u64) -> Result<Option<Guard>> {
        match self.locks.reentrant(&format!("order:{user}"), &Owner::new())?.try_lock().await {
            Ok(guard) => Ok(Some(guard)),
            Err(Error::NotAcquired { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn release(&self, guard: Guard) -> Result<()> {
        self.site.race.pass().await;
        guard.release().await?;
        Ok(())
    }
}

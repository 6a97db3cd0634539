//! Every kind of lock by its name, so that one test can cover all of them.

use std::pin::Pin;
use std::time::Duration;

use stampede_lock::{Guard, Lock, Locks, MultiLock, MultiLockGuard, Owner, RedLock, RedLockGuard, Result};

pub const KINDS: [&str; 7] = ["simple", "reentrant", "fair", "read", "write", "multi", "redlock"];
/// The kinds that need only one server.
pub const SINGLE: [&str; 5] = ["simple", "reentrant", "fair", "read", "write"];

#[derive(Debug)]
pub enum AnyGuard {
    One(Guard),
    Multi(MultiLockGuard),
    RedLock(RedLockGuard),
}

impl AnyGuard {
    pub fn is_valid(&self) -> bool {
        match self {
            Self::One(guard) => guard.is_valid(),
            Self::Multi(guard) => guard.is_valid(),
            Self::RedLock(guard) => guard.is_valid(),
        }
    }

    pub fn lost(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match self {
            Self::One(guard) => Box::pin(guard.lost()),
            Self::Multi(guard) => Box::pin(guard.lost()),
            Self::RedLock(guard) => Box::pin(guard.lost()),
        }
    }

    pub async fn release(self) -> Result<()> {
        match self {
            Self::One(guard) => guard.release().await,
            Self::Multi(guard) => guard.release().await,
            Self::RedLock(guard) => guard.release().await,
        }
    }
}

/// A lock of this kind and name on one server, with a new owner.
pub fn lock(kind: &str, locks: &Locks, name: &str) -> Lock {
    let owner = Owner::new();
    match kind {
        "simple" => locks.simple(name).unwrap(),
        "reentrant" => locks.reentrant(name, &owner).unwrap(),
        "fair" => locks.fair(name, &owner).unwrap(),
        "read" => locks.read_write(name, &owner).unwrap().read().clone(),
        "write" => locks.read_write(name, &owner).unwrap().write().clone(),
        other => panic!("there is no {other} lock on one server"),
    }
}

/// Acquires the lock that is named like its kind, with a timeout.
pub async fn acquire(kind: &str, servers: &[Locks], timeout: Duration) -> Result<AnyGuard> {
    Ok(match kind {
        "multi" => {
            let owner = Owner::new();
            let locks =
                servers.iter().enumerate().map(|(index, server)| server.reentrant(&format!("multi-{index}"), &owner));
            AnyGuard::Multi(MultiLock::new(locks.collect::<Result<_>>()?)?.try_lock_for(timeout).await?)
        }
        "redlock" => AnyGuard::RedLock(RedLock::new(servers, kind)?.try_lock_for(timeout).await?),
        single => AnyGuard::One(lock(single, &servers[0], single).try_lock_for(timeout).await?),
    })
}

/// Acquires the lock that is named like its kind, with a fixed TTL.
pub async fn acquire_with_ttl(kind: &str, servers: &[Locks], ttl: Duration) -> Result<AnyGuard> {
    Ok(match kind {
        "multi" => {
            let owner = Owner::new();
            let lock = |(index, server): (usize, &Locks)| {
                server.reentrant(&format!("multi-{index}"), &owner).and_then(|lock| lock.with_ttl(ttl))
            };
            AnyGuard::Multi(MultiLock::new(servers.iter().enumerate().map(lock).collect::<Result<_>>()?)?.lock().await?)
        }
        "redlock" => AnyGuard::RedLock(RedLock::new(servers, kind)?.with_ttl(ttl)?.lock().await?),
        single => AnyGuard::One(lock(single, &servers[0], single).with_ttl(ttl)?.lock().await?),
    })
}

/// Acquires the same lock for a competing owner; for a read lock, the write lock.
pub async fn acquire_competing(kind: &str, servers: &[Locks], timeout: Duration) -> Result<AnyGuard> {
    match kind {
        "read" => Ok(AnyGuard::One(lock("write", &servers[0], kind).try_lock_for(timeout).await?)),
        kind => acquire(kind, servers, timeout).await,
    }
}

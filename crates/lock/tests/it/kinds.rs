//! Every kind of lock by its name, so that a test can do the same with all of them.

use std::pin::Pin;
use std::time::Duration;

use stampede_lock::{Guard, Lock, Locks, Multi, MultiGuard, Owner, Red, RedGuard, Result};

pub const KINDS: [&str; 7] = ["simple", "reentrant", "fair", "read", "write", "multi", "red"];
/// Those that need only one server.
pub const SINGLE: [&str; 5] = ["simple", "reentrant", "fair", "read", "write"];

#[derive(Debug)]
pub enum Held {
    One(Guard),
    Multi(MultiGuard),
    Red(RedGuard),
}

impl Held {
    pub fn is_sure(&self) -> bool {
        match self {
            Self::One(guard) => guard.is_sure(),
            Self::Multi(guard) => guard.is_sure(),
            Self::Red(guard) => guard.is_sure(),
        }
    }

    pub fn lost(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match self {
            Self::One(guard) => Box::pin(guard.lost()),
            Self::Multi(guard) => Box::pin(guard.lost()),
            Self::Red(guard) => Box::pin(guard.lost()),
        }
    }

    pub async fn release(self) -> Result<()> {
        match self {
            Self::One(guard) => guard.release().await,
            Self::Multi(guard) => guard.release().await,
            Self::Red(guard) => guard.release().await,
        }
    }
}

/// A lock of this kind and name on one server, for somebody new.
pub fn lock(kind: &str, locks: &Locks, name: &str) -> Lock {
    let me = Owner::new();
    match kind {
        "simple" => locks.simple(name).unwrap(),
        "reentrant" => locks.reentrant(name, &me).unwrap(),
        "fair" => locks.fair(name, &me).unwrap(),
        "read" => locks.read_write(name, &me).unwrap().read().clone(),
        "write" => locks.read_write(name, &me).unwrap().write().clone(),
        other => panic!("there is no {other} lock on one server"),
    }
}

/// Gets the lock that is named like its kind, within this time.
pub async fn hold(kind: &str, servers: &[Locks], within: Duration) -> Result<Held> {
    Ok(match kind {
        "multi" => {
            let me = Owner::new();
            let locks = servers.iter().enumerate().map(|(at, server)| server.reentrant(&format!("multi-{at}"), &me));
            Held::Multi(Multi::new(locks.collect::<Result<_>>()?)?.lock_within(within).await?)
        }
        "red" => Held::Red(Red::new(servers, kind)?.lock_within(within).await?),
        single => Held::One(lock(single, &servers[0], single).lock_within(within).await?),
    })
}

/// The same lock for somebody who is kept out by it: a reader keeps out writers.
pub async fn hold_rival(kind: &str, servers: &[Locks], within: Duration) -> Result<Held> {
    match kind {
        "read" => Ok(Held::One(lock("write", &servers[0], kind).lock_within(within).await?)),
        kind => hold(kind, servers, within).await,
    }
}

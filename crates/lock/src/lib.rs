//! Locks, independent of what they protect.
//!
//! Inside one process:
//!
//! - [`KeyedMutex`]: an asynchronous mutex per key
//!
//! Across processes, on Redis (cargo feature `redis`, enabled by default); [`Locks`] creates them:
//!
//! - [`Locks::simple`], [`Locks::reentrant`], [`Locks::fair`], [`Locks::read_write`]: a [`Lock`] each; acquiring it returns a [`Guard`]
//! - [`MultiLock`]: all of several locks or none; [`RedLock`]: the Redlock algorithm, a majority of several servers
//! - [`Owner`]: identifies who may re-enter a lock
//! - [`guarantees`]: what each kind guarantees, and what it does not
//!
//! Internals, from the outside in: `lock` acquires and waits; `notifier` is the pub/sub subscription that wakes waiters; `guard` and
//! `lease` are an acquired lock; `quorum` tracks the majority of a Redlock; `watchdog` renews; `locks` ties them together and documents
//! the Redis keys; `scripts` are the Lua scripts in `lua/`. Commands go through the client of `stampede-redis`.

#![warn(missing_docs)]

mod keyed_mutex;

#[cfg(feature = "redis")]
mod error;
#[cfg(feature = "redis")]
pub mod guarantees;
#[cfg(feature = "redis")]
mod guard;
#[cfg(feature = "redis")]
mod lease;
#[cfg(feature = "redis")]
mod lock;
#[cfg(feature = "redis")]
mod locks;
#[cfg(feature = "redis")]
mod multi_lock;
#[cfg(feature = "redis")]
mod notifier;
#[cfg(feature = "redis")]
mod owner;
#[cfg(feature = "redis")]
mod quorum;
#[cfg(feature = "redis")]
mod redlock;
#[cfg(feature = "redis")]
mod scripts;
#[cfg(feature = "redis")]
mod watchdog;

pub use keyed_mutex::{KeyedMutex, KeyedMutexGuard};

#[cfg(feature = "redis")]
pub use self::{
    error::{Error, Result},
    guard::Guard,
    lock::Lock,
    locks::{Config, Locks, ReadWriteLock},
    multi_lock::{MultiLock, MultiLockGuard},
    owner::Owner,
    redlock::{RedLock, RedLockGuard},
};
#[cfg(feature = "redis")]
pub use stampede_redis::{Servers, Tls, TlsError, TlsFiles};

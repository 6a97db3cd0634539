//! Locks, independent of what they protect.
//!
//! Inside one process:
//!
//! - [`KeyedMutex`]: an asynchronous mutex per key
//!
//! Across processes, on Redis (`redis/`; cargo feature `redis`, enabled by default); [`Locks`] creates them:
//!
//! - [`Locks::simple`], [`Locks::reentrant`], [`Locks::fair`], [`Locks::read_write`]: a [`Lock`] each; acquiring it returns a [`Guard`]
//! - [`MultiLock`]: all of several locks or none; [`RedLock`]: the Redlock algorithm, a majority of several servers
//! - [`Owner`]: identifies who may re-enter a lock
//! - [`guarantees`]: what each kind guarantees, and what it does not

#![warn(missing_docs)]

mod keyed_mutex;
#[cfg(feature = "redis")]
mod redis;

#[cfg(feature = "redis")]
pub use self::redis::{
    Config, Error, Guard, Lock, Locks, MultiLock, MultiLockGuard, Owner, ReadWriteLock, RedLock, RedLockGuard, Result,
    Servers, Tls, TlsError, TlsFiles, guarantees,
};
pub use keyed_mutex::{KeyedMutex, KeyedMutexGuard};

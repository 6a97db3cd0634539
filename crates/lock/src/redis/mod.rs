//! Locks on Redis, from the outside in:
//!
//! - `locks` ties everything together and documents the Redis keys; `guarantees`: what each kind guarantees
//! - `lock` acquires and waits; `multi_lock`, `redlock`: over several locks or servers
//! - `notifier`: the pub/sub subscription that wakes waiters
//! - `guard` and `lease`: an acquired lock; `quorum`: the majority of a Redlock; `owner`: who may re-enter
//! - `watchdog` renews
//! - `scripts`: the Lua scripts in `lua/`
//!
//! Commands go through the client of `stampede-redis`.

mod error;
pub mod guarantees;
mod guard;
mod lease;
mod lock;
mod locks;
mod multi_lock;
mod notifier;
mod owner;
mod quorum;
mod redlock;
mod scripts;
mod watchdog;

pub use error::{Error, Result};
pub use guard::Guard;
pub use lock::Lock;
pub use locks::{Config, Locks, ReadWriteLock};
pub use multi_lock::{MultiLock, MultiLockGuard};
pub use owner::Owner;
pub use redlock::{RedLock, RedLockGuard};
pub use stampede_redis::{Servers, Tls, TlsError, TlsFiles};

//! Several locks as one: all of them or none.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use rand::RngExt as _;

use super::error::{Error, Result};
use super::guard::Guard;
use super::lock::{Lock, WaitLimit};
use super::scripts::Kind;

const MAX_JITTER_US: u64 = 10_000;

/// Several locks as one: all of them are acquired, or none. They may be of any kind but fair, and on different servers. Re-entrant if its
/// locks are.
///
/// It never waits for one lock while it holds another, so two multi-locks with the same locks cannot deadlock, whatever their order.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = stampede_testkit::redis::start()?;
/// # let url = stampede_testkit::redis::url(server.port());
/// # use stampede_lock::{Config, Locks};
/// # let locks = Locks::connect(url, Config::default()).await?;
/// use stampede_lock::{MultiLock, Owner};
///
/// let owner = Owner::new();
/// let both = MultiLock::new(vec![locks.reentrant("from", &owner)?, locks.reentrant("to", &owner)?])?;
/// let guard = both.lock().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct MultiLock {
    locks: Vec<Lock>,
}

/// An acquired [`MultiLock`].
#[must_use = "dropping the guard releases the locks"]
#[derive(Debug)]
pub struct MultiLockGuard {
    guards: Vec<Guard>,
}

impl MultiLock {
    /// # Errors
    /// [`Error::InvalidArgument`] without locks, with a lock twice that is not re-entrant, or with a fair lock: the multi-lock would
    /// give up its queue entry again and again, so its order of arrival would be lost.
    pub fn new(locks: Vec<Lock>) -> Result<Self> {
        if locks.is_empty() {
            return Err(Error::invalid("a multi-lock needs at least one lock"));
        }
        for (index, lock) in locks.iter().enumerate() {
            let same = |other: &Lock| Arc::ptr_eq(&other.shared, &lock.shared) && other.keys.keys == lock.keys.keys;
            let is_simple = lock.keys.kind == Kind::Simple;
            if locks[..index].iter().any(|other| same(other) && (is_simple || other.owner != lock.owner)) {
                return Err(Error::invalid("a multi-lock cannot contain a lock twice that is not re-entrant"));
            }
            if lock.keys.kind == Kind::Fair {
                return Err(Error::invalid("a multi-lock cannot contain a fair lock"));
            }
        }
        Ok(Self { locks })
    }

    /// Acquires all of them if they are free.
    ///
    /// # Errors
    /// As [`Lock::try_lock`]; then none is held.
    pub async fn try_lock(&self) -> Result<MultiLockGuard> {
        self.acquire(WaitLimit::TRY_ONCE).await
    }

    /// Acquires all of them, waiting until the timeout.
    ///
    /// # Errors
    /// As [`Lock::try_lock_for`]; then none is held.
    pub async fn try_lock_for(&self, timeout: Duration) -> Result<MultiLockGuard> {
        self.acquire(WaitLimit::timeout(timeout)).await
    }

    /// Acquires all of them, waiting without a timeout.
    ///
    /// # Errors
    /// As [`Lock::lock`]; then none is held.
    pub async fn lock(&self) -> Result<MultiLockGuard> {
        self.acquire(WaitLimit::UNLIMITED).await
    }

    async fn acquire(&self, limit: WaitLimit) -> Result<MultiLockGuard> {
        // The lock to wait for; the others must be free once it is acquired.
        let mut first = 0;
        loop {
            let mut guards = vec![self.locks[first].acquire(limit).await?];
            let others = (0..self.locks.len()).filter(|&index| index != first);
            let mut failed = None;
            for index in others {
                match self.locks[index].acquire(limit.for_reply()).await {
                    Ok(guard) => guards.push(guard),
                    Err(error) => {
                        failed = Some((index, error));
                        break;
                    }
                }
            }
            let (index, error) = match failed {
                None if guards.iter().all(Guard::is_valid) => return Ok(MultiLockGuard { guards }),
                // Acquiring the last one took so long that the lease of another expired.
                None => (first, Error::NotAcquired { remaining: None }),
                Some(failed) => failed,
            };
            // Locks that cannot be released now are released in the background.
            let _ = limit.run(release_all(guards)).await;
            if !error.is_retryable() || limit.is_over() {
                return Err(error);
            }
            first = index;
            jitter(limit).await;
        }
    }
}

impl MultiLockGuard {
    /// The guards, in no particular order. Each has its own fencing token, which belongs to the resource of its lock.
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// Whether all of them are held now. See [`Guard::is_valid`].
    pub fn is_valid(&self) -> bool {
        self.guards.iter().all(Guard::is_valid)
    }

    /// Completes as soon as one of them is no longer valid. See [`Guard::lost`].
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let any = select_all(self.guards.iter().map(|guard| Box::pin(guard.lost())));
        async move {
            any.await;
        }
    }

    /// Releases all of them.
    ///
    /// # Errors
    /// The first error of [`Guard::release`]; the other locks are released nevertheless.
    pub async fn release(self) -> Result<()> {
        release_all(self.guards).await
    }
}

/// A random delay, so that two callers that blocked each other retry at different times.
pub(crate) async fn jitter(limit: WaitLimit) {
    let delay = Duration::from_micros(rand::rng().random_range(0..MAX_JITTER_US));
    tokio::time::sleep(delay.min(limit.remaining())).await;
}

/// Releases all of them concurrently; returns the first error, if any.
pub(crate) async fn release_all(guards: Vec<Guard>) -> Result<()> {
    join_all(guards.into_iter().map(Guard::release)).await.into_iter().collect()
}

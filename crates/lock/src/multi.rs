//! All of several locks, or none.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use rand::RngExt as _;

use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::lock::{Lock, Wait};
use crate::scripts::Kind;

const MAX_JITTER_US: u64 = 10_000;

/// Several locks as one: all or none of them. They may be of any kind but fair, and on different servers. Re-entrant if its locks are.
///
/// It never waits for one lock while it holds another, so two of them with the same locks cannot wait for each other, whatever the order.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = stampede_testkit::redis::start()?;
/// # let url = stampede_testkit::redis::url(server.port());
/// # use stampede_lock::{Config, Locks};
/// # let locks = Locks::connect(url, Config::default()).await?;
/// use stampede_lock::{Multi, Owner};
///
/// let me = Owner::new();
/// let both = Multi::new(vec![locks.reentrant("from", &me)?, locks.reentrant("to", &me)?])?;
/// let guard = both.lock().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Multi {
    locks: Vec<Lock>,
}

/// All locks of a [`Multi`] in hand.
#[must_use = "dropped, the locks are released"]
#[derive(Debug)]
pub struct MultiGuard {
    guards: Vec<Guard>,
}

impl Multi {
    /// # Errors
    /// [`Error::Setting`] without locks, with a lock that is in it twice and not re-entrant, or with a fair one: giving a place in line
    /// up again and again would not be fair.
    pub fn new(locks: Vec<Lock>) -> Result<Self> {
        if locks.is_empty() {
            return Err(Error::setting("a multi-lock needs at least one lock"));
        }
        for (at, lock) in locks.iter().enumerate() {
            let same = |other: &Lock| Arc::ptr_eq(&other.shared, &lock.shared) && other.named.keys == lock.named.keys;
            let alone = lock.named.kind == Kind::Simple;
            if locks[..at].iter().any(|other| same(other) && (alone || other.owner != lock.owner)) {
                return Err(Error::setting("a multi-lock cannot hold a lock twice that is not re-entrant"));
            }
            if lock.named.kind == Kind::Fair {
                return Err(Error::setting("a multi-lock cannot hold a fair lock"));
            }
        }
        Ok(Self { locks })
    }

    /// Gets all of them if they are free.
    ///
    /// # Errors
    /// As [`Lock::try_lock`]; then none is held.
    pub async fn try_lock(&self) -> Result<MultiGuard> {
        self.acquire(Wait::NO).await
    }

    /// Gets all of them, waiting at most so long.
    ///
    /// # Errors
    /// As [`Lock::lock_within`]; then none is held.
    pub async fn lock_within(&self, wait: Duration) -> Result<MultiGuard> {
        self.acquire(Wait::within(wait)).await
    }

    /// Gets all of them, however long it takes.
    ///
    /// # Errors
    /// As [`Lock::lock`]; then none is held.
    pub async fn lock(&self) -> Result<MultiGuard> {
        self.acquire(Wait::FOR_EVER).await
    }

    async fn acquire(&self, wait: Wait) -> Result<MultiGuard> {
        // The one to wait for; the others must be free then.
        let mut first = 0;
        loop {
            let mut guards = vec![self.locks[first].acquire(wait).await?];
            let others = (0..self.locks.len()).filter(|&at| at != first);
            let mut in_the_way = None;
            for at in others {
                match self.locks[at].acquire(wait.for_answer()).await {
                    Ok(guard) => guards.push(guard),
                    Err(error) => {
                        in_the_way = Some((at, error));
                        break;
                    }
                }
            }
            let (at, problem) = match in_the_way {
                None if guards.iter().all(Guard::is_sure) => return Ok(MultiGuard { guards }),
                // Getting the last took so long that another was lost.
                None => (first, Error::NotAcquired { remaining: None }),
                Some(in_the_way) => in_the_way,
            };
            // What cannot be released now is released in the background.
            let _ = wait.bound(release_all(guards)).await;
            if !problem.may_retry() || wait.is_over() {
                return Err(problem);
            }
            first = at;
            jitter(wait).await;
        }
    }
}

impl MultiGuard {
    /// The fencing tokens, in no particular order of the locks: compare each with its own resource through [`guards`](Self::guards).
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// Are all of them surely held at this moment?
    pub fn is_sure(&self) -> bool {
        self.guards.iter().all(Guard::is_sure)
    }

    /// Ends as soon as one of them is not surely held any more. See [`Guard::lost`].
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let any = select_all(self.guards.iter().map(|guard| Box::pin(guard.lost())));
        async move {
            any.await;
        }
    }

    /// Gives all of them back.
    ///
    /// # Errors
    /// The first of those of [`Guard::release`]; the others are released nevertheless.
    pub async fn release(self) -> Result<()> {
        release_all(self.guards).await
    }
}

/// Two who got in each other's way try again at different times.
pub(crate) async fn jitter(wait: Wait) {
    let pause = Duration::from_micros(rand::rng().random_range(0..MAX_JITTER_US));
    tokio::time::sleep(pause.min(wait.left())).await;
}

/// Releases all of them at once; the first error, if any.
pub(crate) async fn release_all(guards: Vec<Guard>) -> Result<()> {
    join_all(guards.into_iter().map(Guard::release)).await.into_iter().collect()
}

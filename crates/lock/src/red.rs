//! A lock on the majority of several servers that know nothing of each other.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{join_all, select_all};
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use crate::client::Locks;
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::lock::{Lock, Wait};
use crate::multi::{jitter, release_all};
use crate::told::{Told, Waiter};
use stampede_redis::too_late;

/// When to try again if nobody has the majority, or too few can tell.
const SPLIT: Duration = Duration::from_millis(200);

/// A lock on most of at least three independent servers: it holds as long as most of them live, and keep their memory and their time.
/// The servers must not be replicas of each other.
///
/// It has no fencing token, because the clocks of the servers differ.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use stampede_testkit::redis;
/// # let servers = [redis::start()?, redis::start()?, redis::start()?];
/// use stampede_lock::{Config, Locks, Red};
///
/// let mut independent = Vec::new();
/// for server in &servers {
///     independent.push(Locks::connect(redis::url(server.port()), Config::default()).await?);
/// }
/// let leader = Red::new(&independent, "leader")?;
/// servers[0].kill()?; // most of them are enough
/// let guard = leader.lock().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Red {
    locks: Vec<Lock>,
}

/// The majority in hand.
#[must_use = "dropped, the lock is released"]
#[derive(Debug)]
pub struct RedGuard {
    guards: Vec<Guard>,
    most: usize,
}

impl Red {
    /// # Errors
    /// [`Error::Setting`] with fewer than three servers or one of them twice.
    pub fn new(servers: &[Locks], name: &str) -> Result<Self> {
        if servers.len() < 3 {
            return Err(Error::setting(format!("a red lock needs at least three servers, not {}", servers.len())));
        }
        let locks = servers.iter().map(|server| server.simple(name)).collect::<Result<Vec<_>>>()?;
        for (at, lock) in locks.iter().enumerate() {
            if locks[..at].iter().any(|other| Arc::ptr_eq(&other.shared, &lock.shared)) {
                return Err(Error::setting("a red lock needs different servers"));
            }
        }
        Ok(Self { locks })
    }

    /// The same lock with a lease: see [`Lock::with_lease`].
    ///
    /// # Errors
    /// As [`Lock::with_lease`].
    pub fn with_lease(self, lease: Duration) -> Result<Self> {
        let locks = self.locks.into_iter().map(|lock| lock.with_lease(lease));
        Ok(Self { locks: locks.collect::<Result<_>>()? })
    }

    /// Gets the lock if it is free on most servers.
    ///
    /// # Errors
    /// [`Error::NotAcquired`]; [`Error::Unreachable`] if too few servers answer.
    pub async fn try_lock(&self) -> Result<RedGuard> {
        self.acquire(Wait::No).await
    }

    /// Gets the lock, waiting at most so long.
    ///
    /// # Errors
    /// As [`try_lock`](Self::try_lock), when the time is up.
    pub async fn lock_within(&self, wait: Duration) -> Result<RedGuard> {
        self.acquire(Wait::within(wait)).await
    }

    /// Gets the lock, however long it takes.
    ///
    /// # Errors
    /// [`Error::Refused`], which waiting does not mend.
    pub async fn lock(&self) -> Result<RedGuard> {
        self.acquire(Wait::ForEver).await
    }

    fn most(&self) -> usize {
        self.locks.len() / 2 + 1
    }

    async fn acquire(&self, wait: Wait) -> Result<RedGuard> {
        let mut waiters: Vec<Option<Waiter>> = self.locks.iter().map(|_| None).collect();
        loop {
            let (guards, problems) = self.try_all().await;
            // Sure means: held when the last of them answered, less what clocks may differ by.
            if guards.iter().filter(|guard| guard.is_sure()).count() >= self.most() {
                return Ok(RedGuard { guards, most: self.most() });
            }
            let some = !guards.is_empty();
            // What cannot be released now is released in the background.
            let _ = release_all(guards).await;
            let problem = self.tell(&problems);
            if !problem.may_retry() || wait.left().is_zero() {
                return Err(problem);
            }
            // Only with those who said no: what we released ourselves is no news.
            let mut fresh = false;
            for (at, _) in &problems {
                if waiters[*at].is_none() {
                    let lock = &self.locks[*at];
                    let mut waiter = lock.join(&Arc::from("red"));
                    waiter.ready(wait.left().min(lock.shared.config.answer_within)).await;
                    waiter.forget();
                    waiters[*at] = Some(waiter);
                    fresh = true;
                }
            }
            let told: Vec<_> = problems.iter().filter_map(|(at, _)| waiters[*at].as_ref()).collect();
            if !fresh && !told.is_empty() {
                // If several got some each, nobody may be told.
                let remaining = problems.iter().filter_map(|(_, problem)| remaining(problem)).min();
                let look_in = remaining.filter(|_| !some).unwrap_or(SPLIT);
                let look_at = Instant::now() + look_in.min(wait.left());
                let told = select_all(
                    told.into_iter().map(|waiter| Box::pin(async move { while waiter.told().await != Told::Look {} })),
                );
                let _ = tokio::time::timeout_at(look_at, told).await;
            }
            jitter(wait).await;
        }
    }

    /// Tries all servers at once. One that does not answer is not waited for longer than the lease allows, nor much longer than
    /// the others need.
    async fn try_all(&self) -> (Vec<Guard>, Vec<(usize, Error)>) {
        let lease = self.locks[0].lease();
        let mut deadline = Instant::now() + lease / 3;
        let mut tries: FuturesUnordered<_> =
            self.locks.iter().enumerate().map(|(at, lock)| async move { (at, lock.try_lock().await) }).collect();
        let (mut guards, mut problems) = (Vec::new(), Vec::new());
        let mut late: Vec<usize> = (0..self.locks.len()).collect();
        while let Ok(Some((at, tried))) = tokio::time::timeout_at(deadline, tries.next()).await {
            late.retain(|&other| other != at);
            match tried {
                Ok(guard) => guards.push(guard),
                Err(error) => problems.push((at, error)),
            }
            if guards.len() == self.most() {
                deadline = deadline.min(Instant::now() + lease / 20);
            }
        }
        // Dropped, they clear up after themselves.
        drop(tries);
        problems.extend(late.into_iter().map(|at| (at, Error::Unreachable(too_late()))));
        (guards, problems)
    }

    /// What to tell: that somebody has it, unless so many have another problem that waiting does not mend it.
    fn tell(&self, problems: &[(usize, Error)]) -> Error {
        let of =
            |wanted: fn(&Error) -> bool| problems.iter().map(|(_, error)| error).filter(move |error| wanted(error));
        let lasting = |error: &Error| !error.may_retry();
        if of(lasting).count() > self.locks.len() - self.most() {
            return of(lasting).next().cloned().unwrap_or(Error::Lost);
        }
        let busy = of(|error| matches!(error, Error::NotAcquired { .. })).next();
        let away = of(|error| matches!(error, Error::Unreachable(_)));
        if away.clone().count() > self.locks.len() - self.most() {
            return away.clone().next().cloned().unwrap_or(Error::NotAcquired { remaining: None });
        }
        busy.cloned().unwrap_or(Error::NotAcquired { remaining: None })
    }
}

fn remaining(problem: &Error) -> Option<Duration> {
    match problem {
        Error::NotAcquired { remaining } => *remaining,
        _ => None,
    }
}

impl RedGuard {
    /// Is the majority surely held at this moment?
    pub fn is_sure(&self) -> bool {
        self.guards.iter().filter(|guard| guard.is_sure()).count() >= self.most
    }

    /// Ends as soon as the majority is not surely held any more. See [`Guard::lost`].
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let enough = self.guards.len() + 1 - self.most;
        let mut held: Vec<_> = self.guards.iter().map(|guard| Box::pin(guard.lost())).collect();
        async move {
            for _ in 0..enough {
                let ((), _, others) = select_all(held).await;
                held = others;
            }
        }
    }

    /// Gives the lock back on every server.
    ///
    /// # Errors
    /// As [`Guard::release`], if fewer than most were held to the end or can be told. The others are released nevertheless.
    pub async fn release(self) -> Result<()> {
        let released = join_all(self.guards.into_iter().map(Guard::release)).await;
        if released.iter().filter(|released| released.is_ok()).count() >= self.most {
            return Ok(());
        }
        released.into_iter().collect()
    }
}

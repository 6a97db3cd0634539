//! The Redlock algorithm: a lock on the majority of several independent servers.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{join_all, select_all};
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use super::error::{Error, Result};
use super::guard::Guard;
use super::lease::{AcquireOutcome, QuorumMember};
use super::lock::{Attempt, Lock, WaitLimit};
use super::locks::Locks;
use super::multi_lock::{jitter, release_all};
use super::notifier::{Waiter, Wakeup};
use super::quorum::Quorum;
use stampede_redis::{CommandError, timeout_error};

/// When to try again if no owner has a majority, or too few servers respond.
const SPLIT_RETRY_DELAY: Duration = Duration::from_millis(200);
/// How much longer slower servers may take once the majority has replied: as long as the majority took, within these bounds.
const MIN_GRACE: Duration = Duration::from_millis(1);
const MAX_GRACE: Duration = Duration::from_millis(20);

/// A Redlock: a lock on the majority of at least three independent servers. It stays valid as long as a majority of them run, keep their
/// data, and have clocks that advance at about the same rate. The servers must not be replicas of each other.
///
/// It has no fencing token, because the clocks of the servers differ.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use stampede_testkit::redis;
/// # let servers = [redis::start()?, redis::start()?, redis::start()?];
/// use stampede_lock::{Config, Locks, RedLock};
///
/// let mut independent = Vec::new();
/// for server in &servers {
///     independent.push(Locks::connect(redis::url(server.port()), Config::default()).await?);
/// }
/// let leader = RedLock::new(&independent, "leader")?;
/// servers[0].kill()?; // a majority is enough
/// let guard = leader.lock().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RedLock {
    locks: Vec<Lock>,
}

/// An acquired [`RedLock`]. On servers where the lock is not held (because they were unavailable, busy or restarted empty) the watchdog
/// acquires it as long as the majority is held, unless the lock has a fixed TTL.
#[must_use = "dropping the guard releases the lock"]
#[derive(Debug)]
pub struct RedLockGuard {
    /// One for every server.
    guards: Vec<Guard>,
    quorum: Arc<Quorum>,
    majority: usize,
}

/// A failed attempt on all servers.
struct NoMajority {
    /// By the index of the server.
    errors: Vec<(usize, Error)>,
    /// Whether some servers were acquired.
    partial: bool,
}

impl RedLock {
    /// # Errors
    /// [`Error::InvalidArgument`] with fewer than three servers, or with the same server twice.
    pub fn new(servers: &[Locks], name: &str) -> Result<Self> {
        if servers.len() < 3 {
            return Err(Error::invalid(format!("a Redlock needs at least three servers, not {}", servers.len())));
        }
        let locks = servers.iter().map(|server| server.simple(name)).collect::<Result<Vec<_>>>()?;
        for (index, lock) in locks.iter().enumerate() {
            if locks[..index].iter().any(|other| Arc::ptr_eq(&other.shared, &lock.shared)) {
                return Err(Error::invalid("a Redlock needs different servers"));
            }
        }
        Ok(Self { locks })
    }

    /// The same lock with a fixed TTL: see [`Lock::with_ttl`].
    ///
    /// # Errors
    /// As [`Lock::with_ttl`].
    pub fn with_ttl(self, ttl: Duration) -> Result<Self> {
        let locks = self.locks.into_iter().map(|lock| lock.with_ttl(ttl));
        Ok(Self { locks: locks.collect::<Result<_>>()? })
    }

    /// Acquires the lock if it is free on a majority of the servers.
    ///
    /// # Errors
    /// [`Error::NotAcquired`]; [`Error::Unreachable`] if too few servers respond.
    pub async fn try_lock(&self) -> Result<RedLockGuard> {
        self.acquire(WaitLimit::TRY_ONCE).await
    }

    /// Acquires the lock, waiting until the timeout.
    ///
    /// # Errors
    /// As [`try_lock`](Self::try_lock), after the timeout.
    pub async fn try_lock_for(&self, timeout: Duration) -> Result<RedLockGuard> {
        self.acquire(WaitLimit::timeout(timeout)).await
    }

    /// Acquires the lock, waiting without a timeout.
    ///
    /// # Errors
    /// [`Error::Refused`], for which waiting does not help.
    pub async fn lock(&self) -> Result<RedLockGuard> {
        self.acquire(WaitLimit::UNLIMITED).await
    }

    fn majority(&self) -> usize {
        self.locks.len() / 2 + 1
    }

    async fn acquire(&self, limit: WaitLimit) -> Result<RedLockGuard> {
        let mut waiters: Vec<Option<Waiter>> = self.locks.iter().map(|_| None).collect();
        loop {
            let NoMajority { errors, partial } = match self.try_all(limit).await {
                Ok(guard) => {
                    waiters.into_iter().flatten().for_each(|waiter| waiter.acquired(self.locks[0].ttl()));
                    return Ok(guard);
                }
                Err(no_majority) => no_majority,
            };
            let error = self.combine(&errors);
            if self.locks.iter().any(|lock| lock.shared.is_closed()) {
                return Err(Error::Closed);
            }
            if !error.is_retryable() || limit.is_over() {
                return Err(error);
            }
            // Only busy servers are waited for: the messages of servers that this attempt released itself mean nothing, and
            // unavailable servers send none.
            let busy: Vec<_> = errors.iter().filter_map(|(index, error)| Some((*index, remaining(error)?))).collect();
            let mut registered = Vec::new();
            for &(index, remaining) in &busy {
                match &waiters[index] {
                    Some(waiter) => waiter.report_busy(remaining, false),
                    None => registered.push((index, self.locks[index].register_waiter(&Arc::from("redlock")))),
                }
            }
            if registered.is_empty() {
                let busy_waiters: Vec<_> = busy.iter().filter_map(|(index, _)| waiters[*index].as_ref()).collect();
                // If several owners have some servers each, no message may follow.
                let remaining = busy.iter().map(|(_, remaining)| *remaining).min();
                let timeout = remaining.filter(|_| !partial).unwrap_or(SPLIT_RETRY_DELAY);
                wait_for_any(&busy_waiters, timeout.min(limit.remaining())).await;
            } else {
                let timeout = limit.remaining().min(self.locks[0].shared.config.response_timeout);
                join_all(registered.iter_mut().map(|(_, waiter)| waiter.subscribed(timeout))).await;
                registered.into_iter().for_each(|(index, waiter)| waiters[index] = Some(waiter));
            }
            jitter(limit).await;
        }
    }

    /// Tries all servers concurrently, until a majority has accepted or too many have refused. Servers that have not replied by then
    /// get only a short grace period.
    async fn try_all(&self, limit: WaitLimit) -> std::result::Result<RedLockGuard, NoMajority> {
        let started = Instant::now();
        let mut deadline = started + (self.locks[0].ttl() / 3).min(limit.remaining());
        let mut attempts: Vec<_> = self.locks.iter().map(|lock| Attempt::new(lock, false)).collect();
        let mut results: Vec<_> = self.locks.iter().map(|_| Err(Error::Unreachable(timeout_error()))).collect();
        let (mut held, mut failed) = (0, 0);
        {
            let running = attempts.iter_mut().enumerate();
            let mut running: FuturesUnordered<_> = running
                .map(|(index, attempt)| async move { (index, attempt.run(WaitLimit::TRY_ONCE).await) })
                .collect();
            while failed <= self.locks.len() - self.majority()
                && let Ok(Some((index, outcome))) = tokio::time::timeout_at(deadline, running.next()).await
            {
                results[index] = into_result(outcome, self.locks[index].shared.config.replicas);
                if results[index].is_err() {
                    failed += 1;
                    continue;
                }
                held += 1;
                if held == self.majority() {
                    // The remaining servers need about the same time again, unless they hang.
                    deadline = deadline.min(Instant::now() + started.elapsed().clamp(MIN_GRACE, MAX_GRACE));
                }
            }
        }
        let acquired =
            attempts.iter().zip(&results).map(|(attempt, result)| attempt.validity().filter(|_| result.is_ok()));
        let watchdogs = self.locks.iter().map(|lock| lock.shared.watchdog.waker());
        let quorum = Arc::new(Quorum::new(acquired.collect(), self.majority(), watchdogs.collect()));
        // The majority must still be held after the last reply, less the margin for clock drift.
        if quorum.is_valid() {
            let members = attempts.into_iter().zip(results).enumerate();
            let guards = members.map(|(server, (attempt, result))| {
                attempt.into_quorum_guard(result.is_ok(), QuorumMember { quorum: quorum.clone(), server })
            });
            let guards: Vec<Guard> = guards.collect();
            if held < self.locks.len() {
                quorum.wake_watchdogs();
            }
            return Ok(RedLockGuard { guards, quorum, majority: self.majority() });
        }
        let (mut guards, mut errors) = (Vec::new(), Vec::new());
        for (index, (attempt, result)) in attempts.into_iter().zip(results).enumerate() {
            match result {
                Ok(()) => guards.push(attempt.into_guard(None)),
                // Dropping the attempt releases what it may have acquired.
                Err(error) => errors.push((index, error)),
            }
        }
        let partial = !guards.is_empty();
        // Locks that cannot be released now are released in the background.
        let _ = limit.run(release_all(guards)).await;
        Err(NoMajority { errors, partial })
    }

    /// The error to return: that the lock is busy, unless so many servers have another problem that waiting does not help.
    fn combine(&self, errors: &[(usize, Error)]) -> Error {
        let of = |wanted: fn(&Error) -> bool| errors.iter().map(|(_, error)| error).filter(move |error| wanted(error));
        let permanent = |error: &Error| !error.is_retryable();
        if of(permanent).count() > self.locks.len() - self.majority() {
            return of(permanent).next().cloned().unwrap_or(Error::Lost);
        }
        let busy = of(|error| matches!(error, Error::NotAcquired { .. })).next();
        let unreachable = of(|error| matches!(error, Error::Unreachable(_)));
        if unreachable.clone().count() > self.locks.len() - self.majority() {
            return unreachable.clone().next().cloned().unwrap_or(Error::NotAcquired { remaining: None });
        }
        busy.cloned().unwrap_or(Error::NotAcquired { remaining: None })
    }
}

fn into_result(outcome: std::result::Result<AcquireOutcome, CommandError>, replicas: usize) -> Result<()> {
    match outcome? {
        AcquireOutcome::Acquired { .. } => Ok(()),
        AcquireOutcome::Busy { remaining, .. } => Err(Error::NotAcquired { remaining }),
        AcquireOutcome::NotReplicated { confirmed } => Err(Error::NotReplicated { required: replicas, confirmed }),
        AcquireOutcome::UpgradeNotAllowed => Err(Error::UpgradeNotAllowed),
    }
}

/// For how long another owner holds the lock on a server; `None` if it is not busy.
fn remaining(error: &Error) -> Option<Duration> {
    match error {
        Error::NotAcquired { remaining } => Some(remaining.unwrap_or(SPLIT_RETRY_DELAY)),
        _ => None,
    }
}

/// Waits until one of the waiters should check, or until the timeout.
async fn wait_for_any(waiters: &[&Waiter], timeout: Duration) {
    let woken = waiters.iter().map(|waiter| Box::pin(async move { while waiter.wakeup().await != Wakeup::Check {} }));
    let woken: Vec<_> = woken.collect();
    if woken.is_empty() {
        return tokio::time::sleep(timeout).await;
    }
    let _ = tokio::time::timeout(timeout, select_all(woken)).await;
}

impl RedLockGuard {
    /// Whether the majority is held now, and has been held without interruption. See [`Guard::is_valid`].
    pub fn is_valid(&self) -> bool {
        self.quorum.is_valid()
    }

    /// On how many servers the lock is held now.
    pub fn held_servers(&self) -> usize {
        self.guards.iter().filter(|guard| guard.is_valid()).count()
    }

    /// Completes as soon as the majority is no longer held. See [`Guard::lost`].
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let quorum = self.quorum.clone();
        async move { quorum.lost().await }
    }

    /// Releases the lock on every server. Returns when a majority has replied; the others are released in the background
    /// ([`Locks::close`] waits for it).
    ///
    /// # Errors
    /// As [`Guard::release`], if the majority was not held to the end or does not confirm the release. The other servers are released
    /// nevertheless.
    pub async fn release(mut self) -> Result<()> {
        // A lock that was lost for a moment is lost, even if it was acquired again.
        let valid = self.quorum.is_valid();
        self.quorum.end();
        let existing = self.guards.drain(..).filter(Guard::may_exist);
        let mut releases: FuturesUnordered<_> = existing.map(Guard::release_detached).collect();
        let (mut released, mut first_error) = (0, None);
        while let Some(result) = releases.next().await {
            match result {
                Ok(Ok(())) => released += 1,
                Ok(Err(error)) => first_error = first_error.or(Some(error)),
                // The runtime is shutting down.
                Err(_) => first_error = first_error.or(Some(Error::Unreachable(timeout_error()))),
            }
            if released == self.majority {
                return if valid { Ok(()) } else { Err(Error::Lost) };
            }
        }
        Err(first_error.unwrap_or(Error::Lost))
    }
}

impl Drop for RedLockGuard {
    fn drop(&mut self) {
        self.quorum.end();
    }
}

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
use crate::hold::{Member, Tried};
use crate::lock::{Attempt, Lock, Wait};
use crate::multi::{jitter, release_all};
use crate::quorum::Quorum;
use crate::told::{Told, Waiter};
use stampede_redis::{CommandError, timeout_error};

/// When to try again if nobody has the majority, or too few can tell.
const SPLIT: Duration = Duration::from_millis(200);
/// How much longer the slower servers may take when most have answered: as long as those took, within these bounds.
const MIN_GRACE: Duration = Duration::from_millis(1);
const MAX_GRACE: Duration = Duration::from_millis(20);

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

/// The majority in hand. Servers on which it is not held (they were away, busy or have forgotten it) are acquired by the watchdog as long as
/// most others are held, unless the lock has a lease of its own.
#[must_use = "dropped, the lock is released"]
#[derive(Debug)]
pub struct RedGuard {
    /// One for every server.
    guards: Vec<Guard>,
    quorum: Arc<Quorum>,
    most: usize,
}

/// What was wrong with which servers, and whether some of them were got.
struct Missed {
    problems: Vec<(usize, Error)>,
    some: bool,
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
        self.acquire(Wait::NO).await
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
        self.acquire(Wait::FOR_EVER).await
    }

    fn most(&self) -> usize {
        self.locks.len() / 2 + 1
    }

    async fn acquire(&self, wait: Wait) -> Result<RedGuard> {
        let mut waiters: Vec<Option<Waiter>> = self.locks.iter().map(|_| None).collect();
        loop {
            let Missed { problems, some } = match self.try_all(wait).await {
                Ok(guard) => {
                    waiters.into_iter().flatten().for_each(|waiter| waiter.done(self.locks[0].lease()));
                    return Ok(guard);
                }
                Err(missed) => missed,
            };
            let problem = self.tell(&problems);
            if self.locks.iter().any(|lock| lock.shared.is_closed()) {
                return Err(Error::Closed);
            }
            if !problem.may_retry() || wait.is_over() {
                return Err(problem);
            }
            // Only with those who said no: what we released ourselves is no news, and who is away says nothing.
            let busy: Vec<_> = problems.iter().filter_map(|(at, problem)| Some((*at, remaining(problem)?))).collect();
            let mut fresh = Vec::new();
            for &(at, remaining) in &busy {
                match &waiters[at] {
                    Some(waiter) => waiter.learned(remaining, false),
                    None => fresh.push((at, self.locks[at].join(&Arc::from("red")))),
                }
            }
            if fresh.is_empty() {
                let told: Vec<_> = busy.iter().filter_map(|(at, _)| waiters[*at].as_ref()).collect();
                // If several got some each, nobody may be told.
                let remaining = busy.iter().map(|(_, remaining)| *remaining).min();
                wait_for(&told, remaining.filter(|_| !some).unwrap_or(SPLIT).min(wait.left())).await;
            } else {
                let within = wait.left().min(self.locks[0].shared.config.answer_within);
                join_all(fresh.iter_mut().map(|(_, waiter)| waiter.ready(within))).await;
                fresh.into_iter().for_each(|(at, waiter)| waiters[at] = Some(waiter));
            }
            jitter(wait).await;
        }
    }

    /// Tries all servers at once, until most have said yes or too many have said no. Those who have not answered by then are not waited
    /// for much longer.
    async fn try_all(&self, wait: Wait) -> std::result::Result<RedGuard, Missed> {
        let started = Instant::now();
        let mut deadline = started + (self.locks[0].lease() / 3).min(wait.left());
        let mut attempts: Vec<_> = self.locks.iter().map(|lock| Attempt::new(lock, false)).collect();
        let mut outcomes: Vec<_> = self.locks.iter().map(|_| Err(Error::Unreachable(timeout_error()))).collect();
        let (mut held, mut missed) = (0, 0);
        {
            let tries = attempts.iter_mut().enumerate();
            let mut tries: FuturesUnordered<_> =
                tries.map(|(at, attempt)| async move { (at, attempt.carry_out(Wait::NO).await) }).collect();
            while missed <= self.locks.len() - self.most()
                && let Ok(Some((at, tried))) = tokio::time::timeout_at(deadline, tries.next()).await
            {
                outcomes[at] = outcome(tried, self.locks[at].shared.config.replicas);
                if outcomes[at].is_err() {
                    missed += 1;
                    continue;
                }
                held += 1;
                if held == self.most() {
                    // The others have answered by now, or do so in about the same time again, unless they hang.
                    deadline = deadline.min(Instant::now() + started.elapsed().clamp(MIN_GRACE, MAX_GRACE));
                }
            }
        }
        let acquired =
            attempts.iter().zip(&outcomes).map(|(attempt, outcome)| attempt.held().filter(|_| outcome.is_ok()));
        let renewers = self.locks.iter().map(|lock| lock.shared.watchdog.waker());
        let quorum = Arc::new(Quorum::new(acquired.collect(), self.most(), renewers.collect()));
        // Sure means: held when the last of them answered, less what clocks may differ by.
        if quorum.is_sure() {
            let members = attempts.into_iter().zip(outcomes).enumerate();
            let guards = members.map(|(server, (attempt, outcome))| {
                attempt.into_member(outcome.is_ok(), Member { quorum: quorum.clone(), server })
            });
            let guards: Vec<Guard> = guards.collect();
            if held < self.locks.len() {
                quorum.wake_renewers();
            }
            return Ok(RedGuard { guards, quorum, most: self.most() });
        }
        let (mut guards, mut problems) = (Vec::new(), Vec::new());
        for (at, (attempt, outcome)) in attempts.into_iter().zip(outcomes).enumerate() {
            match outcome {
                Ok(()) => guards.push(attempt.succeed(None)),
                // Dropped, it clears up after itself.
                Err(problem) => problems.push((at, problem)),
            }
        }
        let some = !guards.is_empty();
        // What cannot be released now is released in the background.
        let _ = wait.bound(release_all(guards)).await;
        Err(Missed { problems, some })
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

/// Held or not.
fn outcome(tried: std::result::Result<Tried, CommandError>, replicas: usize) -> Result<()> {
    match tried? {
        Tried::Held { .. } => Ok(()),
        Tried::Busy { remaining, .. } => Err(Error::NotAcquired { remaining }),
        Tried::NotReplicated { confirmed } => Err(Error::NotReplicated { wanted: replicas, confirmed }),
        Tried::Upgrade => Err(Error::Upgrade),
    }
}

/// For how long another has it on this server.
fn remaining(problem: &Error) -> Option<Duration> {
    match problem {
        Error::NotAcquired { remaining } => Some(remaining.unwrap_or(SPLIT)),
        _ => None,
    }
}

/// Waits until one of them is woken, at most so long.
async fn wait_for(waiters: &[&Waiter], within: Duration) {
    let woken = waiters.iter().map(|waiter| Box::pin(async move { while waiter.told().await != Told::Look {} }));
    let woken: Vec<_> = woken.collect();
    if woken.is_empty() {
        return tokio::time::sleep(within).await;
    }
    let _ = tokio::time::timeout(within, select_all(woken)).await;
}

impl RedGuard {
    /// Is the majority surely held at this moment, and has been from the beginning?
    pub fn is_sure(&self) -> bool {
        self.quorum.is_sure()
    }

    /// On how many servers it is surely held at this moment.
    pub fn held_on(&self) -> usize {
        self.guards.iter().filter(|guard| guard.is_sure()).count()
    }

    /// Ends as soon as the majority is not surely held any more. See [`Guard::lost`].
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let quorum = self.quorum.clone();
        async move { quorum.lost().await }
    }

    /// Gives the lock back on every server. Returns when most have answered; the others are released in the background
    /// ([`Locks::close`] waits for it).
    ///
    /// # Errors
    /// As [`Guard::release`], if fewer than most were held to the end or can be told. The others are released nevertheless.
    pub async fn release(mut self) -> Result<()> {
        // Lost for a moment is lost, even if it was acquired again.
        let sure = self.quorum.is_sure();
        self.quorum.end();
        let known = self.guards.drain(..).filter(Guard::is_known);
        let mut releases: FuturesUnordered<_> = known.map(Guard::release_detached).collect();
        let (mut released, mut problem) = (0, None);
        while let Some(outcome) = releases.next().await {
            match outcome {
                Ok(Ok(())) => released += 1,
                Ok(Err(error)) => problem = problem.or(Some(error)),
                // Its runtime ends.
                Err(_) => problem = problem.or(Some(Error::Unreachable(timeout_error()))),
            }
            if released == self.most {
                return if sure { Ok(()) } else { Err(Error::Lost) };
            }
        }
        Err(problem.unwrap_or(Error::Lost))
    }
}

impl Drop for RedGuard {
    fn drop(&mut self) {
        self.quorum.end();
    }
}

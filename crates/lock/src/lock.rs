//! Getting a lock: at once, within a time, or however long it takes.

use std::sync::Arc;
use std::time::Duration;

use redis::FromRedisValue as _;
use tokio::time::Instant;

use crate::client::Shared;
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::hold::{Hold, Named, Tried};
use crate::owner::{Owner, random_id};
use crate::scripts::Kind;
use crate::told::{Told, Waiter, Wake};
use stampede_redis::Failure;

/// After Redis could not be reached; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A read lock that was dropped is released in the background within this time.
const UPGRADE_GRACE: Duration = Duration::from_secs(2);
/// The times are Redis' and ours, in whole milliseconds: a look this much later finds the lease ended.
const AFTER: Duration = Duration::from_millis(2);

/// A lock by its name. Cheap to clone; made by [`Locks`](crate::Locks).
#[derive(Debug, Clone)]
pub struct Lock {
    pub(crate) shared: Arc<Shared>,
    pub(crate) named: Arc<Named>,
    pub(crate) owner: Owner,
    lease: Option<Duration>,
    give_up_early: bool,
}

/// How long somebody is ready to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    Until(Instant),
    ForEver,
}

impl Wait {
    pub(crate) fn within(time: Duration) -> Self {
        Instant::now().checked_add(time).map_or(Self::ForEver, Self::Until)
    }

    /// What is left of it at most, counted from now.
    pub(crate) fn left(self) -> Duration {
        match self {
            Self::No => Duration::ZERO,
            Self::Until(end) => end.saturating_duration_since(Instant::now()),
            Self::ForEver => Duration::MAX,
        }
    }
}

impl Lock {
    pub(crate) fn new(shared: Arc<Shared>, named: Named, owner: Owner) -> Self {
        Self { shared, named: Arc::new(named), owner, lease: None, give_up_early: false }
    }

    /// The same lock with a lease: it ends after this time, released or not, and is not renewed.
    ///
    /// # Errors
    /// [`Error::Setting`] if the lease is shorter than 10 ms or longer than a day.
    pub fn with_lease(mut self, lease: Duration) -> Result<Self> {
        crate::client::check_lease(lease)?;
        self.lease = Some(lease);
        Ok(self)
    }

    /// The same lock for the impatient: [`lock_within`](Self::lock_within) gives up at once if the other's lease lasts longer than the
    /// wait. It gives up too early if the other releases before.
    #[must_use]
    pub fn give_up_early(mut self) -> Self {
        self.give_up_early = true;
        self
    }

    /// Gets the lock if it is free.
    ///
    /// # Errors
    /// [`Error::NotAcquired`] if it is not; [`Error::Unreachable`].
    pub async fn try_lock(&self) -> Result<Guard> {
        self.acquire(Wait::No).await
    }

    /// Gets the lock, waiting for it at most so long. Waiting costs Redis nothing: it is told when the lock is free.
    ///
    /// # Errors
    /// [`Error::NotAcquired`] if the time is up; [`Error::Unreachable`] if it is up and Redis was away at last.
    pub async fn lock_within(&self, wait: Duration) -> Result<Guard> {
        self.acquire(Wait::within(wait)).await
    }

    /// Gets the lock, however long it takes, even if Redis is away for a while.
    ///
    /// # Errors
    /// [`Error::Refused`] and [`Error::Upgrade`], which waiting does not mend.
    pub async fn lock(&self) -> Result<Guard> {
        self.acquire(Wait::ForEver).await
    }

    /// Does this owner hold the lock now? Asks Redis. For the simple lock, which has no owner but its guard, ask the guard.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub async fn is_held(&self) -> Result<bool> {
        let link = &self.shared.link;
        match self.named.kind {
            Kind::Simple => Ok(false),
            Kind::Reentrant | Kind::Fair | Kind::Write => {
                let value = link.send(redis::cmd("HGET").arg(&self.named.keys[0]).arg("owner").to_owned()).await?;
                let owner = Option::<String>::from_redis_value(value).map_err(|error| Error::Refused(error.into()))?;
                Ok(owner.as_deref() == Some(self.owner.as_str()))
            }
            Kind::Read => {
                let value = link.send(redis::cmd("TIME")).await?;
                let (seconds, micros) =
                    <(u64, u64)>::from_redis_value(value).map_err(|error| Error::Refused(error.into()))?;
                let now_ms = seconds * 1000 + micros / 1000;
                let mut readers = redis::cmd("ZRANGEBYSCORE");
                readers.arg(&self.named.keys[2]).arg(format!("({now_ms}")).arg("+inf");
                let value = link.send(readers).await?;
                let readers = Vec::<String>::from_redis_value(value).map_err(|error| Error::Refused(error.into()))?;
                Ok(readers.iter().any(|reader| reader.starts_with(self.owner.as_str())))
            }
        }
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease.unwrap_or(self.shared.config.watchdog_lease)
    }

    /// A place among those who are told when the lock is free.
    pub(crate) fn join(&self, id: &Arc<str>) -> Waiter {
        let mode = match self.named.kind {
            Kind::Simple | Kind::Reentrant => Wake::One,
            Kind::Fair => Wake::Named,
            Kind::Read | Kind::Write => Wake::All,
        };
        self.shared.hub.join(&self.named.channel, mode, id, &self.owner)
    }

    pub(crate) async fn acquire(&self, wait: Wait) -> Result<Guard> {
        let mut attempt = Attempt::new(self, wait != Wait::No);
        let mut waiter: Option<Waiter> = None;
        let mut pause = FIRST_PAUSE;
        let mut upgrading_since = None;
        loop {
            let (problem, look_in) = match attempt.carry_out().await {
                Ok(Tried::Held { fence }) => {
                    if let Some(waiter) = waiter {
                        waiter.done();
                    }
                    return Ok(attempt.succeed(fence));
                }
                Ok(Tried::Upgrade) => {
                    // Perhaps it was released a moment ago, and that is still on its way.
                    let since = *upgrading_since.get_or_insert_with(Instant::now);
                    if wait == Wait::No || since.elapsed() > UPGRADE_GRACE {
                        return Err(Error::Upgrade);
                    }
                    (Error::Upgrade, FIRST_PAUSE)
                }
                Ok(Tried::Busy { remaining }) => {
                    if self.give_up_early && remaining.is_some_and(|remaining| remaining > wait.left()) {
                        return Err(Error::NotAcquired { remaining });
                    }
                    pause = FIRST_PAUSE;
                    // One that has no end is looked at now and then.
                    let look_in = remaining.unwrap_or(self.shared.config.watchdog_lease) + AFTER;
                    (Error::NotAcquired { remaining }, look_in)
                }
                Err(Failure::Refused(error)) => return Err(Error::Refused(error)),
                Err(failure) => {
                    let look_in = pause;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    (failure.into(), look_in)
                }
            };
            if wait.left().is_zero() {
                return Err(problem);
            }
            match &waiter {
                Some(waiter) => {
                    attempt.wait(waiter, look_in, wait).await;
                    if wait.left().is_zero() {
                        return Err(problem);
                    }
                }
                None => {
                    // From here on nothing is missed; but until here something may have been.
                    let mut fresh = self.join(&attempt.id);
                    fresh.ready(wait.left().min(self.shared.config.answer_within)).await;
                    fresh.forget();
                    waiter = Some(fresh);
                }
            }
        }
    }
}

/// Tries to get a lock under one id, which makes them all the same try. If it is dropped while Redis may know the id, that is cleared up
/// in the background.
struct Attempt<'a> {
    lock: &'a Lock,
    id: Arc<str>,
    /// When the last try was sent; `None` before the first.
    sent: Option<Instant>,
    waits: bool,
    /// The place in line.
    place: Option<Arc<Hold>>,
    /// Redis may know the id: something is under way, or we stand in line.
    open: bool,
    /// A try was not answered. It may be carried out late, whatever a later one was told.
    doubtful: bool,
}

impl<'a> Attempt<'a> {
    fn new(lock: &'a Lock, waits: bool) -> Self {
        let id = match lock.named.kind {
            // Readers are told apart by their owner.
            Kind::Read => format!("{}:{}", lock.owner.as_str(), random_id()).into(),
            _ => random_id(),
        };
        Self { lock, id, sent: None, waits, place: None, open: false, doubtful: false }
    }

    async fn carry_out(&mut self) -> std::result::Result<Tried, Failure> {
        let Lock { shared, named, .. } = self.lock;
        let (first, sent) = (self.sent.is_none(), Instant::now());
        self.sent = Some(sent);
        self.open = true;
        let outcome = self.ask(first).await;
        match &outcome {
            Ok(Tried::Busy { .. }) if named.kind == Kind::Fair && self.waits => {
                // The place lives as long as we give a sign of life.
                let lease = shared.config.watchdog_lease;
                let place = Arc::new(Hold::new(named.clone(), self.id.clone(), lease, true, sent));
                shared.watchdog.watch(place.clone());
                if let Some(before) = self.place.replace(place) {
                    shared.watchdog.forget(&before);
                }
            }
            // Until it is in the hands of a guard.
            Ok(Tried::Held { .. }) => {}
            Err(Failure::Unknown(_)) => self.doubtful = true,
            // A place in line stays where it is.
            Err(_) if self.place.is_some() => {}
            _ => self.open = false,
        }
        outcome
    }

    async fn ask(&self, first: bool) -> std::result::Result<Tried, Failure> {
        let Lock { shared, named, owner, .. } = self.lock;
        let (link, config, lease) = (&shared.link, &shared.config, self.lock.lease());
        if first && named.kind == Kind::Simple && named.acquire_plain(link, &self.id, lease).await? {
            return Ok(Tried::Held { fence: None });
        }
        let place = if self.waits { config.watchdog_lease } else { Duration::ZERO };
        named.acquire(link, owner, &self.id, lease, config.fence_memory, place).await
    }

    /// Waits until another look may help.
    async fn wait(&self, waiter: &Waiter, look_in: Duration, wait: Wait) {
        let mut look_at = Instant::now() + look_in.min(wait.left());
        let place_lost = async {
            match &self.place {
                Some(place) if place.is_sure() => place.lost().await,
                // None, or known to be lost: looking will take another.
                _ => std::future::pending().await,
            }
        };
        tokio::pin!(place_lost);
        loop {
            tokio::select! {
                told = waiter.told() => match told {
                    Told::Look => return,
                    Told::LookIn(time) => look_at = look_at.min(Instant::now() + time + AFTER),
                },
                () = tokio::time::sleep_until(look_at) => return,
                () = &mut place_lost => return,
            }
        }
    }

    /// It is held.
    fn succeed(mut self, fence: Option<u64>) -> Guard {
        self.open = false;
        let Lock { shared, named, lease, .. } = self.lock;
        let sent = self.sent.unwrap_or_else(Instant::now);
        let hold = Arc::new(Hold::new(named.clone(), self.id.clone(), self.lock.lease(), false, sent));
        if lease.is_none() {
            shared.watchdog.watch(hold.clone());
        }
        Guard::new(shared.clone(), hold, fence, std::mem::take(&mut self.doubtful))
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.lock.shared.watchdog.forget(&place);
            place.end();
        }
        if self.open || self.doubtful {
            let Lock { shared, named, .. } = self.lock;
            shared.clone().abandon(named.clone(), self.id.clone(), self.lock.lease(), self.doubtful);
        }
    }
}

//! Getting a lock: at once, within a time, or however long it takes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::client::Shared;
use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::hold::{Hold, Member, Named, Tried, sure_for};
use crate::owner::{Owner, random_id};
use crate::scripts::Kind;
use crate::told::{Known, Mode, Told, Waiter};
use stampede_redis::{CommandError, timeout_error};

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

/// How long a caller is ready to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// For the lock to be free, or only for an answer?
    waits: bool,
    until: Option<Instant>,
}

impl Wait {
    pub(crate) const NO: Self = Self { waits: false, until: None };
    pub(crate) const FOR_EVER: Self = Self { waits: true, until: None };

    pub(crate) fn within(time: Duration) -> Self {
        if time.is_zero() {
            return Self::NO;
        }
        Self { waits: true, until: Instant::now().checked_add(time) }
    }

    /// The same time, but only for an answer.
    pub(crate) fn for_answer(self) -> Self {
        Self { waits: false, ..self }
    }

    pub(crate) fn is_over(self) -> bool {
        !self.waits || self.left().is_zero()
    }

    /// What is left of it at most, counted from now.
    pub(crate) fn left(self) -> Duration {
        self.until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
    }

    /// `None` if it took longer than that.
    pub(crate) async fn bound<T>(self, work: impl Future<Output = T>) -> Option<T> {
        match self.until {
            Some(until) => tokio::time::timeout_at(until, work).await.ok(),
            None => Some(work.await),
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
        self.acquire(Wait::NO).await
    }

    /// Gets the lock, waiting for it at most so long, whatever Redis does meanwhile. Waiting costs Redis nothing: it tells when the lock
    /// is free.
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
        self.acquire(Wait::FOR_EVER).await
    }

    /// Does this owner hold the lock now? Asks Redis. The owner of a simple lock is this lock with its clones.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub async fn is_held(&self) -> Result<bool> {
        let owner = self.owner.as_str();
        match self.named.kind {
            Kind::Simple => {
                let hold: Option<String> = self.query(redis::cmd("GET").arg(&self.named.keys[0])).await?;
                Ok(hold.is_some_and(|hold| hold.starts_with(owner)))
            }
            Kind::Reentrant | Kind::Fair | Kind::Write => {
                let holder: Option<String> =
                    self.query(redis::cmd("HGET").arg(&self.named.keys[0]).arg("owner")).await?;
                Ok(holder.as_deref() == Some(owner))
            }
            Kind::Read => {
                let (seconds, micros): (u64, u64) = self.query(&redis::cmd("TIME")).await?;
                let now_ms = seconds * 1000 + micros / 1000;
                let mut readers = redis::cmd("ZRANGEBYSCORE");
                readers.arg(&self.named.keys[2]).arg(format!("({now_ms}")).arg("+inf");
                let readers: Vec<String> = self.query(&readers).await?;
                Ok(readers.iter().any(|reader| reader.starts_with(owner)))
            }
        }
    }

    async fn query<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> Result<T> {
        let value = self.shared.link.send(command.clone()).await?;
        T::from_redis_value(value).map_err(|error| Error::Refused(error.into()))
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease.unwrap_or(self.shared.config.watchdog_lease)
    }

    fn mode(&self) -> Mode {
        match self.named.kind {
            Kind::Simple => Mode::Exclusive(None),
            Kind::Reentrant | Kind::Write => Mode::Exclusive(Some(self.owner.clone())),
            Kind::Read => Mode::Shared(self.owner.clone()),
            Kind::Fair => Mode::Named(self.owner.clone()),
        }
    }

    /// A place among those who are told when the lock is free.
    pub(crate) fn join(&self, id: &Arc<str>) -> Waiter {
        self.shared.hub.join(&self.named.channel, self.mode(), id)
    }

    pub(crate) async fn acquire(&self, wait: Wait) -> Result<Guard> {
        let (hub, config) = (&self.shared.hub, &self.shared.config);
        let mut attempt = Attempt::new(self, wait.waits);
        // If others of this client wait already, nothing can be missed from here on.
        let mut waiter = (wait.waits && hub.hears(&self.named.channel)).then(|| self.join(&attempt.id));
        // Those who can only have the lock one at a time need not all look. Who might be its owner, however, does once.
        let shares = matches!(self.named.kind, Kind::Simple | Kind::Reentrant | Kind::Write) && !self.give_up_early;
        let mut must_look = !(shares && waiter.is_some() && self.named.kind == Kind::Simple);
        let mut pause = FIRST_PAUSE;
        let mut upgrading_since = None;
        loop {
            if self.shared.is_closed() {
                return Err(Error::Closed);
            }
            let known = waiter.as_ref().and_then(|waiter| waiter.claim(config.answer_within));
            if let (Some(known), Some(waiter), false) = (known, &waiter, must_look) {
                must_look = attempt.wait(waiter, known.look_at(), wait).await;
                if wait.is_over() {
                    return Err(known.into());
                }
                continue;
            }
            let (problem, look_in) = match attempt.carry_out(wait).await {
                Ok(Tried::Held { fence }) => {
                    if let Some(waiter) = waiter {
                        waiter.done(self.lease());
                    }
                    hub.entered(&self.named.channel, &self.mode());
                    return Ok(attempt.succeed(fence));
                }
                Ok(Tried::Upgrade) => {
                    // Perhaps it was released a moment ago, and that is still on its way.
                    let since = *upgrading_since.get_or_insert_with(Instant::now);
                    if !wait.waits || since.elapsed() > UPGRADE_GRACE {
                        return Err(Error::Upgrade);
                    }
                    (Error::Upgrade, FIRST_PAUSE)
                }
                Ok(Tried::Busy { remaining, shared }) => {
                    if self.give_up_early && remaining.is_some_and(|remaining| remaining > wait.left()) {
                        return Err(Error::NotAcquired { remaining });
                    }
                    pause = FIRST_PAUSE;
                    // One that has no end is looked at now and then.
                    let look_in = remaining.unwrap_or(config.watchdog_lease) + AFTER;
                    if let Some(waiter) = &waiter {
                        waiter.learned(look_in, shared);
                    }
                    (Error::NotAcquired { remaining }, look_in)
                }
                Ok(Tried::NotReplicated { confirmed }) => {
                    let look_in = pause;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    (Error::NotReplicated { wanted: config.replicas, confirmed }, look_in)
                }
                Err(CommandError::Refused(error)) => return Err(Error::Refused(error)),
                Err(failure) => {
                    let look_in = pause;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    (failure.into(), look_in)
                }
            };
            if wait.is_over() {
                return Err(problem);
            }
            let busy = matches!(problem, Error::NotAcquired { .. });
            match &waiter {
                Some(waiter) => {
                    let look_at = Instant::now() + look_in.min(wait.left());
                    let told = attempt.wait(waiter, look_at, wait).await;
                    must_look = told || !shares || !busy;
                    if wait.is_over() {
                        return Err(problem);
                    }
                }
                None => {
                    // From here on nothing is missed; but until here something may have been.
                    let mut fresh = self.join(&attempt.id);
                    fresh.ready(wait.left().min(config.answer_within)).await;
                    must_look = fresh.was_woken() || !shares || !busy;
                    waiter = Some(fresh);
                }
            }
        }
    }
}

impl From<Known> for Error {
    fn from(known: Known) -> Self {
        let remaining = match known {
            Known::Busy(until) => Some(until.saturating_duration_since(Instant::now())),
            Known::Asked(_) => None,
        };
        Self::NotAcquired { remaining }
    }
}

/// Tries to get a lock under one id, which makes them all the same try. If it is dropped while Redis may know the id, that is cleared up
/// in the background.
pub(crate) struct Attempt<'a> {
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
    pub(crate) fn new(lock: &'a Lock, waits: bool) -> Self {
        let id = match lock.named.kind {
            // What Redis holds says whose it is.
            Kind::Simple | Kind::Read => format!("{}:{}", lock.owner.as_str(), random_id()).into(),
            _ => random_id(),
        };
        Self { lock, id, sent: None, waits, place: None, open: false, doubtful: false }
    }

    pub(crate) async fn carry_out(&mut self, wait: Wait) -> std::result::Result<Tried, CommandError> {
        let Lock { shared, named, .. } = self.lock;
        let (first, sent) = (self.sent.is_none(), Instant::now());
        self.sent = Some(sent);
        self.open = true;
        let outcome = wait.bound(self.ask(first)).await.unwrap_or_else(|| Err(CommandError::Unknown(timeout_error())));
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
            Ok(Tried::Held { .. } | Tried::NotReplicated { .. }) => {}
            Err(CommandError::Unknown(_)) => self.doubtful = true,
            // A place in line stays where it is.
            Err(_) if self.place.is_some() => {}
            _ => self.open = false,
        }
        outcome
    }

    async fn ask(&self, first: bool) -> std::result::Result<Tried, CommandError> {
        let Lock { shared, named, owner, .. } = self.lock;
        let (link, config, lease) = (&shared.link, &shared.config, self.lock.lease());
        if first && named.kind == Kind::Simple && config.replicas == 0 {
            if named.acquire_plain(link, &self.id, lease).await? {
                return Ok(Tried::Held { fence: None });
            }
            if self.waits {
                // For how long shows when the messages arrive, and perhaps another of this client knows by then.
                return Ok(Tried::Busy { remaining: None, shared: false });
            }
        }
        let place = if self.waits { config.watchdog_lease } else { Duration::ZERO };
        named.acquire(link, owner.as_str(), &self.id, lease, place, config).await
    }

    /// Waits until another look may help. `true` if it was woken.
    async fn wait(&self, waiter: &Waiter, mut look_at: Instant, wait: Wait) -> bool {
        let place_lost = async {
            match &self.place {
                Some(place) if place.is_sure() => place.lost().await,
                // None, or known to be lost: looking will take another.
                _ => std::future::pending().await,
            }
        };
        tokio::pin!(place_lost);
        let woken = async {
            loop {
                tokio::select! {
                    told = waiter.told() => match told {
                        Told::Look => return true,
                        Told::LookIn(time) => look_at = look_at.min(Instant::now() + time + AFTER),
                    },
                    () = tokio::time::sleep_until(look_at) => return false,
                    () = &mut place_lost => return true,
                }
            }
        };
        wait.bound(woken).await.unwrap_or(false)
    }

    /// One of the holds of a red lock, whether it is held by now or not: it is renewed, or acquired, from here on.
    pub(crate) fn into_member(mut self, held: bool, member: Member) -> Guard {
        let Lock { shared, named, lease, .. } = self.lock;
        let (open, doubtful) = (std::mem::take(&mut self.open), std::mem::take(&mut self.doubtful));
        let sent = self.sent.filter(|_| held);
        let hold = Hold::member(named.clone(), self.id.clone(), self.lock.lease(), sent, member);
        hold.set_known(open || doubtful);
        // Not held, but open: it is under way.
        hold.set_doubtful(doubtful || (open && !held));
        let hold = Arc::new(hold);
        if lease.is_none() {
            shared.watchdog.watch(hold.clone());
        }
        Guard::new(shared.clone(), hold, None)
    }

    /// When the last try was sent, and until when it is surely held if that has got it.
    pub(crate) fn held(&self) -> Option<(Instant, Instant)> {
        Some((self.sent?, self.sent? + sure_for(self.lock.lease())))
    }

    /// It is held.
    pub(crate) fn succeed(mut self, fence: Option<u64>) -> Guard {
        self.open = false;
        let Lock { shared, named, lease, .. } = self.lock;
        let sent = self.sent.unwrap_or_else(Instant::now);
        let hold = Hold::new(named.clone(), self.id.clone(), self.lock.lease(), false, sent);
        hold.set_doubtful(std::mem::take(&mut self.doubtful));
        let hold = Arc::new(hold);
        if lease.is_none() {
            shared.watchdog.watch(hold.clone());
        }
        Guard::new(shared.clone(), hold, fence)
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

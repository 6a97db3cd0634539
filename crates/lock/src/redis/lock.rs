//! Acquiring a lock: at once, with a timeout, or without one.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::{Error, Result};
use super::guard::Guard;
use super::lease::{AcquireOutcome, Lease, LockKeys, QuorumMember, validity};
use super::locks::{Shared, new_backoff};
use super::notifier::{LastCheck, WaitMode, Waiter, Wakeup};
use super::owner::{Owner, random_id};
use super::scripts::Kind;
use stampede_redis::{CommandError, timeout_error};

/// The delay between attempts to upgrade.
const UPGRADE_RETRY_DELAY: Duration = Duration::from_millis(10);
/// How long an upgrade is retried: a read lock whose guard was dropped is released in the background within this time.
const UPGRADE_GRACE: Duration = Duration::from_secs(2);
/// Redis and this process count in whole milliseconds by different clocks. A check this much after the end of a lease finds it expired.
const EXPIRY_MARGIN: Duration = Duration::from_millis(2);

/// A named lock. Cheap to clone; created by [`Locks`](crate::Locks).
#[derive(Debug, Clone)]
pub struct Lock {
    pub(crate) shared: Arc<Shared>,
    pub(crate) keys: Arc<LockKeys>,
    pub(crate) owner: Owner,
    ttl: Option<Duration>,
    fail_fast: bool,
}

/// How long a caller waits for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitLimit {
    /// Whether to wait until the lock is free, or only for the reply of Redis.
    for_lock: bool,
    deadline: Option<Instant>,
}

impl WaitLimit {
    pub(crate) const TRY_ONCE: Self = Self { for_lock: false, deadline: None };
    pub(crate) const UNLIMITED: Self = Self { for_lock: true, deadline: None };

    pub(crate) fn timeout(timeout: Duration) -> Self {
        if timeout.is_zero() {
            return Self::TRY_ONCE;
        }
        Self { for_lock: true, deadline: Instant::now().checked_add(timeout) }
    }

    /// The same deadline, but only for the reply of Redis.
    pub(crate) fn for_reply(self) -> Self {
        Self { for_lock: false, ..self }
    }

    pub(crate) fn is_over(self) -> bool {
        !self.for_lock || self.remaining().is_zero()
    }

    pub(crate) fn remaining(self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Runs a future until the deadline; `None` if it did not complete by then.
    pub(crate) async fn run<T>(self, future: impl Future<Output = T>) -> Option<T> {
        match self.deadline {
            Some(deadline) => tokio::time::timeout_at(deadline, future).await.ok(),
            None => Some(future.await),
        }
    }
}

impl Lock {
    pub(crate) fn new(shared: Arc<Shared>, keys: LockKeys, owner: Owner) -> Self {
        Self { shared, keys: Arc::new(keys), owner, ttl: None, fail_fast: false }
    }

    /// The same lock with a fixed TTL: its lease expires after this time, released or not, and the watchdog does not renew it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the TTL is shorter than 10 ms or longer than a day.
    pub fn with_ttl(mut self, ttl: Duration) -> Result<Self> {
        super::locks::check_ttl(ttl)?;
        self.ttl = Some(ttl);
        Ok(self)
    }

    /// The same lock, but [`try_lock_for`](Self::try_lock_for) fails at once if the remaining TTL of the current holder is longer than the
    /// timeout. It also fails if the holder would have released the lock before the timeout.
    #[must_use]
    pub fn fail_fast(mut self) -> Self {
        self.fail_fast = true;
        self
    }

    /// Acquires the lock if it is free.
    ///
    /// # Errors
    /// [`Error::NotAcquired`] if it is not; [`Error::Unreachable`].
    pub async fn try_lock(&self) -> Result<Guard> {
        self.acquire(WaitLimit::TRY_ONCE).await
    }

    /// Acquires the lock, waiting for it until the timeout. The timeout is kept even if Redis does not respond. Waiting does not poll:
    /// Redis publishes a message when the lock is released.
    ///
    /// # Errors
    /// [`Error::NotAcquired`] after the timeout; [`Error::Unreachable`] after the timeout if the last attempt did not reach Redis.
    pub async fn try_lock_for(&self, timeout: Duration) -> Result<Guard> {
        self.acquire(WaitLimit::timeout(timeout)).await
    }

    /// Acquires the lock, waiting without a timeout, also while Redis is unavailable.
    ///
    /// # Errors
    /// [`Error::Refused`] and [`Error::UpgradeNotAllowed`], for which waiting does not help.
    pub async fn lock(&self) -> Result<Guard> {
        self.acquire(WaitLimit::UNLIMITED).await
    }

    /// Asks Redis whether this owner holds the lock. The owner of a simple lock is this value with its clones.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub async fn is_held(&self) -> Result<bool> {
        let owner = self.owner.as_str();
        match self.keys.kind {
            Kind::Simple => {
                let id: Option<String> = self.query(redis::cmd("GET").arg(&self.keys.keys[0])).await?;
                Ok(id.is_some_and(|id| id.starts_with(owner)))
            }
            Kind::Reentrant | Kind::Fair | Kind::Write => {
                let holder: Option<String> =
                    self.query(redis::cmd("HGET").arg(&self.keys.keys[0]).arg("owner")).await?;
                Ok(holder.as_deref() == Some(owner))
            }
            Kind::Read => {
                let (seconds, micros): (u64, u64) = self.query(&redis::cmd("TIME")).await?;
                let now_ms = seconds * 1000 + micros / 1000;
                let mut readers = redis::cmd("ZRANGEBYSCORE");
                readers.arg(&self.keys.keys[2]).arg(format!("({now_ms}")).arg("+inf");
                let readers: Vec<String> = self.query(&readers).await?;
                Ok(readers.iter().any(|reader| reader.starts_with(owner)))
            }
        }
    }

    async fn query<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> Result<T> {
        let value = self.shared.client.send(command.clone()).await?;
        T::from_redis_value(value).map_err(|error| Error::Refused(error.into()))
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl.unwrap_or(self.shared.config.watchdog_ttl)
    }

    fn wait_mode(&self) -> WaitMode {
        match self.keys.kind {
            Kind::Simple => WaitMode::Exclusive(None),
            Kind::Reentrant | Kind::Write => WaitMode::Exclusive(Some(self.owner.clone())),
            Kind::Read => WaitMode::Shared(self.owner.clone()),
            Kind::Fair => WaitMode::Queued(self.owner.clone()),
        }
    }

    /// Registers a waiter that is woken when the lock is released.
    pub(crate) fn register_waiter(&self, id: &Arc<str>) -> Waiter {
        self.shared.notifier.register(&self.keys.channel, self.wait_mode(), id)
    }

    pub(crate) async fn acquire(&self, limit: WaitLimit) -> Result<Guard> {
        let (notifier, config) = (&self.shared.notifier, &self.shared.config);
        let mut attempt = Attempt::new(self, limit.for_lock);
        // If the channel is subscribed already, a waiter registered before the first check misses no message.
        let subscribed = limit.for_lock && notifier.is_subscribed(&self.keys.channel);
        let mut waiter = subscribed.then(|| self.register_waiter(&attempt.id));
        // Waiters that exclude each other share the result of one check. A waiter whose owner may already hold the lock checks once
        // by itself.
        let shares_checks = matches!(self.keys.kind, Kind::Simple | Kind::Reentrant | Kind::Write) && !self.fail_fast;
        let mut must_check = !(shares_checks && waiter.is_some() && self.keys.kind == Kind::Simple);
        let mut backoff = new_backoff();
        let mut upgrading_since = None;
        loop {
            if self.shared.is_closed() {
                return Err(Error::Closed);
            }
            let last_check = waiter.as_ref().and_then(|waiter| waiter.claim_check(config.response_timeout));
            if let (Some(last_check), Some(waiter), false) = (last_check, &waiter, must_check) {
                must_check = attempt.wait(waiter, last_check.retry_at(), limit).await;
                if limit.is_over() {
                    return Err(last_check.into());
                }
                continue;
            }
            let (error, retry_in) = match attempt.run(limit).await {
                Ok(AcquireOutcome::Acquired { fencing_token }) => {
                    if let Some(waiter) = waiter {
                        waiter.acquired(self.ttl());
                    }
                    notifier.notify_acquired(&self.keys.channel, &self.wait_mode());
                    return Ok(attempt.into_guard(fencing_token));
                }
                Ok(AcquireOutcome::UpgradeNotAllowed) => {
                    // The read lock may have been dropped a moment ago, and its release may still be in flight.
                    let since = *upgrading_since.get_or_insert_with(Instant::now);
                    if !limit.for_lock || since.elapsed() > UPGRADE_GRACE {
                        return Err(Error::UpgradeNotAllowed);
                    }
                    (Error::UpgradeNotAllowed, UPGRADE_RETRY_DELAY)
                }
                Ok(AcquireOutcome::Busy { remaining, shared }) => {
                    if self.fail_fast && remaining.is_some_and(|remaining| remaining > limit.remaining()) {
                        return Err(Error::NotAcquired { remaining });
                    }
                    backoff.reset();
                    // A lock without a TTL is checked at intervals.
                    let retry_in = remaining.unwrap_or(config.watchdog_ttl) + EXPIRY_MARGIN;
                    if let Some(waiter) = &waiter {
                        waiter.report_busy(retry_in, shared);
                    }
                    (Error::NotAcquired { remaining }, retry_in)
                }
                Ok(AcquireOutcome::NotReplicated { confirmed }) => {
                    (Error::NotReplicated { required: config.replicas, confirmed }, backoff.advance())
                }
                Err(CommandError::Refused(error)) => return Err(Error::Refused(error)),
                Err(error) => (error.into(), backoff.advance()),
            };
            if limit.is_over() {
                return Err(error);
            }
            let busy = matches!(error, Error::NotAcquired { .. });
            match &waiter {
                Some(waiter) => {
                    let retry_at = Instant::now() + retry_in.min(limit.remaining());
                    let woken = attempt.wait(waiter, retry_at, limit).await;
                    must_check = woken || !shares_checks || !busy;
                    if limit.is_over() {
                        return Err(error);
                    }
                }
                None => {
                    // No message is missed once the channel is subscribed, but one may have been missed before.
                    let mut registered = self.register_waiter(&attempt.id);
                    registered.subscribed(limit.remaining().min(config.response_timeout)).await;
                    must_check = registered.take_wakeup() || !shares_checks || !busy;
                    waiter = Some(registered);
                }
            }
        }
    }
}

impl From<LastCheck> for Error {
    fn from(last_check: LastCheck) -> Self {
        let remaining = match last_check {
            LastCheck::BusyUntil(until) => Some(until.saturating_duration_since(Instant::now())),
            LastCheck::PendingUntil(_) => None,
        };
        Self::NotAcquired { remaining }
    }
}

/// Attempts to acquire a lock under one lease id, which makes repeated requests idempotent. If it is dropped while Redis may have the id,
/// the id is released in the background.
pub(crate) struct Attempt<'a> {
    lock: &'a Lock,
    id: Arc<str>,
    /// When the last request was sent; `None` before the first.
    sent: Option<Instant>,
    waits: bool,
    /// The entry in the queue of a fair lock.
    queue_entry: Option<Arc<Lease>>,
    /// Redis may have the id: a request is in flight, or the id is queued.
    may_exist: bool,
    /// A request had no reply. It may be executed late, whatever a later reply says.
    unresolved: bool,
}

impl<'a> Attempt<'a> {
    pub(crate) fn new(lock: &'a Lock, waits: bool) -> Self {
        let id = match lock.keys.kind {
            // The id is all that Redis stores for these kinds, so it includes the owner.
            Kind::Simple | Kind::Read => format!("{}:{}", lock.owner.as_str(), random_id()).into(),
            _ => random_id(),
        };
        Self { lock, id, sent: None, waits, queue_entry: None, may_exist: false, unresolved: false }
    }

    /// Tries once.
    pub(crate) async fn run(&mut self, limit: WaitLimit) -> std::result::Result<AcquireOutcome, CommandError> {
        let Lock { shared, keys, .. } = self.lock;
        let (first, sent) = (self.sent.is_none(), Instant::now());
        self.sent = Some(sent);
        self.may_exist = true;
        let outcome = limit.run(self.send(first)).await.unwrap_or_else(|| Err(CommandError::Unknown(timeout_error())));
        match &outcome {
            Ok(AcquireOutcome::Busy { .. }) if keys.kind == Kind::Fair && self.waits => {
                // The watchdog keeps the queue entry alive.
                let ttl = shared.config.watchdog_ttl;
                let entry = Arc::new(Lease::queue_entry(keys.clone(), self.id.clone(), ttl, sent));
                shared.watchdog.watch(entry.clone());
                if let Some(previous) = self.queue_entry.replace(entry) {
                    shared.watchdog.unwatch(&previous);
                }
            }
            // The id exists until a guard takes it over.
            Ok(AcquireOutcome::Acquired { .. } | AcquireOutcome::NotReplicated { .. }) => {}
            Err(CommandError::Unknown(_)) => self.unresolved = true,
            // The queue entry still exists.
            Err(_) if self.queue_entry.is_some() => {}
            _ => self.may_exist = false,
        }
        outcome
    }

    async fn send(&self, first: bool) -> std::result::Result<AcquireOutcome, CommandError> {
        let Lock { shared, keys, owner, .. } = self.lock;
        let (client, config, ttl) = (&shared.client, &shared.config, self.lock.ttl());
        if first && keys.kind == Kind::Simple && config.replicas == 0 {
            if keys.acquire_plain(client, &self.id, ttl).await? {
                return Ok(AcquireOutcome::Acquired { fencing_token: None });
            }
            if self.waits {
                // The remaining TTL is asked for after the subscription, unless another waiter of this client has learned it by then.
                return Ok(AcquireOutcome::Busy { remaining: None, shared: false });
            }
        }
        let queue_ttl = if self.waits { config.watchdog_ttl } else { Duration::ZERO };
        keys.acquire(client, owner.as_str(), &self.id, ttl, queue_ttl, config).await
    }

    /// Waits until another check may succeed. Returns `true` if it was woken.
    async fn wait(&self, waiter: &Waiter, mut retry_at: Instant, limit: WaitLimit) -> bool {
        let queue_entry_lost = async {
            match &self.queue_entry {
                Some(entry) if entry.is_valid() => entry.lost().await,
                // Without an entry, or with one known to be lost, the next check queues again.
                _ => std::future::pending().await,
            }
        };
        tokio::pin!(queue_entry_lost);
        let woken = async {
            loop {
                tokio::select! {
                    wakeup = waiter.wakeup() => match wakeup {
                        Wakeup::Check => return true,
                        Wakeup::CheckIn(time) => retry_at = retry_at.min(Instant::now() + time + EXPIRY_MARGIN),
                    },
                    () = tokio::time::sleep_until(retry_at) => return false,
                    () = &mut queue_entry_lost => return true,
                }
            }
        };
        limit.run(woken).await.unwrap_or(false)
    }

    /// Turns the attempt into a guard of a Redlock, whether the lock is held on this server or not: from here on the watchdog renews or
    /// acquires it.
    pub(crate) fn into_quorum_guard(mut self, held: bool, member: QuorumMember) -> Guard {
        let Lock { shared, keys, ttl, .. } = self.lock;
        let (may_exist, unresolved) = (std::mem::take(&mut self.may_exist), std::mem::take(&mut self.unresolved));
        let sent = self.sent.filter(|_| held);
        let lease = Lease::quorum_member(keys.clone(), self.id.clone(), self.lock.ttl(), sent, member);
        lease.set_may_exist(may_exist || unresolved);
        // An id that may exist but is not held has a request in flight.
        lease.set_unresolved(unresolved || (may_exist && !held));
        let lease = Arc::new(lease);
        if ttl.is_none() {
            shared.watchdog.watch(lease.clone());
        }
        Guard::new(shared.clone(), lease, None)
    }

    /// When the last request was sent, and until when the lock is valid if that request has acquired it.
    pub(crate) fn validity(&self) -> Option<(Instant, Instant)> {
        Some((self.sent?, self.sent? + validity(self.lock.ttl())))
    }

    /// Turns a successful attempt into a guard.
    pub(crate) fn into_guard(mut self, fencing_token: Option<u64>) -> Guard {
        self.may_exist = false;
        let Lock { shared, keys, ttl, .. } = self.lock;
        let sent = self.sent.unwrap_or_else(Instant::now);
        let lease = Lease::new(keys.clone(), self.id.clone(), self.lock.ttl(), sent);
        lease.set_unresolved(std::mem::take(&mut self.unresolved));
        let lease = Arc::new(lease);
        if ttl.is_none() {
            shared.watchdog.watch(lease.clone());
        }
        Guard::new(shared.clone(), lease, fencing_token)
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.queue_entry.take() {
            self.lock.shared.watchdog.unwatch(&entry);
            entry.end();
        }
        if self.may_exist || self.unresolved {
            let Lock { shared, keys, .. } = self.lock;
            let (keys, ttl) = (keys.clone(), self.lock.ttl());
            shared.clone().release_in_background(keys, self.id.clone(), ttl, self.unresolved);
        }
    }
}

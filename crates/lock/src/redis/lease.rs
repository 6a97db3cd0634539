//! A lease: one entry of an owner into a lock, identified by an id and valid until it expires.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::{FromRedisValue as _, Value};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::locks::Config;
use super::quorum::Quorum;
use super::scripts::Kind;
use stampede_redis::{Client, CommandError, Script};

/// Values of [`Lease::valid_until_us`]: ended for good; expired, but may become valid again.
const ENDED: u64 = 0;
const EXPIRED: u64 = 1;

/// The kind and the Redis keys of a lock. See [`super::locks`] for what the keys contain.
#[derive(Debug)]
pub(crate) struct LockKeys {
    pub(crate) kind: Kind,
    pub(crate) keys: Vec<String>,
    pub(crate) channel: Arc<str>,
}

#[derive(Debug)]
pub(crate) enum AcquireOutcome {
    Acquired {
        fencing_token: Option<u64>,
    },
    Busy {
        remaining: Option<Duration>,
        /// Readers hold it, so that other readers may enter.
        shared: bool,
    },
    /// Acquired, but confirmed by too few replicas.
    NotReplicated {
        confirmed: usize,
    },
    /// The owner holds the read lock and would wait for itself.
    UpgradeNotAllowed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RenewOutcome {
    Renewed,
    /// Another owner holds the lock on this server of a Redlock, possibly only for a short time.
    Busy,
    /// Lost for good.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReleaseOutcome {
    Released,
    /// The lock is free.
    NotHeld,
    HeldByOther,
}

/// A lease. Redis stores its id.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) lock: Arc<LockKeys>,
    pub(crate) id: Arc<str>,
    pub(crate) ttl: Duration,
    /// It is only an entry in the queue of a fair lock.
    is_queue_entry: bool,
    /// It belongs to a Redlock, and is acquired again if the server does not have it any more.
    member: Option<QuorumMember>,
    created: Instant,
    /// Microseconds after `created`, or [`ENDED`] or [`EXPIRED`].
    valid_until_us: AtomicU64,
    ended: Notify,
    /// A request without a reply may still be executed, and acquire the lock after its release.
    unresolved: AtomicBool,
    /// Redis may have the id.
    may_exist: AtomicBool,
}

/// The place of a lease in a Redlock.
#[derive(Debug)]
pub(crate) struct QuorumMember {
    pub(crate) quorum: Arc<Quorum>,
    pub(crate) server: usize,
}

impl LockKeys {
    /// Tries to acquire the lock for `owner` under the lease id `id`.
    pub(crate) async fn acquire(
        &self,
        client: &Client,
        owner: &str,
        id: &str,
        ttl: Duration,
        queue_ttl: Duration,
        config: &Config,
    ) -> Result<AcquireOutcome, CommandError> {
        let times = [ttl, config.fencing_token_ttl, queue_ttl].map(|time| time.as_millis().to_string());
        let args = [owner, id, &times[0], &times[1], &times[2]];
        let (value, confirmed) = self.write(client, self.kind.acquire(), &args, config.replicas).await?;
        match parse_acquire(value).map_err(CommandError::Unknown)? {
            AcquireOutcome::Acquired { .. } if confirmed < config.replicas => {
                Ok(AcquireOutcome::NotReplicated { confirmed })
            }
            outcome => Ok(outcome),
        }
    }

    /// Runs a script. Also returns how many replicas have confirmed its writes, or 0 if none need to.
    async fn write(
        &self,
        client: &Client,
        script: &Script,
        args: &[&str],
        replicas: usize,
    ) -> Result<(Value, usize), CommandError> {
        if replicas == 0 {
            return Ok((client.eval(script, &self.keys, args).await?, 0));
        }
        client.eval_replicated(script, &self.keys, args, replicas).await
    }

    /// Tries to acquire the simple lock with a single `SET NX`. `false` does not say which lease holds it; it may be this one.
    pub(crate) async fn acquire_plain(&self, client: &Client, id: &str, ttl: Duration) -> Result<bool, CommandError> {
        let mut command = redis::cmd("SET");
        command.arg(&self.keys[0]).arg(id).arg("NX").arg("PX").arg(ttl.as_millis().to_string());
        let value = client.send(command).await?;
        Ok(value == Value::Okay)
    }

    /// Releases a lease or a queue entry.
    pub(crate) async fn release(&self, client: &Client, id: &str) -> Result<ReleaseOutcome, CommandError> {
        let value = client.eval(self.kind.release(), &self.keys, &[id, &self.channel]).await?;
        Ok(match &value {
            Value::BulkString(outcome) if [&b"freed"[..], b"held", b"left"].contains(&&outcome[..]) => {
                ReleaseOutcome::Released
            }
            Value::BulkString(outcome) if outcome == b"other" => ReleaseOutcome::HeldByOther,
            _ => ReleaseOutcome::NotHeld,
        })
    }
}

fn parse_acquire(value: Value) -> redis::RedisResult<AcquireOutcome> {
    // The third part exists only if readers hold the lock.
    let parts = Vec::<Value>::from_redis_value(value)?;
    let shared = parts.len() > 2;
    let mut parts = parts.into_iter();
    let mut next = || parts.next().unwrap_or(Value::Nil);
    let (code, rest) = (i64::from_redis_value(next())?, next());
    Ok(match code {
        1 => AcquireOutcome::Acquired { fencing_token: String::from_redis_value(rest)?.parse().ok() },
        0 => {
            let ms = i64::from_redis_value(rest)?;
            // A key without a TTL was not created by this crate; it still counts as a lock.
            AcquireOutcome::Busy { remaining: u64::try_from(ms).ok().map(Duration::from_millis), shared }
        }
        _ => AcquireOutcome::UpgradeNotAllowed,
    })
}

impl Lease {
    /// A lease that was acquired with a command sent at `sent`.
    pub(crate) fn new(lock: Arc<LockKeys>, id: Arc<str>, ttl: Duration, sent: Instant) -> Self {
        let lease = Self {
            lock,
            id,
            ttl,
            is_queue_entry: false,
            member: None,
            created: sent,
            valid_until_us: AtomicU64::new(EXPIRED),
            ended: Notify::new(),
            unresolved: AtomicBool::new(false),
            may_exist: AtomicBool::new(true),
        };
        lease.extend(sent);
        lease
    }

    /// The queue entry of a waiter for a fair lock.
    pub(crate) fn queue_entry(lock: Arc<LockKeys>, id: Arc<str>, ttl: Duration, sent: Instant) -> Self {
        Self { is_queue_entry: true, ..Self::new(lock, id, ttl, sent) }
    }

    /// A lease of a Redlock, acquired with a command sent at `sent`, or not acquired yet.
    pub(crate) fn quorum_member(
        lock: Arc<LockKeys>,
        id: Arc<str>,
        ttl: Duration,
        sent: Option<Instant>,
        member: QuorumMember,
    ) -> Self {
        let mut lease = Self::new(lock, id, ttl, sent.unwrap_or_else(Instant::now));
        if sent.is_none() {
            lease.valid_until_us = AtomicU64::new(EXPIRED);
        }
        lease.member = Some(member);
        lease
    }

    pub(crate) fn set_unresolved(&self, unresolved: bool) {
        self.unresolved.store(unresolved, Ordering::SeqCst);
    }

    pub(crate) fn is_unresolved(&self) -> bool {
        self.unresolved.load(Ordering::SeqCst)
    }

    pub(crate) fn set_may_exist(&self, may_exist: bool) {
        self.may_exist.store(may_exist, Ordering::SeqCst);
    }

    /// Whether Redis may have it; otherwise there is nothing to release.
    pub(crate) fn may_exist(&self) -> bool {
        self.may_exist.load(Ordering::SeqCst)
    }

    /// Records a renewal by a command sent at `sent`.
    fn extend(&self, sent: Instant) {
        let until = sent.duration_since(self.created) + validity(self.ttl);
        let until = u64::try_from(until.as_micros()).unwrap_or(u64::MAX);
        // An ended lease stays ended, and the time only moves forward.
        let later = |known| (known != ENDED && known < until).then_some(until);
        let _ = self.valid_until_us.fetch_update(Ordering::SeqCst, Ordering::SeqCst, later);
    }

    /// Ends the lease for good: it is lost or being released.
    pub(crate) fn end(&self) {
        self.valid_until_us.store(ENDED, Ordering::SeqCst);
        self.ended.notify_waiters();
    }

    /// Until when it is valid; in the past if it is not.
    pub(crate) fn valid_until(&self) -> Instant {
        self.created + Duration::from_micros(self.valid_until_us.load(Ordering::SeqCst))
    }

    pub(crate) fn is_valid(&self) -> bool {
        !self.is_ended() && Instant::now() < self.valid_until()
    }

    fn is_ended(&self) -> bool {
        self.valid_until_us.load(Ordering::SeqCst) == ENDED
    }

    /// Waits until it is no longer valid.
    pub(crate) async fn lost(&self) {
        loop {
            let ended = self.ended.notified();
            if !self.is_valid() {
                return;
            }
            // It may be renewed before it expires.
            let _ = tokio::time::timeout_at(self.valid_until(), ended).await;
        }
    }

    /// Whether the last renewal is at least `age` old, or the lease is urgent.
    pub(crate) fn is_due(&self, age: Duration) -> bool {
        if self.member.as_ref().is_some_and(|member| member.quorum.is_urgent(member.server)) {
            return true;
        }
        Instant::now() + validity(self.ttl) >= self.valid_until() + age
    }

    /// Whether there is nothing left to renew.
    pub(crate) fn is_over(&self) -> bool {
        match &self.member {
            Some(member) => !member.quorum.is_valid(),
            None => !self.is_valid(),
        }
    }

    /// Renews it once.
    pub(crate) async fn renew(&self, client: &Client, config: &Config) -> Result<RenewOutcome, CommandError> {
        let sent = Instant::now();
        if let Some(member) = &self.member {
            return self.renew_or_acquire(member, client, config, sent).await;
        }
        let script = if self.is_queue_entry { Kind::renew_queue_entry() } else { self.lock.kind.renew() };
        let ttl = self.ttl.as_millis().to_string();
        let (value, confirmed) = self.lock.write(client, script, &[&*self.id, &ttl], config.replicas).await?;
        if value != Value::Int(1) {
            return Ok(RenewOutcome::Lost);
        }
        if confirmed < config.replicas {
            return Err(not_replicated());
        }
        self.extend(sent);
        Ok(RenewOutcome::Renewed)
    }

    /// Renews it, or acquires it again under the same id. While the majority of the servers holds the lock, no other owner can.
    async fn renew_or_acquire(
        &self,
        member: &QuorumMember,
        client: &Client,
        config: &Config,
        sent: Instant,
    ) -> Result<RenewOutcome, CommandError> {
        if self.is_ended() || member.quorum.valid_until(sent).is_none() {
            return Ok(RenewOutcome::Lost);
        }
        self.set_may_exist(true);
        // Until the reply arrives, a release may be executed before this request.
        let before = self.unresolved.swap(true, Ordering::SeqCst);
        let ttl = self.ttl.as_millis().to_string();
        let result = self.lock.write(client, Kind::renew_or_acquire(), &[&*self.id, &ttl], config.replicas).await;
        if !matches!(result, Err(CommandError::Unknown(_))) {
            self.set_unresolved(before);
        }
        let (value, confirmed) = result?;
        if value == Value::Int(0) {
            member.quorum.record_lost(member.server);
            self.expire();
            return Ok(RenewOutcome::Busy);
        }
        if confirmed < config.replicas {
            return Err(not_replicated());
        }
        if member.quorum.record_held(member.server, sent, sent + validity(self.ttl), value == Value::Int(2)) {
            self.extend(sent);
        }
        Ok(RenewOutcome::Renewed)
    }

    /// It is not valid now, but may become valid again.
    fn expire(&self) {
        let not_ended = |known| (known != ENDED).then_some(EXPIRED);
        let _ = self.valid_until_us.fetch_update(Ordering::SeqCst, Ordering::SeqCst, not_ended);
    }
}

fn not_replicated() -> CommandError {
    CommandError::Unknown((redis::ErrorKind::Client, "too few replicas confirmed a renewal").into())
}

/// How long a lease with this TTL by the clock of Redis is valid by the local clock: the TTL less a margin for clock drift.
pub(crate) fn validity(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))
}

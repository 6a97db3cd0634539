//! One hold of a lock: what it is about, and until when it is sure.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::{FromRedisValue as _, Value};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::client::Config;
use crate::quorum::Quorum;
use crate::scripts::Kind;
use stampede_redis::{Client, CommandError, Script};

/// A time in the past, in microseconds after a hold was made.
const NOT_SURE: u64 = 1;

/// A lock's name and keys. See [`crate::client`] for what the keys hold.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) kind: Kind,
    pub(crate) keys: Vec<String>,
    pub(crate) channel: Arc<str>,
}

/// What an attempt to get a lock came to.
#[derive(Debug)]
pub(crate) enum Tried {
    Held {
        fence: Option<u64>,
    },
    Busy {
        remaining: Option<Duration>,
        /// Readers hold it, so that others may read.
        shared: bool,
    },
    /// It is held, but too few replicas know.
    NotReplicated {
        confirmed: usize,
    },
    /// The owner reads, and would wait for itself.
    Upgrade,
}

/// What renewing a hold came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renewal {
    Renewed,
    /// Not now: another holds it on this server, but perhaps not for long.
    NotYet,
    /// It is gone for good.
    Gone,
}

/// What giving back a hold came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// It was ours, and is not any more.
    Released,
    /// Nobody holds the lock.
    Nobody,
    /// Somebody else holds the lock.
    Other,
}

/// One hold. Its id is what the scripts know it by.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) lock: Arc<Named>,
    pub(crate) id: Arc<str>,
    pub(crate) lease: Duration,
    /// It is only a place in line.
    in_line: bool,
    /// It is one of several, and is acquired again if the server has forgotten it.
    member: Option<Member>,
    born: Instant,
    /// Microseconds after `born`; 0 if it is over.
    sure_until: AtomicU64,
    over: Notify,
    /// Something unanswered may be carried out late, and acquire it after it was released.
    doubtful: AtomicBool,
    /// Redis may know the id.
    known: AtomicBool,
}

/// A hold's part in a red lock.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) quorum: Arc<Quorum>,
    pub(crate) server: usize,
}

impl Named {
    /// Tries to get the lock for `owner` under the id `hold`.
    pub(crate) async fn acquire(
        &self,
        link: &Client,
        owner: &str,
        hold: &str,
        lease: Duration,
        place: Duration,
        config: &Config,
    ) -> Result<Tried, CommandError> {
        let times = [lease, config.fence_memory, place].map(|time| time.as_millis().to_string());
        let args = [owner, hold, &times[0], &times[1], &times[2]];
        let (value, confirmed) = self.write(link, self.kind.acquire(), &args, config.replicas).await?;
        match read_tried(value).map_err(CommandError::Unknown)? {
            Tried::Held { .. } if confirmed < config.replicas => Ok(Tried::NotReplicated { confirmed }),
            tried => Ok(tried),
        }
    }

    /// Runs a script; also returns how many replicas are known to have what it wrote, if any need to.
    async fn write(
        &self,
        link: &Client,
        script: &Script,
        args: &[&str],
        replicas: usize,
    ) -> Result<(Value, usize), CommandError> {
        if replicas == 0 {
            return Ok((link.eval(script, &self.keys, args).await?, 0));
        }
        link.eval_replicated(script, &self.keys, args, replicas).await
    }

    /// The simple lock in one plain command. `false` says nothing about who holds it: that very hold may.
    pub(crate) async fn acquire_plain(&self, link: &Client, hold: &str, lease: Duration) -> Result<bool, CommandError> {
        let mut command = redis::cmd("SET");
        command.arg(&self.keys[0]).arg(hold).arg("NX").arg("PX").arg(lease.as_millis().to_string());
        let value = link.send(command).await?;
        Ok(value == Value::Okay)
    }

    /// Gives a hold back, or a place in line.
    pub(crate) async fn release(&self, link: &Client, hold: &str) -> Result<Gone, CommandError> {
        let value = link.eval(self.kind.release(), &self.keys, &[hold, &self.channel]).await?;
        Ok(match &value {
            Value::BulkString(said) if [&b"freed"[..], b"held", b"left"].contains(&&said[..]) => Gone::Released,
            Value::BulkString(said) if said == b"other" => Gone::Other,
            _ => Gone::Nobody,
        })
    }
}

fn read_tried(value: Value) -> redis::RedisResult<Tried> {
    // The third part is there only if readers hold it.
    let parts = Vec::<Value>::from_redis_value(value)?;
    let shared = parts.len() > 2;
    let mut parts = parts.into_iter();
    let mut next = || parts.next().unwrap_or(Value::Nil);
    let (code, rest) = (i64::from_redis_value(next())?, next());
    Ok(match code {
        1 => Tried::Held { fence: String::from_redis_value(rest)?.parse().ok() },
        0 => {
            let ms = i64::from_redis_value(rest)?;
            // Without a lease: not of our making, but not ours to take either.
            Tried::Busy { remaining: u64::try_from(ms).ok().map(Duration::from_millis), shared }
        }
        _ => Tried::Upgrade,
    })
}

impl Hold {
    pub(crate) fn new(lock: Arc<Named>, id: Arc<str>, lease: Duration, in_line: bool, sent: Instant) -> Self {
        let hold = Self {
            lock,
            id,
            lease,
            in_line,
            member: None,
            born: sent,
            sure_until: AtomicU64::new(NOT_SURE),
            over: Notify::new(),
            doubtful: AtomicBool::new(false),
            known: AtomicBool::new(true),
        };
        hold.extend(sent);
        hold
    }

    /// One of the holds of a red lock, got with a command sent at this time or not got yet.
    pub(crate) fn member(
        lock: Arc<Named>,
        id: Arc<str>,
        lease: Duration,
        sent: Option<Instant>,
        member: Member,
    ) -> Self {
        let mut hold = Self::new(lock, id, lease, false, sent.unwrap_or_else(Instant::now));
        if sent.is_none() {
            hold.sure_until = AtomicU64::new(NOT_SURE);
        }
        hold.member = Some(member);
        hold
    }

    pub(crate) fn set_doubtful(&self, doubtful: bool) {
        self.doubtful.store(doubtful, Ordering::SeqCst);
    }

    pub(crate) fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::SeqCst)
    }

    pub(crate) fn set_known(&self, known: bool) {
        self.known.store(known, Ordering::SeqCst);
    }

    /// May Redis know it? Otherwise there is nothing to release.
    pub(crate) fn is_known(&self) -> bool {
        self.known.load(Ordering::SeqCst)
    }

    /// It was renewed by a command sent at this time.
    fn extend(&self, sent: Instant) {
        let until = sent.duration_since(self.born) + sure_for(self.lease);
        let until = u64::try_from(until.as_micros()).unwrap_or(u64::MAX);
        // Not if it is over, and never backwards.
        let _ = self
            .sure_until
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |known| (known != 0 && known < until).then_some(until));
    }

    /// It is not held any more, or nobody cares any more.
    pub(crate) fn end(&self) {
        self.sure_until.store(0, Ordering::SeqCst);
        self.over.notify_waiters();
    }

    /// Until when it is surely held; the past if it is not.
    pub(crate) fn sure_until(&self) -> Instant {
        self.born + Duration::from_micros(self.sure_until.load(Ordering::SeqCst))
    }

    pub(crate) fn is_sure(&self) -> bool {
        self.sure_until.load(Ordering::SeqCst) != 0 && Instant::now() < self.sure_until()
    }

    /// Waits until it is not surely held any more.
    pub(crate) async fn lost(&self) {
        loop {
            let over = self.over.notified();
            if !self.is_sure() {
                return;
            }
            // By the end of that time it may have been renewed.
            let _ = tokio::time::timeout_at(self.sure_until(), over).await;
        }
    }

    /// Is it time to renew it?
    pub(crate) fn is_due(&self, after: Duration) -> bool {
        if self.member.as_ref().is_some_and(|member| member.quorum.is_urgent(member.server)) {
            return true;
        }
        Instant::now() + sure_for(self.lease) >= self.sure_until() + after
    }

    /// Is there anything left to renew?
    pub(crate) fn is_over(&self) -> bool {
        match &self.member {
            Some(member) => !member.quorum.is_sure(),
            None => !self.is_sure(),
        }
    }

    /// Renews it once.
    pub(crate) async fn renew(&self, link: &Client, config: &Config) -> Result<Renewal, CommandError> {
        let sent = Instant::now();
        if let Some(member) = &self.member {
            return self.renew_or_acquire(member, link, config, sent).await;
        }
        let script = if self.in_line { Kind::keep() } else { self.lock.kind.renew() };
        let lease = self.lease.as_millis().to_string();
        let (value, confirmed) = self.lock.write(link, script, &[&*self.id, &lease], config.replicas).await?;
        if value != Value::Int(1) {
            return Ok(Renewal::Gone);
        }
        if confirmed < config.replicas {
            return Err(not_replicated());
        }
        self.extend(sent);
        Ok(Renewal::Renewed)
    }

    /// Renews it, or acquires it again under the same id: as long as most others are held, nobody else can have the lock.
    async fn renew_or_acquire(
        &self,
        member: &Member,
        link: &Client,
        config: &Config,
        sent: Instant,
    ) -> Result<Renewal, CommandError> {
        if self.sure_until.load(Ordering::SeqCst) == 0 || member.quorum.sure_until(sent).is_none() {
            return Ok(Renewal::Gone);
        }
        self.set_known(true);
        // Until it is answered, a release may be overtaken by it.
        let before = self.doubtful.swap(true, Ordering::SeqCst);
        let lease = self.lease.as_millis().to_string();
        let outcome = self.lock.write(link, Kind::renew_or_acquire(), &[&*self.id, &lease], config.replicas).await;
        if !matches!(outcome, Err(CommandError::Unknown(_))) {
            self.set_doubtful(before);
        }
        let (value, confirmed) = outcome?;
        if value == Value::Int(0) {
            member.quorum.missed(member.server);
            self.not_sure();
            return Ok(Renewal::NotYet);
        }
        if confirmed < config.replicas {
            return Err(not_replicated());
        }
        if member.quorum.held(member.server, sent, sent + sure_for(self.lease), value == Value::Int(2)) {
            self.extend(sent);
        }
        Ok(Renewal::Renewed)
    }

    /// It is not held, but may be again.
    fn not_sure(&self) {
        let not_over = |known| (known != 0).then_some(NOT_SURE);
        let _ = self.sure_until.fetch_update(Ordering::SeqCst, Ordering::SeqCst, not_over);
    }
}

fn not_replicated() -> CommandError {
    CommandError::Unknown((redis::ErrorKind::Client, "too few replicas have confirmed a renewal").into())
}

/// Clocks differ in speed: of a lease by Redis' clock so much is sure by ours.
pub(crate) fn sure_for(lease: Duration) -> Duration {
    lease.saturating_sub(lease / 100 + Duration::from_millis(2))
}

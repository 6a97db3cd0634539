//! One hold of a lock: what it is about, and until when it is sure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{FromRedisValue as _, Value};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::owner::Owner;
use crate::scripts::Kind;
use stampede_redis::{Failure, Link};

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
    },
    /// The owner reads, and would wait for itself.
    Upgrade,
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
    born: Instant,
    /// Microseconds after `born`; 0 if it is over.
    sure_until: AtomicU64,
    over: Notify,
}

impl Named {
    /// Tries to get the lock for `owner` under the id `hold`.
    pub(crate) async fn acquire(
        &self,
        link: &Link,
        owner: &Owner,
        hold: &str,
        lease: Duration,
        fence_memory: Duration,
        place: Duration,
    ) -> Result<Tried, Failure> {
        let times = [lease, fence_memory, place].map(|time| time.as_millis().to_string());
        let args = [owner.as_str(), hold, &times[0], &times[1], &times[2]];
        let value = link.run(self.kind.acquire(), &self.keys, &args).await?;
        read_tried(value).map_err(Failure::Unknown)
    }

    /// The simple lock in one plain command. `false` says nothing about who holds it: that very hold may.
    pub(crate) async fn acquire_plain(&self, link: &Link, hold: &str, lease: Duration) -> Result<bool, Failure> {
        let mut command = redis::cmd("SET");
        command.arg(&self.keys[0]).arg(hold).arg("NX").arg("PX").arg(lease.as_millis().to_string());
        let value = link.send(command).await?;
        Ok(value == Value::Okay)
    }

    /// Gives a hold back, or a place in line.
    pub(crate) async fn release(&self, link: &Link, hold: &str) -> Result<Gone, Failure> {
        let value = link.run(self.kind.release(), &self.keys, &[hold, &self.channel]).await?;
        Ok(match &value {
            Value::BulkString(said) if [&b"freed"[..], b"held", b"left"].contains(&&said[..]) => Gone::Released,
            Value::BulkString(said) if said == b"other" => Gone::Other,
            _ => Gone::Nobody,
        })
    }
}

fn read_tried(value: Value) -> redis::RedisResult<Tried> {
    let (code, rest) = <(i64, Value)>::from_redis_value(value)?;
    Ok(match code {
        1 => Tried::Held { fence: String::from_redis_value(rest)?.parse().ok() },
        0 => {
            let ms = i64::from_redis_value(rest)?;
            // Without a lease: not of our making, but not ours to take either.
            Tried::Busy { remaining: u64::try_from(ms).ok().map(Duration::from_millis) }
        }
        _ => Tried::Upgrade,
    })
}

impl Hold {
    pub(crate) fn new(lock: Arc<Named>, id: Arc<str>, lease: Duration, in_line: bool, sent: Instant) -> Self {
        let hold = Self { lock, id, lease, in_line, born: sent, sure_until: AtomicU64::new(1), over: Notify::new() };
        hold.extend(sent);
        hold
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
        Instant::now() + sure_for(self.lease) >= self.sure_until() + after
    }

    /// Renews it once. `false` if it is known to be gone.
    pub(crate) async fn renew(&self, link: &Link) -> Result<bool, Failure> {
        let sent = Instant::now();
        let script = if self.in_line { Kind::keep() } else { self.lock.kind.renew() };
        let lease = self.lease.as_millis().to_string();
        let value = link.run(script, &self.lock.keys, &[&*self.id, &lease]).await?;
        let renewed = value == Value::Int(1);
        if renewed {
            self.extend(sent);
        }
        Ok(renewed)
    }
}

/// Clocks differ in speed: of a lease by Redis' clock so much is sure by ours.
pub(crate) fn sure_for(lease: Duration) -> Duration {
    lease.saturating_sub(lease / 100 + Duration::from_millis(2))
}

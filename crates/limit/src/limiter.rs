//! Limits that hold in one process, or over all nodes.
//!
//! With counters in Redis every node also counts by itself, for three reasons: what one node alone sees above a limit is refused without
//! asking Redis; if Redis does not answer, the node's own counts decide; and a node of an approximate limit
//! ([`Limiter::approximate`]) asks Redis only about some of the requests.

use std::fmt::{Display, Write as _};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::redis_counters::{Answer, KeyLimit, Kind, RedisCounters};
use crate::sliding_window::{Granted, Limit, SlidingWindow};

/// Limits below this are always exact.
const MIN_APPROXIMATE: u32 = 100;
/// The share of an approximate limit that a node may hold back: one in this many.
const HELD_SHARE: u32 = 20;
/// The most requests of a key that a node holds back.
const MAX_HELD: u32 = 1000;

/// Where requests are counted.
#[derive(Debug, Clone)]
pub enum Counters {
    /// In this process: each process has the whole limit.
    Local,
    /// In Redis: all nodes together have the limit.
    Redis(Arc<RedisCounters>),
}

/// A limit that holds in this process, or over all nodes.
#[derive(Debug)]
pub struct Limiter<K> {
    limit: Limit,
    /// Counts what this process sees.
    local: SlidingWindow<K>,
    shared: Option<Shared>,
}

/// The counters of one limit in Redis.
#[derive(Debug)]
struct Shared {
    counters: Arc<RedisCounters>,
    key_prefix: String,
    /// How many requests of a key are granted without asking Redis, before the next one asks and is counted together with them.
    hold_back: u32,
    fallbacks: AtomicU64,
}

impl<K: Eq + Hash + Clone + Display> Limiter<K> {
    /// A limit that is exact over all nodes: every request is counted in Redis before it is granted. The name distinguishes the limits in
    /// Redis. At most about `max_keys` keys are counted in this process per window.
    pub fn new(counters: &Counters, name: &str, limit: Limit, max_keys: usize) -> Self {
        match counters {
            Counters::Local => Self { limit, local: SlidingWindow::new(limit, max_keys), shared: None },
            Counters::Redis(counters) => {
                let key_prefix = counters.key_prefix(name);
                let shared =
                    Shared { counters: counters.clone(), key_prefix, hold_back: 0, fallbacks: AtomicU64::new(0) };
                Self { limit, local: SlidingWindow::aligned(limit, max_keys), shared: Some(shared) }
            }
        }
    }

    /// As [`new`](Self::new), for many requests of which most are far from the limit. If the limit is 100 or more, each node may hold back
    /// requests of a key up to a twentieth of the limit, and up to 1,000, before it counts them in Redis. So with several nodes a key may
    /// exceed its limit by that many requests per window and node, and requests of a key that is seldom seen do not wait for Redis.
    pub fn approximate(counters: &Counters, name: &str, limit: Limit, max_keys: usize) -> Self {
        let mut limiter = Self::new(counters, name, limit, max_keys);
        if let Some(shared) = limiter.shared.as_mut().filter(|_| limit.count >= MIN_APPROXIMATE) {
            shared.hold_back = (limit.count / HELD_SHARE).min(MAX_HELD);
        }
        limiter
    }

    /// Counts a request of `key`. If the key has reached its limit, returns the time after which another request may succeed. If Redis
    /// does not answer, the counts of this process decide.
    ///
    /// Not for limits that are undone (see [`check_all`]).
    pub async fn check(&self, key: K) -> Result<(), Duration> {
        self.count_local(key)?.count_shared().await
    }

    /// Counts a request in this process only, without waiting, as the first step of [`check`](Self::check).
    pub fn count_local(&self, key: K) -> Result<Counted<'_, K>, Duration> {
        let hold_back = self.shared.as_ref().map_or(u32::MAX, |shared| shared.hold_back);
        let send = match (self.local.try_count(key.clone(), hold_back)?, &self.shared) {
            (Granted::Send { earlier }, Some(shared)) => Some(SharedRequest { shared, earlier }),
            // What this process has no memory for is let through, so that the number of keys in Redis is bounded too.
            _ => None,
        };
        Ok(Counted { limiter: self, key, send })
    }

    /// How many requests were let through without being counted, because the memory of this process was full.
    pub fn let_through(&self) -> u64 {
        self.local.let_through()
    }

    /// How many requests the counts of this process decided, because Redis did not answer.
    pub fn fallbacks(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.fallbacks.load(Ordering::Relaxed))
    }

    fn key_limit(&self, shared: &Shared, key: &K, maximum: u32, earlier: u32) -> KeyLimit {
        let mut name = String::with_capacity(shared.key_prefix.len() + 24);
        name.push_str(&shared.key_prefix);
        // Writing to a string does not fail.
        let _ = write!(name, "{key}");
        KeyLimit { key: name, maximum, window: self.limit.window, earlier }
    }
}

/// A request that was counted in this process.
#[derive(Debug)]
#[must_use = "the request may have to be counted over all nodes"]
pub struct Counted<'a, K> {
    limiter: &'a Limiter<K>,
    key: K,
    /// `None` if Redis need not be asked.
    send: Option<SharedRequest<'a>>,
}

/// A request about which Redis must be asked. Its name in Redis is made only then, because the caller may refuse it before.
#[derive(Debug)]
struct SharedRequest<'a> {
    shared: &'a Shared,
    /// How many requests that were held back are counted together with it.
    earlier: u32,
}

impl<K: Eq + Hash + Clone + Display> Counted<'_, K> {
    /// Counts the request over all nodes. Does nothing if its limit holds in one process, or holds the request back.
    pub async fn count_shared(self) -> Result<(), Duration> {
        let Self { limiter, key, send } = self;
        let Some(SharedRequest { shared, earlier }) = send else { return Ok(()) };
        let here = limiter.key_limit(shared, &key, limiter.limit.count, earlier);
        let answer = shared.counters.check(Kind::Each, vec![here]).await;
        limiter.apply_answer(shared, &key, (0, earlier), answer)
    }

    /// Counts the request over all nodes against this limit and then against another one, in one call of Redis. A request that the other
    /// limit refuses stays counted here; one that this limit refuses is not counted there.
    pub async fn count_shared_with<L>(self, other: Counted<'_, L>) -> Result<(), Duration>
    where
        L: Eq + Hash + Clone + Display,
    {
        let (limiter, key) = (self.limiter, self.key);
        match (self.send, other.send) {
            (Some(send), Some(other_send)) => {
                let here = limiter.key_limit(send.shared, &key, limiter.limit.count, send.earlier);
                let there = other.limiter.key_limit(
                    other_send.shared,
                    &other.key,
                    other.limiter.limit.count,
                    other_send.earlier,
                );
                let answer = send.shared.counters.check(Kind::Each, vec![here, there]).await;
                let here = limiter.apply_answer(send.shared, &key, (0, send.earlier), answer);
                let there = other.limiter.apply_answer(other_send.shared, &other.key, (1, other_send.earlier), answer);
                here.and(there)
            }
            (send, None) => {
                let here = Self { limiter, key, send }.count_shared().await;
                if here.is_err() {
                    other.limiter.local.undo(&other.key);
                }
                here
            }
            (None, send) => Counted { send, ..other }.count_shared().await,
        }
    }
}

impl<K: Eq + Hash + Clone> Limiter<K> {
    /// Brings the counts of this process in line with the answer to a call, in which this limit has this place and had this many earlier
    /// requests.
    fn apply_answer(
        &self,
        shared: &Shared,
        key: &K,
        (own_place, earlier): (usize, u32),
        answer: Option<Answer>,
    ) -> Result<(), Duration> {
        if earlier > 0 {
            self.local.end_sending(key, earlier, answer.is_some());
        }
        match answer {
            Some(Answer::Granted) => Ok(()),
            Some(Answer::Refused { place, .. }) if place > own_place => Ok(()),
            Some(Answer::Refused { place, wait, counts }) if place == own_place => {
                // With the counts of all nodes, this process refuses the next requests of this key by itself.
                self.local.replace(key, counts);
                Err(wait)
            }
            // A limit before this one has refused the request.
            Some(Answer::Refused { .. }) => {
                self.local.undo(key);
                Ok(())
            }
            None => {
                shared.fallbacks.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

/// One of several limits that a request counts against.
#[derive(Debug)]
pub struct Check<'a, K> {
    pub limiter: &'a Limiter<K>,
    pub key: K,
    /// The maximum count of this key, which may be a share of the limit's.
    pub maximum: u32,
}

/// A limit has refused a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Which one, in the order of the checks.
    pub place: usize,
    /// The time after which another request may succeed.
    pub wait: Duration,
}

/// Counts a request against every limit, or against none. The limits have the same [`Counters`].
///
/// Redis is asked first, because it alone has seen what other nodes have undone. If it does not answer, the counts of this process decide.
pub async fn check_all<K: Eq + Hash + Clone + Display>(checks: &[Check<'_, K>]) -> Result<(), Refused> {
    if let Some((counters, keys)) = shared_keys(checks) {
        match counters.check(Kind::All, keys).await {
            Some(Answer::Granted) => {
                checks.iter().for_each(|check| check.limiter.local.count(check.key.clone()));
                return Ok(());
            }
            Some(Answer::Refused { place, wait, .. }) => return Err(Refused { place, wait }),
            None => {
                for shared in checks.iter().filter_map(|check| check.limiter.shared.as_ref()) {
                    shared.fallbacks.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
    for (place, check) in checks.iter().enumerate() {
        if let Err(wait) = check.limiter.local.check_up_to(check.key.clone(), check.maximum) {
            checks[..place].iter().for_each(|check| check.limiter.local.undo(&check.key));
            return Err(Refused { place, wait });
        }
    }
    Ok(())
}

/// Reverts a request that [`check_all`] has counted. Does not wait for Redis: if it does not answer, the request stays counted there.
pub fn undo_all<K: Eq + Hash + Clone + Display>(checks: &[Check<'_, K>]) {
    checks.iter().for_each(|check| check.limiter.local.undo(&check.key));
    if let Some((counters, keys)) = shared_keys(checks) {
        counters.undo(keys);
    }
}

fn shared_keys<'a, K>(checks: &[Check<'a, K>]) -> Option<(&'a RedisCounters, Vec<KeyLimit>)>
where
    K: Eq + Hash + Clone + Display,
{
    let counters = &checks.first()?.limiter.shared.as_ref()?.counters;
    let key = |check: &Check<'a, K>| {
        let shared = check.limiter.shared.as_ref()?;
        Some(check.limiter.key_limit(shared, &check.key, check.maximum, 0))
    };
    Some((counters, checks.iter().map(key).collect::<Option<_>>()?))
}

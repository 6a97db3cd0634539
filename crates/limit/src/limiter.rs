//! Limits that hold in one process, or over all nodes.
//!
//! With counters in Redis every node also counts by itself, for two reasons: what one node alone sees above a limit is refused without
//! asking Redis, and if Redis does not answer, the node's own counts decide.

use std::fmt::{Display, Write as _};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::redis_counters::{Answer, KeyLimit, Kind, RedisCounters};
use crate::sliding_window::{Limit, SlidingWindow};

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
    fallbacks: AtomicU64,
}

impl<K: Eq + Hash + Clone + Display> Limiter<K> {
    /// The name distinguishes the limits in Redis. At most about `max_keys` keys are counted in this process per window.
    pub fn new(counters: &Counters, name: &str, limit: Limit, max_keys: usize) -> Self {
        match counters {
            Counters::Local => Self { limit, local: SlidingWindow::new(limit, max_keys), shared: None },
            Counters::Redis(counters) => {
                let key_prefix = counters.key_prefix(name);
                let shared = Shared { counters: counters.clone(), key_prefix, fallbacks: AtomicU64::new(0) };
                Self { limit, local: SlidingWindow::aligned(limit, max_keys), shared: Some(shared) }
            }
        }
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
        let is_counted = self.local.try_count(key.clone())?;
        // What this process has no memory for is let through, so that the number of keys in Redis is bounded too.
        let shared = self.shared.as_ref().filter(|_| is_counted);
        Ok(Counted { limiter: self, key, shared })
    }

    /// How many requests were let through without being counted, because the memory of this process was full.
    pub fn let_through(&self) -> u64 {
        self.local.let_through()
    }

    /// How many requests the counts of this process decided, because Redis did not answer.
    pub fn fallbacks(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.fallbacks.load(Ordering::Relaxed))
    }

    fn key_limit(&self, shared: &Shared, key: &K, maximum: u32) -> KeyLimit {
        let mut name = String::with_capacity(shared.key_prefix.len() + 24);
        name.push_str(&shared.key_prefix);
        // Writing to a string does not fail.
        let _ = write!(name, "{key}");
        KeyLimit { key: name, maximum, window: self.limit.window }
    }
}

/// A request that was counted in this process and not in Redis yet.
#[derive(Debug)]
#[must_use = "the request is not counted over all nodes yet"]
pub struct Counted<'a, K> {
    limiter: &'a Limiter<K>,
    key: K,
    shared: Option<&'a Shared>,
}

impl<K: Eq + Hash + Clone + Display> Counted<'_, K> {
    /// Counts the request over all nodes. Does nothing if its limit holds in one process.
    pub async fn count_shared(self) -> Result<(), Duration> {
        let Some(shared) = self.shared else { return Ok(()) };
        let answer = shared.counters.check(Kind::Each, vec![self.key_limit(shared)]).await;
        self.apply_answer(shared, 0, answer)
    }

    /// Counts the request over all nodes against this limit and then against another one, in one call of Redis. A request that the other
    /// limit refuses stays counted here.
    pub async fn count_shared_with<L>(self, other: Counted<'_, L>) -> Result<(), Duration>
    where
        L: Eq + Hash + Clone + Display,
    {
        let (Some(shared), Some(other_shared)) = (self.shared, other.shared) else {
            self.count_shared().await?;
            return other.count_shared().await;
        };
        let keys = vec![self.key_limit(shared), other.key_limit(other_shared)];
        let answer = shared.counters.check(Kind::Each, keys).await;
        let here = self.apply_answer(shared, 0, answer);
        let there = other.apply_answer(other_shared, 1, answer);
        here.and(there)
    }

    fn key_limit(&self, shared: &Shared) -> KeyLimit {
        self.limiter.key_limit(shared, &self.key, self.limiter.limit.count)
    }

    /// Brings the counts of this process in line with the answer, in which this limit has this place.
    fn apply_answer(self, shared: &Shared, own_place: usize, answer: Option<Answer>) -> Result<(), Duration> {
        match answer {
            Some(Answer::Granted) => Ok(()),
            Some(Answer::Refused { place, .. }) if place > own_place => Ok(()),
            Some(Answer::Refused { place, wait, counts }) if place == own_place => {
                // With the counts of all nodes, this process refuses the next requests of this key by itself.
                self.limiter.local.replace(&self.key, counts);
                Err(wait)
            }
            // A limit before this one has refused the request.
            Some(Answer::Refused { .. }) => {
                self.limiter.local.undo(&self.key);
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
        Some(check.limiter.key_limit(shared, &check.key, check.maximum))
    };
    Some((counters, checks.iter().map(key).collect::<Option<_>>()?))
}

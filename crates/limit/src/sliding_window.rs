//! A sliding-window counter, inside one process.
//!
//! Time is divided into windows. For each key, the count of the current window and that of the previous one are kept; the current count
//! plus the part of the previous count that still lies within one window length counts against the limit. Two maps hold all counts: when a
//! window ends, the older map is cleared as a whole, so that keys need no individual expiry.
//!
//! Memory is bounded: a map holds at most `max_keys`. When it is full, requests of keys that are not in it are let through without being
//! counted ([`SlidingWindow::let_through`]): a rate limiter without memory must not block every new client.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

const SHARDS: usize = 16;

/// About `count` requests per `window`. The count of the previous window is assumed to be spread evenly, so after a burst a request may
/// be refused although fewer than `count` lie within the last window; more than `count` are never granted within one aligned window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    pub count: u32,
    pub window: Duration,
}

struct Shard<K> {
    /// The window that `current` counts, in windows since the start.
    window: u64,
    current: HashMap<K, u32>,
    previous: HashMap<K, u32>,
}

/// A rate limiter that counts requests per key.
pub struct SlidingWindow<K> {
    limit: Limit,
    max_keys_per_shard: usize,
    start: Instant,
    hasher: RandomState,
    shards: [Mutex<Shard<K>>; SHARDS],
    let_through: AtomicU64,
}

impl<K: Eq + Hash> SlidingWindow<K> {
    /// A limiter that counts at most about `max_keys` keys per window.
    pub fn new(limit: Limit, max_keys: usize) -> Self {
        let empty = || Shard { window: 0, current: HashMap::new(), previous: HashMap::new() };
        Self {
            limit,
            max_keys_per_shard: max_keys.div_ceil(SHARDS),
            start: Instant::now(),
            hasher: RandomState::new(),
            shards: std::array::from_fn(|_| Mutex::new(empty())),
            let_through: AtomicU64::new(0),
        }
    }

    /// Counts a request of `key`. If the key has reached its limit, returns the time after which another request may succeed.
    pub fn check(&self, key: K) -> Result<(), Duration> {
        self.check_up_to(key, self.limit.count)
    }

    /// As [`check`](Self::check), with a different maximum count for this key, such as a share of the whole.
    pub fn check_up_to(&self, key: K, count: u32) -> Result<(), Duration> {
        self.check_at(key, count, Instant::now())
    }

    /// Reverts one counted request of `key`, for an operation that was not carried out or must not count.
    pub fn undo(&self, key: &K) {
        self.undo_at(key, Instant::now());
    }

    /// Returns what [`check`](Self::check) would return, without counting.
    pub fn peek(&self, key: K) -> Result<(), Duration> {
        self.decide(key, self.limit.count, Instant::now(), false)
    }

    /// How many requests were let through without being counted, because the memory was full.
    pub fn let_through(&self) -> u64 {
        self.let_through.load(Ordering::Relaxed)
    }

    /// The window at `now`, and the elapsed fraction of it, from 0 to 1.
    fn window_at(&self, now: Instant) -> (u64, f64) {
        let elapsed = now.saturating_duration_since(self.start).as_secs_f64() / self.limit.window.as_secs_f64();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number of windows, never negative"
        )]
        let window = elapsed.trunc() as u64;
        (window, elapsed.fract())
    }

    /// The shard of a key, advanced to this window.
    fn shard(&self, key: &K, window: u64) -> MutexGuard<'_, Shard<K>> {
        let index = usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0);
        let mut shard = self.shards[index].lock();
        shard.advance_to(window);
        shard
    }

    fn check_at(&self, key: K, allowed: u32, now: Instant) -> Result<(), Duration> {
        self.decide(key, allowed, now, true)
    }

    fn decide(&self, key: K, allowed: u32, now: Instant, count: bool) -> Result<(), Duration> {
        let (window, elapsed) = self.window_at(now);
        let mut shard = self.shard(&key, window);
        let shard = &mut *shard;
        let previous = f64::from(shard.previous.get(&key).copied().unwrap_or(0));
        let keys = shard.current.len();
        let current = shard.current.entry(key);
        let counted = f64::from(if let Entry::Occupied(count) = &current { *count.get() } else { 0 });
        let allowed = f64::from(allowed);
        if counted + previous * (1.0 - elapsed) + 1.0 > allowed {
            // Wait until enough of the previous window has passed. If the current window alone is full, wait for the next one, and
            // there until enough of what is current now has passed.
            let wait = if counted + 1.0 <= allowed && previous > 0.0 {
                1.0 - (allowed - counted - 1.0) / previous - elapsed
            } else if counted > 0.0 && allowed >= 1.0 {
                1.0 - elapsed + 1.0 - (allowed - 1.0) / counted
            } else {
                1.0 - elapsed
            };
            return Err(Duration::from_secs_f64((wait * self.limit.window.as_secs_f64()).max(0.001)));
        }
        if !count {
            return Ok(());
        }
        if keys >= self.max_keys_per_shard && matches!(current, Entry::Vacant(_)) {
            self.let_through.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        *current.or_insert(0) += 1;
        Ok(())
    }

    fn undo_at(&self, key: &K, now: Instant) {
        let (window, _) = self.window_at(now);
        let mut shard = self.shard(key, window);
        let shard = &mut *shard;
        // The request may have been counted in the previous window.
        for counts in [&mut shard.current, &mut shard.previous] {
            if let Some(count) = counts.get_mut(key).filter(|count| **count > 0) {
                *count -= 1;
                return;
            }
        }
    }
}

impl<K: Eq + Hash> Shard<K> {
    fn advance_to(&mut self, window: u64) {
        if window <= self.window {
            return;
        }
        if window == self.window + 1 {
            std::mem::swap(&mut self.current, &mut self.previous);
        } else {
            self.previous = HashMap::new();
        }
        // The capacity is kept for the next window, but not more than the previous window needed.
        self.current.clear();
        self.current.shrink_to(self.previous.len());
        self.window = window;
    }
}

impl<K> fmt::Debug for SlidingWindow<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlidingWindow").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limit(count: u32, window_ms: u64) -> Limit {
        Limit { count, window: Duration::from_millis(window_ms) }
    }

    /// A client that waits as told succeeds, wherever in the window the limit was reached.
    #[test]
    fn request_succeeds_after_the_returned_wait() {
        for count in [1, 2, 3, 20] {
            for first_ms in [0, 1, 500, 999] {
                let limits = SlidingWindow::new(limit(count, 1000), 100);
                let at = |ms: u64| limits.start + Duration::from_millis(ms);
                for _ in 0..count {
                    limits.check_at("a", count, at(first_ms)).unwrap();
                }
                let refused = at(first_ms);
                let wait = limits.check_at("a", count, refused).unwrap_err();
                assert!(
                    limits.check_at("a", count, refused + wait.mul_f64(0.99)).is_err(),
                    "{count} {first_ms} {wait:?}"
                );
                assert_eq!(
                    limits.check_at("a", count, refused + wait + Duration::from_micros(10)),
                    Ok(()),
                    "{count} {first_ms}"
                );
            }
        }
    }

    #[test]
    fn keys_are_counted_separately() {
        let limits = SlidingWindow::new(limit(3, 60_000), 100);
        for _ in 0..3 {
            limits.check("a").unwrap();
        }
        let wait = limits.check("a").unwrap_err();
        assert!(wait > Duration::ZERO && wait <= Duration::from_secs(120));
        limits.check("b").unwrap();
    }

    #[test]
    fn peek_counts_nothing() {
        let limits = SlidingWindow::new(limit(1, 60_000), 100);
        for _ in 0..3 {
            limits.peek("a").unwrap();
        }
        limits.check("a").unwrap();
        assert!(limits.peek("a").is_err());
        limits.peek("b").unwrap();
    }

    #[test]
    fn check_up_to_applies_its_own_maximum() {
        let limits = SlidingWindow::new(limit(4, 60_000), 100);
        limits.check_up_to("share", 2).unwrap();
        limits.check_up_to("share", 2).unwrap();
        limits.check_up_to("share", 2).unwrap_err();
        limits.check("share").unwrap();
    }

    #[test]
    fn undo_frees_a_request() {
        let limits = SlidingWindow::new(limit(2, 1000), 100);
        let at = |ms| limits.start + Duration::from_millis(ms);
        limits.undo(&"a"); // never counted, so nothing to revert
        for ms in [0, 10] {
            limits.check_at("a", 2, at(ms)).unwrap();
        }
        limits.check_at("a", 2, at(20)).unwrap_err();
        limits.undo_at(&"a", at(30));
        limits.check_at("a", 2, at(40)).unwrap();
        // A request counted in the previous window can be reverted, too.
        limits.check_at("a", 2, at(1010)).unwrap_err();
        limits.undo_at(&"a", at(1020));
        limits.check_at("a", 2, at(1030)).unwrap();
    }

    #[test]
    fn requests_of_new_keys_are_let_through_when_the_memory_is_full() {
        let limits = SlidingWindow::new(limit(1, 60_000), 16);
        for key in 0..10_000 {
            limits.check(key).unwrap();
        }
        assert!(limits.let_through() >= 10_000 - 32);
        let held: usize = limits.shards.iter().map(|shard| shard.lock().current.len()).sum();
        assert!(held <= 16);
    }

    proptest! {
        /// At most the limit passes in an aligned window, and at most twice the limit in any interval of that length.
        #[test]
        fn at_most_twice_the_limit_passes_in_any_interval(count in 1..20u32, gaps in proptest::collection::vec(0..400u64, 1..300)) {
            let limits = SlidingWindow::new(limit(count, 1000), 10);
            let (mut at_ms, mut passed) = (0, Vec::new());
            for gap in gaps {
                at_ms += gap;
                if limits.check_at((), count, limits.start + Duration::from_millis(at_ms)).is_ok() {
                    passed.push(at_ms);
                }
            }
            for (i, &from) in passed.iter().enumerate() {
                let interval = passed[i..].iter().take_while(|&&t| t < from + 1000).count();
                prop_assert!(interval <= 2 * count as usize);
                let window = passed.iter().filter(|&&t| t / 1000 == from / 1000).count();
                prop_assert!(window <= count as usize);
            }
        }
    }
}

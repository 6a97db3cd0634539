//! A sliding window that counts, inside one process.
//!
//! Time is cut into windows. For each key we count the present window and remember the one before; what counts against the
//! limit is the present count plus the part of the previous one that still lies inside the last window's length. Two maps
//! hold it all: at the turn of a window the older one is emptied whole, so no key ever needs to expire by itself.
//!
//! Bounded: a map holds at most `max_keys`. When it is full, keys that are not in it yet are let through and counted
//! ([`SlidingWindow::let_through`]): a limiter out of memory must not close the shop.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const SHARDS: usize = 16;

/// At most `count` within any `window`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    pub count: u32,
    pub window: Duration,
}

struct Shard<K> {
    /// Which window `present` counts, in windows since the start.
    window: u64,
    present: HashMap<K, u32>,
    previous: HashMap<K, u32>,
}

/// Counts per key and says when it is enough.
pub struct SlidingWindow<K> {
    limit: Limit,
    max_keys_per_shard: usize,
    start: Instant,
    hasher: RandomState,
    shards: [Mutex<Shard<K>>; SHARDS],
    let_through: AtomicU64,
}

impl<K: Eq + Hash> SlidingWindow<K> {
    pub fn new(limit: Limit, max_keys: usize) -> Self {
        let empty = || Shard { window: 0, present: HashMap::new(), previous: HashMap::new() };
        Self {
            limit,
            max_keys_per_shard: max_keys.div_ceil(SHARDS),
            start: Instant::now(),
            hasher: RandomState::new(),
            shards: std::array::from_fn(|_| Mutex::new(empty())),
            let_through: AtomicU64::new(0),
        }
    }

    /// Counts one for `key`, unless it has had enough: then the time to wait before it is worth asking again.
    pub fn check(&self, key: K) -> Result<(), Duration> {
        self.check_up_to(key, self.limit.count)
    }

    /// The same with a count of its own for this key, such as a share of the whole.
    pub fn check_up_to(&self, key: K, count: u32) -> Result<(), Duration> {
        self.check_at(key, count, Instant::now())
    }

    /// Takes one back that was counted for `key`: what it was counted for did not happen, or does not count after all.
    pub fn undo(&self, key: &K) {
        self.undo_at(key, Instant::now());
    }

    /// Says what [`check`](Self::check) would say, and counts nothing.
    pub fn peek(&self, key: K) -> Result<(), Duration> {
        self.decide(key, self.limit.count, Instant::now(), false)
    }

    /// How many were let through uncounted, because the memory was full.
    pub fn let_through(&self) -> u64 {
        self.let_through.load(Ordering::Relaxed)
    }

    /// Which window it is now, and how much of it has passed, from 0 to 1.
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

    /// The shard of a key, turned to this window.
    fn shard(&self, key: &K, window: u64) -> MutexGuard<'_, Shard<K>> {
        let place = usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0);
        let mut shard = self.shards[place].lock().unwrap_or_else(PoisonError::into_inner);
        shard.turn_to(window);
        shard
    }

    fn check_at(&self, key: K, allowed: u32, now: Instant) -> Result<(), Duration> {
        self.decide(key, allowed, now, true)
    }

    fn decide(&self, key: K, allowed: u32, now: Instant, count: bool) -> Result<(), Duration> {
        let (window, into) = self.window_at(now);
        let mut shard = self.shard(&key, window);
        let shard = &mut *shard;
        let before = f64::from(shard.previous.get(&key).copied().unwrap_or(0));
        let held = shard.present.len();
        let present = shard.present.entry(key);
        let counted = f64::from(if let Entry::Occupied(count) = &present { *count.get() } else { 0 });
        let allowed = f64::from(allowed);
        if counted + before * (1.0 - into) + 1.0 > allowed {
            // Either the previous window slides out far enough, or we wait for the next one.
            let until = if counted + 1.0 <= allowed && before > 0.0 {
                1.0 - (allowed - counted - 1.0) / before - into
            } else {
                1.0 - into
            };
            return Err(Duration::from_secs_f64((until * self.limit.window.as_secs_f64()).max(0.001)));
        }
        if !count {
            return Ok(());
        }
        if held >= self.max_keys_per_shard && matches!(present, Entry::Vacant(_)) {
            self.let_through.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        *present.or_insert(0) += 1;
        Ok(())
    }

    fn undo_at(&self, key: &K, now: Instant) {
        let (window, _) = self.window_at(now);
        let mut shard = self.shard(key, window);
        let shard = &mut *shard;
        // The window may have turned since it was counted.
        for counts in [&mut shard.present, &mut shard.previous] {
            if let Some(count) = counts.get_mut(key).filter(|count| **count > 0) {
                *count -= 1;
                return;
            }
        }
    }
}

impl<K: Eq + Hash> Shard<K> {
    fn turn_to(&mut self, window: u64) {
        if window <= self.window {
            return;
        }
        if window == self.window + 1 {
            std::mem::swap(&mut self.present, &mut self.previous);
        } else {
            self.previous = HashMap::new();
        }
        // Its room is kept for the next crowd, but not more of it than the last one needed.
        self.present.clear();
        self.present.shrink_to(self.previous.len());
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

    #[test]
    fn counts_each_key_alone() {
        let limits = SlidingWindow::new(limit(3, 60_000), 100);
        for _ in 0..3 {
            limits.check("a").unwrap();
        }
        let wait = limits.check("a").unwrap_err();
        assert!(wait > Duration::ZERO && wait <= Duration::from_secs(60));
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
    fn waiting_as_told_is_enough() {
        let limits = SlidingWindow::new(limit(5, 1000), 100);
        let mut now = limits.start;
        let mut passed = 0;
        for _ in 0..200 {
            match limits.check_at("a", 5, now) {
                Ok(()) => passed += 1,
                Err(wait) => now += wait + Duration::from_millis(1),
            }
        }
        let windows = now.duration_since(limits.start).as_secs_f64();
        assert!(passed > 50, "{passed} passed in {windows} windows");
    }

    #[test]
    fn a_share_is_counted_by_its_own_bound() {
        let limits = SlidingWindow::new(limit(4, 60_000), 100);
        limits.check_up_to("share", 2).unwrap();
        limits.check_up_to("share", 2).unwrap();
        limits.check_up_to("share", 2).unwrap_err();
        limits.check("share").unwrap();
    }

    #[test]
    fn what_is_taken_back_can_be_had_again() {
        let limits = SlidingWindow::new(limit(2, 1000), 100);
        let at = |ms| limits.start + Duration::from_millis(ms);
        limits.undo(&"a"); // never counted: nothing to take back
        for ms in [0, 10] {
            limits.check_at("a", 2, at(ms)).unwrap();
        }
        limits.check_at("a", 2, at(20)).unwrap_err();
        limits.undo_at(&"a", at(30));
        limits.check_at("a", 2, at(40)).unwrap();
        // In the next window, too, what was counted in this one can be taken back.
        limits.check_at("a", 2, at(1010)).unwrap_err();
        limits.undo_at(&"a", at(1020));
        limits.check_at("a", 2, at(1030)).unwrap();
    }

    #[test]
    fn a_full_memory_lets_through_and_counts_it() {
        let limits = SlidingWindow::new(limit(1, 60_000), 16);
        for key in 0..10_000 {
            limits.check(key).unwrap();
        }
        assert!(limits.let_through() >= 10_000 - 32);
        let held: usize = limits.shards.iter().map(|shard| shard.lock().unwrap().present.len()).sum();
        assert!(held <= 16);
    }

    proptest! {
        /// In no stretch of one window's length do more than twice the limit pass, in no whole window more than the limit.
        #[test]
        fn never_far_above_the_limit(count in 1..20u32, gaps in proptest::collection::vec(0..400u64, 1..300)) {
            let limits = SlidingWindow::new(limit(count, 1000), 10);
            let (mut at_ms, mut passed) = (0, Vec::new());
            for gap in gaps {
                at_ms += gap;
                if limits.check_at((), count, limits.start + Duration::from_millis(at_ms)).is_ok() {
                    passed.push(at_ms);
                }
            }
            for (i, &from) in passed.iter().enumerate() {
                let stretch = passed[i..].iter().take_while(|&&t| t < from + 1000).count();
                prop_assert!(stretch <= 2 * count as usize);
                let window = passed.iter().filter(|&&t| t / 1000 == from / 1000).count();
                prop_assert!(window <= count as usize);
            }
        }
    }
}

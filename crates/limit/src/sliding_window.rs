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
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};

const SHARDS: usize = 16;

/// About `count` requests per `window`. The count of the previous window is assumed to be spread evenly, so after a burst a request may
/// be refused although fewer than `count` lie within the last window; more than `count` are never granted within one aligned window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    pub count: u32,
    pub window: Duration,
}

/// The counts of one key, with windows since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The window that `current` counts.
    pub(crate) window: u64,
    pub(crate) current: u32,
    pub(crate) previous: u32,
}

/// The requests of one key in one window.
#[derive(Clone, Copy, Default)]
struct Count {
    all: u32,
    /// How many of them Redis has not counted yet.
    held: u32,
    /// How many of those are in a call that Redis has not answered.
    sending: u32,
}

/// What became of a request that is within the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Granted {
    /// Not counted, because the memory was full.
    LetThrough,
    /// Counted. It need not be sent to Redis yet.
    Held,
    /// Counted. Redis must be asked, and gets this many earlier requests too, which were held back.
    Send { earlier: u32 },
}

struct Shard<K> {
    /// The window that `current` counts.
    window: u64,
    current: HashMap<K, Count>,
    previous: HashMap<K, Count>,
}

/// What windows are measured by.
enum Clock {
    /// The time since this limiter was created.
    Monotonic(Instant),
    /// The time since 1970. It may be set back.
    System,
}

impl Clock {
    fn now(&self) -> Duration {
        match self {
            Self::Monotonic(start) => start.elapsed(),
            Self::System => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
        }
    }
}

/// A rate limiter that counts requests per key.
pub struct SlidingWindow<K> {
    limit: Limit,
    max_keys_per_shard: usize,
    clock: Clock,
    hasher: RandomState,
    shards: [Mutex<Shard<K>>; SHARDS],
    let_through: AtomicU64,
}

impl<K: Eq + Hash> SlidingWindow<K> {
    /// A limiter that counts at most about `max_keys` keys per window.
    pub fn new(limit: Limit, max_keys: usize) -> Self {
        Self::with_clock(limit, max_keys, Clock::Monotonic(Instant::now()))
    }

    /// As [`new`](Self::new), with the windows that Redis has: they begin at multiples of their length since 1970.
    pub(crate) fn aligned(limit: Limit, max_keys: usize) -> Self {
        Self::with_clock(limit, max_keys, Clock::System)
    }

    fn with_clock(limit: Limit, max_keys: usize, clock: Clock) -> Self {
        let empty = || Shard { window: 0, current: HashMap::new(), previous: HashMap::new() };
        Self {
            limit,
            max_keys_per_shard: max_keys.div_ceil(SHARDS),
            clock,
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
        self.check_at(key, count, self.clock.now())
    }

    /// As [`check`](Self::check), for a limit of which Redis has counters too: up to `hold_back` requests of a key are not sent to it.
    pub(crate) fn try_count(&self, key: K, hold_back: u32) -> Result<Granted, Duration> {
        self.decide(key, self.limit.count, self.clock.now(), Some(hold_back))
    }

    /// Counts a request of `key` without a limit, as far as there is memory.
    pub(crate) fn count(&self, key: K) {
        let (window, _) = self.window_at(self.clock.now());
        let mut shard = self.shard(&key, window);
        let shard = &mut *shard;
        if let Some(count) = entry(&mut shard.current, key, self.max_keys_per_shard) {
            count.all = count.all.saturating_add(1);
        }
    }

    /// Reverts one counted request of `key`, and then raises its counts to `counts` if they are of the current window.
    pub(crate) fn replace(&self, key: &K, counts: Counts)
    where
        K: Clone,
    {
        let (window, _) = self.window_at(self.clock.now());
        let mut shard = self.shard(key, window);
        let shard = &mut *shard;
        shard.undo(key);
        if shard.window != counts.window {
            return;
        }
        for (map, counted) in [(&mut shard.current, counts.current), (&mut shard.previous, counts.previous)] {
            if counted > 0
                && let Some(count) = entry(map, key.clone(), self.max_keys_per_shard)
            {
                count.all = counted.max(count.all);
            }
        }
    }

    /// Ends a call that had this many earlier requests of `key`. If Redis has not counted them, they are sent again.
    pub(crate) fn end_sending(&self, key: &K, earlier: u32, counted: bool) {
        let (window, _) = self.window_at(self.clock.now());
        let mut shard = self.shard(key, window);
        // The requests may be of the previous window, in which nothing is held back any more.
        if let Some(count) = shard.current.get_mut(key) {
            count.sending = count.sending.saturating_sub(earlier);
            if counted {
                count.held = count.held.saturating_sub(earlier);
            }
        }
    }

    /// Reverts one counted request of `key`, for an operation that was not carried out or must not count.
    pub fn undo(&self, key: &K) {
        self.undo_at(key, self.clock.now());
    }

    /// Returns what [`check`](Self::check) would return, without counting.
    pub fn peek(&self, key: K) -> Result<(), Duration> {
        self.decide(key, self.limit.count, self.clock.now(), None).map(drop)
    }

    /// How many requests were let through without being counted, because the memory was full.
    pub fn let_through(&self) -> u64 {
        self.let_through.load(Ordering::Relaxed)
    }

    /// The window at `now`, and the elapsed fraction of it, from 0 to 1.
    fn window_at(&self, now: Duration) -> (u64, f64) {
        let elapsed = now.as_secs_f64() / self.limit.window.as_secs_f64();
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
        if matches!(self.clock, Clock::System) && window + 1 < shard.window {
            // The clock was set back: otherwise the counts of a window in the future would stay until then.
            *shard = Shard { window, current: HashMap::new(), previous: HashMap::new() };
        }
        shard.advance_to(window);
        shard
    }

    fn check_at(&self, key: K, allowed: u32, now: Duration) -> Result<(), Duration> {
        self.decide(key, allowed, now, Some(u32::MAX)).map(drop)
    }

    /// Counts the request if `hold_back` is given.
    fn decide(&self, key: K, allowed: u32, now: Duration, hold_back: Option<u32>) -> Result<Granted, Duration> {
        let (window, elapsed) = self.window_at(now);
        let mut shard = self.shard(&key, window);
        let shard = &mut *shard;
        let previous = shard.previous.get(&key).map_or(0, |count| count.all);
        let keys = shard.current.len();
        let current = shard.current.entry(key);
        let counted = if let Entry::Occupied(count) = &current { count.get().all } else { 0 };
        if let Some(windows) = windows_to_wait(counted, previous, elapsed, allowed) {
            return Err(Duration::from_secs_f64((windows * self.limit.window.as_secs_f64()).max(0.001)));
        }
        let Some(hold_back) = hold_back else { return Ok(Granted::LetThrough) };
        if keys >= self.max_keys_per_shard && matches!(current, Entry::Vacant(_)) {
            self.let_through.fetch_add(1, Ordering::Relaxed);
            return Ok(Granted::LetThrough);
        }
        let count = current.or_default();
        count.all += 1;
        if count.held < hold_back {
            count.held += 1;
            return Ok(Granted::Held);
        }
        // Until Redis has answered, further requests ask it as well: otherwise any number could be granted while a call is under way.
        let earlier = count.held - count.sending;
        count.sending = count.held;
        Ok(Granted::Send { earlier })
    }

    fn undo_at(&self, key: &K, now: Duration) {
        let (window, _) = self.window_at(now);
        self.shard(key, window).undo(key);
    }
}

/// `None` if one more request is within the limit; otherwise how long to wait until it is, in windows. `lua/check.lua` has the same
/// arithmetic.
pub(crate) fn windows_to_wait(current: u32, previous: u32, elapsed: f64, allowed: u32) -> Option<f64> {
    let (current, previous, allowed) = (f64::from(current), f64::from(previous), f64::from(allowed));
    if current + previous * (1.0 - elapsed) + 1.0 <= allowed {
        return None;
    }
    // Wait until enough of the previous window has passed. If the current window alone is full, wait for the next one, and there until
    // enough of what is current now has passed.
    Some(if current + 1.0 <= allowed && previous > 0.0 {
        1.0 - (allowed - current - 1.0) / previous - elapsed
    } else if current > 0.0 && allowed >= 1.0 {
        1.0 - elapsed + 1.0 - (allowed - 1.0) / current
    } else {
        1.0 - elapsed
    })
}

/// The count of a key; `None` if the map is full and does not have it.
fn entry<K: Eq + Hash>(counts: &mut HashMap<K, Count>, key: K, max_keys: usize) -> Option<&mut Count> {
    let is_full = counts.len() >= max_keys;
    match counts.entry(key) {
        Entry::Occupied(count) => Some(count.into_mut()),
        Entry::Vacant(_) if is_full => None,
        Entry::Vacant(vacant) => Some(vacant.insert(Count::default())),
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

    fn undo(&mut self, key: &K) {
        // The request may have been counted in the previous window.
        for counts in [&mut self.current, &mut self.previous] {
            if let Some(count) = counts.get_mut(key).filter(|count| count.all > 0) {
                count.all -= 1;
                count.held = count.held.min(count.all);
                count.sending = count.sending.min(count.held);
                return;
            }
        }
    }
}

impl<K> fmt::Debug for SlidingWindow<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlidingWindow").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

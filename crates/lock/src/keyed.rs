//! An asynchronous mutex per key.
//!
//! An entry exists only while somebody holds or waits for its key: ten million distinct keys, one after another, leave
//! nothing behind. Waiters are served first come, first served. A waiter that goes away (its future is dropped) leaves the
//! line; if the lock was handed to it in that very moment, the lock goes on to the next.

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Enough that tasks on different keys seldom meet on the same map.
const SHARDS: usize = 64;

/// The line of those who wait for one key. While the entry exists, somebody holds the key.
type Line<K> = VecDeque<oneshot::Sender<Guard<K>>>;

struct Shards<K: Eq + Hash> {
    hasher: RandomState,
    shards: [Mutex<HashMap<K, Line<K>>>; SHARDS],
}

/// A mutex for each key, made when needed and gone when unused.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use stampede_lock::Keyed;
///
/// let locks = Keyed::new();
/// let guard = locks.lock("alice").await;
/// assert!(locks.try_lock("alice").is_none(), "held");
/// assert!(locks.try_lock("bob").is_some(), "another key is another lock");
/// drop(guard);
/// assert!(locks.try_lock("alice").is_some());
/// assert!(locks.is_empty());
/// # }
/// ```
pub struct Keyed<K: Eq + Hash> {
    inner: Arc<Shards<K>>,
}

/// Holds the lock of its key until it is dropped.
pub struct Guard<K: Eq + Hash> {
    inner: Arc<Shards<K>>,
    /// `None` once the lock has been handed on.
    key: Option<K>,
}

impl<K: Eq + Hash> Shards<K> {
    fn shard(&self, key: &K) -> MutexGuard<'_, HashMap<K, Line<K>>> {
        let hash = usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0);
        // Nothing that can panic runs under this lock but the key's own code; the map itself stays whole.
        self.shards[hash].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash + Clone> Keyed<K> {
    /// No key is held.
    pub fn new() -> Self {
        let shards = std::array::from_fn(|_| Mutex::new(HashMap::new()));
        Self { inner: Arc::new(Shards { hasher: RandomState::new(), shards }) }
    }

    /// Waits for the key's lock. Cancel-safe: dropping the future leaves the line.
    pub async fn lock(&self, key: K) -> Guard<K> {
        let turn = match self.inner.shard(&key).entry(key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(Line::new());
                None
            }
            Entry::Occupied(mut entry) => {
                let line = entry.get_mut();
                // Those who went away are swept out as the line doubles, so that it stays as long as its living waiters.
                if line.len() == line.capacity() {
                    line.retain(|waiter| !waiter.is_closed());
                }
                let (waiter, turn) = oneshot::channel();
                line.push_back(waiter);
                Some(turn)
            }
        };
        match turn {
            None => self.guard(key),
            // A line is only ever dropped empty, and only those who went away are swept out of it.
            Some(turn) => match turn.await {
                Ok(guard) => guard,
                Err(_) => unreachable!("a line ended with a waiter in it"),
            },
        }
    }

    /// Takes the key's lock if nobody has it.
    pub fn try_lock(&self, key: K) -> Option<Guard<K>> {
        match self.inner.shard(&key).entry(key.clone()) {
            Entry::Vacant(entry) => entry.insert(Line::new()),
            Entry::Occupied(_) => return None,
        };
        Some(self.guard(key))
    }

    /// How many keys are held now.
    pub fn len(&self) -> usize {
        self.inner.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    /// Is no key held now?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn guard(&self, key: K) -> Guard<K> {
        Guard { inner: self.inner.clone(), key: Some(key) }
    }
}

impl<K: Eq + Hash + Clone> Default for Keyed<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Eq + Hash> Drop for Guard<K> {
    fn drop(&mut self) {
        let Some(mut key) = self.key.take() else { return };
        loop {
            let next = {
                let mut shard = self.inner.shard(&key);
                let next = shard.get_mut(&key).and_then(VecDeque::pop_front);
                if next.is_none() {
                    shard.remove(&key);
                }
                next
            };
            let Some(waiter) = next else { return };
            // The guard itself travels: if its waiter is dropped with the guard in hand, that guard hands on in turn.
            match waiter.send(Guard { inner: self.inner.clone(), key: Some(key) }) {
                Ok(()) => return,
                Err(mut returned) => match returned.key.take() {
                    Some(same) => key = same,
                    None => return,
                },
            }
        }
    }
}

impl<K: Eq + Hash> Clone for Keyed<K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<K: Eq + Hash + Clone> fmt::Debug for Keyed<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyed").field("held", &self.len()).finish()
    }
}

impl<K: Eq + Hash> fmt::Debug for Guard<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

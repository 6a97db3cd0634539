//! An asynchronous mutex per key.
//!
//! An entry exists only while its key is locked or waited for, so ten million distinct keys, one after another, leave nothing in memory.
//! Waiters are served in order of arrival. A waiter whose future is dropped leaves the queue; if the lock was handed to it at that very
//! moment, the lock passes to the next waiter.

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

/// Enough shards that tasks with different keys seldom contend for the same map.
const SHARDS: usize = 64;

/// The waiters for one key. While the entry exists, the key is locked.
type WaitQueue<K> = VecDeque<oneshot::Sender<KeyedMutexGuard<K>>>;

struct Shards<K: Eq + Hash> {
    hasher: RandomState,
    shards: [Mutex<HashMap<K, WaitQueue<K>>>; SHARDS],
}

/// A mutex for each key, created when needed and removed when unused.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use stampede_lock::KeyedMutex;
///
/// let locks = KeyedMutex::new();
/// let guard = locks.lock("alice").await;
/// assert!(locks.try_lock("alice").is_none(), "locked");
/// assert!(locks.try_lock("bob").is_some(), "another key is another lock");
/// drop(guard);
/// assert!(locks.try_lock("alice").is_some());
/// assert!(locks.is_empty());
/// # }
/// ```
pub struct KeyedMutex<K: Eq + Hash> {
    inner: Arc<Shards<K>>,
}

/// Holds the lock of its key until it is dropped.
pub struct KeyedMutexGuard<K: Eq + Hash> {
    inner: Arc<Shards<K>>,
    /// `None` once the lock has been passed on.
    key: Option<K>,
}

impl<K: Eq + Hash> Shards<K> {
    fn shard(&self, key: &K) -> MutexGuard<'_, HashMap<K, WaitQueue<K>>> {
        let index = usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0);
        self.shards[index].lock()
    }
}

impl<K: Eq + Hash + Clone> KeyedMutex<K> {
    /// Creates it with no key locked.
    pub fn new() -> Self {
        let shards = std::array::from_fn(|_| Mutex::new(HashMap::new()));
        Self { inner: Arc::new(Shards { hasher: RandomState::new(), shards }) }
    }

    /// Waits for the key's lock. Cancel-safe: dropping the future leaves the queue.
    pub async fn lock(&self, key: K) -> KeyedMutexGuard<K> {
        let handed_over = match self.inner.shard(&key).entry(key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(WaitQueue::new());
                None
            }
            Entry::Occupied(mut entry) => {
                let queue = entry.get_mut();
                // Cancelled waiters are removed before the queue grows, so that its length stays proportional to the live waiters.
                if queue.len() == queue.capacity() {
                    queue.retain(|waiter| !waiter.is_closed());
                }
                let (waiter, handed_over) = oneshot::channel();
                queue.push_back(waiter);
                Some(handed_over)
            }
        };
        match handed_over {
            None => self.guard(key),
            // A queue is dropped only when it is empty, and only cancelled waiters are removed from it.
            Some(handed_over) => match handed_over.await {
                Ok(guard) => guard,
                Err(_) => unreachable!("a queue was dropped with a waiter in it"),
            },
        }
    }

    /// Takes the key's lock if it is free.
    pub fn try_lock(&self, key: K) -> Option<KeyedMutexGuard<K>> {
        match self.inner.shard(&key).entry(key.clone()) {
            Entry::Vacant(entry) => entry.insert(WaitQueue::new()),
            Entry::Occupied(_) => return None,
        };
        Some(self.guard(key))
    }

    /// The number of keys that are locked.
    pub fn len(&self) -> usize {
        self.inner.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Whether no key is locked.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn guard(&self, key: K) -> KeyedMutexGuard<K> {
        KeyedMutexGuard { inner: self.inner.clone(), key: Some(key) }
    }
}

impl<K: Eq + Hash + Clone> Default for KeyedMutex<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Eq + Hash> Drop for KeyedMutexGuard<K> {
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
            // The channel carries the guard itself: if the waiter is dropped after the send, dropping the guard passes the lock on.
            match waiter.send(KeyedMutexGuard { inner: self.inner.clone(), key: Some(key) }) {
                Ok(()) => return,
                Err(mut returned) => match returned.key.take() {
                    Some(same) => key = same,
                    None => return,
                },
            }
        }
    }
}

impl<K: Eq + Hash> Clone for KeyedMutex<K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<K: Eq + Hash + Clone> fmt::Debug for KeyedMutex<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedMutex").field("locked", &self.len()).finish()
    }
}

impl<K: Eq + Hash> fmt::Debug for KeyedMutexGuard<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyedMutexGuard")
    }
}

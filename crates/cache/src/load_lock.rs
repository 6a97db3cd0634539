//! Decides which process loads a key, and how the others wait for it.
//!
//! The process that holds the lock of the key loads it and renews the lock until the load has ended. The other processes wait for the
//! message that the load has ended; in case it is lost they also read Redis every [`POLL_INTERVAL`]. If the holder dies, its lock is no
//! longer renewed, and another process takes it over when it expires.

use std::time::{Duration, Instant};

use stampede_lock::{Error as LockError, Guard};

use crate::builder::{CacheKey, CacheValue};
use crate::cache::Inner;
use crate::entry::Cached;
use crate::remote::RemoteEntry;
use crate::store::release_lock;

const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The remaining TTL is rounded to milliseconds and measured by Redis; a retry this much later finds the lock expired.
const TTL_MARGIN: Duration = Duration::from_millis(2);

/// The result of [`Inner::lock_or_wait`].
pub(crate) enum Acquired<V> {
    /// Another process has loaded the key.
    Value(Cached<V>),
    /// This process holds the lock and loads the key. With the version of the key, if Redis returned it.
    Lock(Guard, Option<Vec<u8>>),
    /// Neither: Redis is unavailable, or the other processes have taken longer than a load may take. This process loads without a lock.
    Nothing,
}

/// The result of a lookup in Redis.
enum Lookup<V> {
    Found(Cached<V>),
    /// There is no value. With the version of the key.
    Missing(Vec<u8>),
    Unavailable,
}

impl<K: CacheKey, V: CacheValue, E: Send + Sync + 'static> Inner<K, V, E> {
    /// Acquires the lock of a key that is not in Redis, or waits until another process has loaded the key.
    pub(crate) async fn lock_or_wait(&self, key: &K) -> Acquired<V> {
        let remote = self.settings.remote.as_ref();
        let Some(lock) = remote.and_then(|remote| remote.lock(&self.settings.name, &key.to_string())) else {
            return Acquired::Nothing;
        };
        let deadline = Instant::now() + self.settings.load_timeout + self.settings.wait_timeout;
        loop {
            // Created before the lookups, so that a message that arrives after them is not missed.
            let signal = self.signal(key).notified();
            let ttl = match lock.try_lock().await {
                Ok(guard) => return self.lookup_with_lock(key, guard).await,
                Err(LockError::NotAcquired { remaining }) => remaining.unwrap_or(POLL_INTERVAL),
                Err(error) => {
                    tracing::debug!(%error, "the load lock is unavailable; loading without it");
                    return Acquired::Nothing;
                }
            };
            match self.lookup(key, true).await {
                Lookup::Found(value) => return Acquired::Value(value),
                Lookup::Unavailable => return Acquired::Nothing,
                Lookup::Missing(_) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // If the holder has renewed the lock meanwhile, the next iteration waits again.
            let _ = tokio::time::timeout((ttl + TTL_MARGIN).min(POLL_INTERVAL).min(left), signal).await;
            match self.lookup(key, false).await {
                Lookup::Found(value) => return Acquired::Value(value),
                Lookup::Missing(_) if Instant::now() < deadline => {}
                Lookup::Missing(_) | Lookup::Unavailable => return Acquired::Nothing,
            }
        }
    }

    /// Waits until the load of another process has ended, for at most [`POLL_INTERVAL`].
    pub(crate) async fn wait_for_load(&self, key: &K) {
        let signal = self.signal(key).notified();
        if let Some(remote) = &self.settings.remote {
            remote.register_waiter(&self.settings.name, &key.to_string()).await;
        }
        let _ = tokio::time::timeout(POLL_INTERVAL, signal).await;
    }

    /// Another process may have stored the key between the last lookup and the acquisition of the lock.
    async fn lookup_with_lock(&self, key: &K, guard: Guard) -> Acquired<V> {
        match self.lookup(key, false).await {
            Lookup::Found(value) => {
                self.tasks.spawn(release_lock(Some(guard)));
                Acquired::Value(value)
            }
            Lookup::Missing(version) => Acquired::Lock(guard, Some(version)),
            Lookup::Unavailable => Acquired::Lock(guard, None),
        }
    }

    /// `register`: if there is no value, registers this process for the message that the load has ended.
    async fn lookup(&self, key: &K, register: bool) -> Lookup<V> {
        let epoch = self.epoch(key);
        let Some(entry) = self.get_remote_or_register(key, register).await else { return Lookup::Unavailable };
        match self.insert_remote(key, epoch, &entry) {
            Some((value, _)) => {
                self.counters.for_hit(&value, |counters| &counters.remote_hits).increment();
                Lookup::Found(value)
            }
            None => Lookup::Missing(entry.version),
        }
    }

    /// Reads a key from Redis. `None` if Redis is unavailable or not configured.
    pub(crate) async fn get_remote(&self, key: &K) -> Option<RemoteEntry> {
        self.get_remote_or_register(key, false).await
    }

    async fn get_remote_or_register(&self, key: &K, register: bool) -> Option<RemoteEntry> {
        let (remote, name, text) = (self.settings.remote.as_ref()?, &self.settings.name, key.to_string());
        let entry = if register { remote.get_or_wait(name, &text).await } else { remote.get(name, &text).await };
        if entry.is_none() {
            self.counters.remote_unavailable.increment();
        }
        entry
    }
}

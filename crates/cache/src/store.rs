//! Inserts values into both levels and invalidates them.

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use stampede_lock::Guard;
use tokio::sync::Notify;

use crate::builder::{Builder, CacheKey, CacheValue};
use crate::cache::{Inner, SHARDS};
use crate::entry::{Cached, Entry, decode, encode};
use crate::listener::InvalidationListener;
use crate::remote::RemoteEntry;

const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// How long a value is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lifetimes {
    /// Until it expires in Redis.
    pub(crate) ttl: Duration,
    /// Until it is stale.
    pub(crate) fresh_for: Duration,
    /// Until it expires in the process.
    pub(crate) local_ttl: Duration,
}

impl<K: CacheKey, V: CacheValue, E: Send + Sync + 'static> Inner<K, V, E> {
    /// Inserts a value that was read from Redis into the local level. Returns it with the time for which it is still fresh.
    pub(crate) fn insert_remote(&self, key: &K, epoch: u64, entry: &RemoteEntry) -> Option<(Cached<V>, Duration)> {
        let (value, fresh_for) = decode::<V>(entry.value.as_ref()?)?;
        let value = value.map(Arc::new);
        let local_ttl = self.lifetimes(value.is_some()).local_ttl;
        // Without refresh a value must not outlive its freshness.
        let ttl = if self.settings.refresh_after.is_some() { local_ttl } else { local_ttl.min(fresh_for) };
        self.insert_local(key, epoch, value.clone(), fresh_for, ttl);
        Some((value, fresh_for))
    }

    /// The lifetimes of a new value, or of the fact that the key does not exist.
    pub(crate) fn lifetimes(&self, exists: bool) -> Lifetimes {
        let Builder { expire_after, refresh_after, expire_empty_after, local_ttl, remote, .. } = &self.settings;
        let ttl = self.with_jitter(if exists { *expire_after } else { *expire_empty_after });
        let fresh_for = match refresh_after {
            Some(time) if exists => self.with_jitter(*time).min(ttl),
            _ => ttl,
        };
        let local_ttl = if remote.is_some() { self.with_jitter(*local_ttl).min(ttl) } else { ttl };
        Lifetimes { ttl, fresh_for, local_ttl }
    }

    /// Inserts a loaded value into the local level.
    pub(crate) fn insert_loaded(&self, key: &K, epoch: u64, value: &Cached<V>) -> Lifetimes {
        let lifetimes = self.lifetimes(value.is_some());
        self.insert_local(key, epoch, value.clone(), lifetimes.fresh_for, lifetimes.local_ttl);
        lifetimes
    }

    /// Stores a loaded value in Redis and releases the lock. The epoch and the version are those from before the load.
    pub(crate) async fn store(
        self: Arc<Self>,
        key: K,
        (epoch, version): (u64, Vec<u8>),
        value: Cached<V>,
        lifetimes: Lifetimes,
        guard: Option<Guard>,
    ) {
        let stored = match (&self.settings.remote, encode(value.as_deref(), lifetimes.fresh_for)) {
            (Some(remote), Ok(bytes)) => {
                let stored = remote.store(&self.settings.name, &key.to_string(), &version, &bytes, lifetimes.ttl).await;
                if !stored && self.epoch(&key) == epoch {
                    // The key was invalidated, and the message has not arrived yet.
                    self.invalidate_local(&key);
                }
                stored
            }
            (_, Err(error)) => self.log_encode_error(&error),
            (None, _) => false,
        };
        if stored {
            release_lock(guard).await;
        } else {
            self.end_load(key, guard).await;
        }
    }

    fn log_encode_error(&self, error: &serde_json::Error) -> bool {
        tracing::error!(cache = self.settings.name, %error, "a value cannot be encoded as JSON; it is not stored in Redis");
        false
    }

    /// Releases the lock of a load that has stored nothing, and wakes the processes that wait for it.
    pub(crate) async fn end_load(self: Arc<Self>, key: K, guard: Option<Guard>) {
        if guard.is_some()
            && let Some(remote) = &self.settings.remote
        {
            release_lock(guard).await;
            remote.load_ended(&self.settings.name, &key.to_string()).await;
        }
    }

    /// The version of a key in Redis. `None` if Redis is unavailable or not configured.
    pub(crate) async fn version(&self, key: &K) -> Option<Vec<u8>> {
        self.settings.remote.as_ref()?.version(&self.settings.name, &key.to_string()).await
    }

    /// Inserts a value that was written to the source, if no other change of the key has happened since this epoch and this version.
    pub(crate) async fn put(self: &Arc<Self>, key: &K, epoch: u64, version: Option<Vec<u8>>, value: Cached<V>) {
        let lifetimes = self.lifetimes(value.is_some());
        let Some(remote) = &self.settings.remote else {
            if let Some(epoch) = self.invalidate_local_since(key, epoch) {
                self.insert_local(key, epoch, value, lifetimes.fresh_for, lifetimes.local_ttl);
            }
            return;
        };
        let bytes = encode(value.as_deref(), lifetimes.fresh_for).inspect_err(|error| _ = self.log_encode_error(error));
        let (Some(version), Ok(bytes)) = (version, bytes) else {
            return self.invalidate(key).await;
        };
        self.invalidate_local(key);
        let (epoch, text) = (self.epoch(key), key.to_string());
        match remote.put(&self.settings.name, &text, &version, &bytes, lifetimes.ttl).await {
            Some(true) => {
                // Meanwhile a reader may have inserted the old value from Redis.
                if let Some(epoch) = self.invalidate_local_since(key, epoch) {
                    self.insert_local(key, epoch, value, lifetimes.fresh_for, lifetimes.local_ttl);
                }
            }
            Some(false) => self.invalidate_local(key),
            None => self.clone().invalidate_later(key.clone(), text),
        }
    }

    /// Invalidates a key in this process, in Redis and in all other processes.
    pub(crate) async fn invalidate(self: &Arc<Self>, key: &K) {
        self.invalidate_local(key);
        let Some(remote) = &self.settings.remote else { return };
        let text = key.to_string();
        if remote.invalidate(&self.settings.name, &text).await {
            // Meanwhile a reader may have inserted the old value from Redis.
            self.invalidate_local(key);
        } else {
            self.clone().invalidate_later(key.clone(), text);
        }
    }

    /// Retries an invalidation that did not reach Redis, until the value would have expired.
    pub(crate) fn invalidate_later(self: Arc<Self>, key: K, text: String) {
        self.counters.remote_unavailable.increment();
        let name = &self.settings.name;
        let Ok(permit) = self.invalidation_permits.clone().try_acquire_owned() else {
            tracing::warn!(cache = name, "too many invalidations wait for Redis; this one is left to the expiry");
            return;
        };
        let deadline = Instant::now() + self.settings.expire_after;
        tokio::spawn(async move {
            let mut backoff = MIN_BACKOFF;
            while let Some(remote) = &self.settings.remote
                && Instant::now() < deadline
                && !remote.invalidate(&self.settings.name, &text).await
            {
                tokio::time::sleep(backoff).await;
                backoff = (2 * backoff).min(MAX_BACKOFF);
            }
            self.invalidate_local(&key);
            drop(permit);
        });
    }

    /// Inserts a value into the local level, unless the key was invalidated since this epoch.
    pub(crate) fn insert_local(&self, key: &K, epoch: u64, value: Cached<V>, fresh_for: Duration, ttl: Duration) {
        if ttl.is_zero() || self.epoch(key) != epoch {
            return;
        }
        let fresh_until = Instant::now() + fresh_for;
        self.local.insert(key.clone(), Arc::new(Entry { value, fresh_until, ttl }));
        // An invalidation between the check and the insert has not seen this entry.
        if self.epoch(key) != epoch {
            self.local.invalidate(key);
        }
    }

    /// Removes a key from the local level; values that are being loaded for it are not inserted.
    pub(crate) fn invalidate_local(&self, key: &K) {
        self.epochs[self.shard(key)].fetch_add(1, Ordering::SeqCst);
        self.discard_local(key);
    }

    /// Like [`invalidate_local`](Self::invalidate_local). Returns the new epoch if there was no other invalidation since the given one.
    fn invalidate_local_since(&self, key: &K, epoch: u64) -> Option<u64> {
        let previous = self.epochs[self.shard(key)].fetch_add(1, Ordering::SeqCst);
        self.discard_local(key);
        (previous == epoch).then_some(previous + 1)
    }

    fn discard_local(&self, key: &K) {
        self.local.invalidate(key);
        // Later callers do not join a load that began before the invalidation.
        self.loads.forget(key);
        self.refreshes.forget(key);
        self.signal(key).notify_waiters();
    }

    pub(crate) fn signal(&self, key: &K) -> &Notify {
        &self.signals[self.shard(key)]
    }

    pub(crate) fn epoch(&self, key: &K) -> u64 {
        self.epochs[self.shard(key)].load(Ordering::SeqCst)
    }

    pub(crate) fn shard(&self, key: &K) -> usize {
        usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0)
    }

    /// Shortens a duration by a random part.
    pub(crate) fn with_jitter(&self, time: Duration) -> Duration {
        time.mul_f64(1.0 - self.settings.jitter * rand::rng().random::<f64>())
    }
}

impl<K: CacheKey, V: CacheValue, E: Send + Sync + 'static> InvalidationListener for Inner<K, V, E> {
    fn on_invalidated(&self, key: &str) {
        match key.parse::<K>() {
            Ok(key) => self.invalidate_local(&key),
            Err(_) => {
                // The message may be about any key.
                tracing::warn!(
                    cache = self.settings.name,
                    key,
                    "the key of an invalidation message cannot be parsed; the local level is cleared"
                );
                self.on_messages_missed();
            }
        }
    }

    fn on_load_ended(&self, key: &str) {
        if let Ok(key) = key.parse::<K>() {
            self.signal(&key).notify_waiters();
        }
    }

    fn on_messages_missed(&self) {
        self.epochs.iter().for_each(|epoch| _ = epoch.fetch_add(1, Ordering::SeqCst));
        self.local.invalidate_all();
        self.loads.forget_all();
        self.refreshes.forget_all();
        self.signals.iter().for_each(Notify::notify_waiters);
    }
}

pub(crate) async fn release_lock(guard: Option<Guard>) {
    if let Some(guard) = guard
        && let Err(error) = guard.release().await
    {
        tracing::debug!(%error, "the lock of a load was lost before the load ended");
    }
}

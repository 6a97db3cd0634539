//! Keeping what was brought, for its time, and forgetting it when it is old.

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use stampede_lock::Guard;
use tokio::sync::Notify;

use crate::builder::{Builder, Cached, Key};
use crate::cache::{Inner, Known, SHARDS};
use crate::entry::{Entry, decode, encode};
use crate::listener::Told;
use crate::remote::Found;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) kept_for: Duration,
    pub(crate) fresh_for: Duration,
    pub(crate) here_for: Duration,
}

impl<K: Key, V: Cached, E: Send + Sync + 'static> Inner<K, V, E> {
    /// Keeps in the process what Redis had.
    pub(crate) fn take_in(&self, key: &K, epoch: u64, found: &Found) -> Option<(Known<V>, Duration)> {
        let (value, fresh_for) = decode::<V>(found.value.as_ref()?)?;
        let value = value.map(Arc::new);
        let here_for = self.times(value.is_some()).here_for;
        // What is not refreshed is not kept for longer than it is fresh.
        let kept_for = if self.settings.refresh_after.is_some() { here_for } else { here_for.min(fresh_for) };
        self.keep_here(key, epoch, value.clone(), fresh_for, kept_for);
        Some((value, fresh_for))
    }

    /// How long a new value, or that there is none, is kept, is fresh, and is kept in the process.
    pub(crate) fn times(&self, exists: bool) -> Times {
        let Builder { expire_after, refresh_after, empty_for, local_for, remote, .. } = &self.settings;
        let kept_for = self.shorter(if exists { *expire_after } else { *empty_for });
        let fresh_for = match refresh_after {
            Some(time) if exists => self.shorter(*time).min(kept_for),
            _ => kept_for,
        };
        let here_for = if remote.is_some() { self.shorter(*local_for).min(kept_for) } else { kept_for };
        Times { kept_for, fresh_for, here_for }
    }

    /// Keeps in the process what was loaded.
    pub(crate) fn keep(&self, key: &K, epoch: u64, value: &Known<V>) -> Times {
        let times = self.times(value.is_some());
        self.keep_here(key, epoch, value.clone(), times.fresh_for, times.here_for);
        times
    }

    /// Stores in Redis what was loaded after this epoch and this version were read, and gives the lock back.
    pub(crate) async fn store(
        self: Arc<Self>,
        key: K,
        (epoch, version): (u64, Vec<u8>),
        value: Known<V>,
        times: Times,
        guard: Option<Guard>,
    ) {
        let stored = match (&self.settings.remote, encode(value.as_deref(), times.fresh_for)) {
            (Some(remote), Ok(bytes)) => {
                let stored =
                    remote.store(&self.settings.name, &key.to_string(), &version, &bytes, times.kept_for).await;
                if !stored && self.epoch(&key) == epoch {
                    // It is old by now, and the message that says so has not arrived yet.
                    self.forget_here(&key);
                }
                stored
            }
            (_, Err(error)) => self.cannot_be_written(&error),
            (None, _) => false,
        };
        if stored {
            release(guard).await;
        } else {
            self.end_load(key, guard).await;
        }
    }

    fn cannot_be_written(&self, error: &serde_json::Error) -> bool {
        tracing::error!(cache = self.settings.name, %error, "a value cannot be written as JSON; it is not kept in Redis");
        false
    }

    /// Gives back the lock of a load that has stored nothing, and wakes the processes that wait for it.
    pub(crate) async fn end_load(self: Arc<Self>, key: K, guard: Option<Guard>) {
        if guard.is_some()
            && let Some(remote) = &self.settings.remote
        {
            release(guard).await;
            remote.load_ended(&self.settings.name, &key.to_string()).await;
        }
    }

    /// The version of a key in Redis. `None` if it is away, or there is none.
    pub(crate) async fn version(&self, key: &K) -> Option<Vec<u8>> {
        self.settings.remote.as_ref()?.version(&self.settings.name, &key.to_string()).await
    }

    /// Keeps what was just written to the source, if the key was not changed by another since this epoch and this version.
    pub(crate) async fn put(self: &Arc<Self>, key: &K, epoch: u64, version: Option<Vec<u8>>, value: Known<V>) {
        let times = self.times(value.is_some());
        let Some(remote) = &self.settings.remote else {
            if let Some(epoch) = self.forget_here_since(key, epoch) {
                self.keep_here(key, epoch, value, times.fresh_for, times.here_for);
            }
            return;
        };
        let bytes = encode(value.as_deref(), times.fresh_for).inspect_err(|error| _ = self.cannot_be_written(error));
        let (Some(version), Ok(bytes)) = (version, bytes) else {
            return self.invalidate(key).await;
        };
        self.forget_here(key);
        let (epoch, text) = (self.epoch(key), key.to_string());
        match remote.put(&self.settings.name, &text, &version, &bytes, times.kept_for).await {
            Some(true) => {
                // The old value may have been found in Redis meanwhile.
                if let Some(epoch) = self.forget_here_since(key, epoch) {
                    self.keep_here(key, epoch, value, times.fresh_for, times.here_for);
                }
            }
            Some(false) => self.forget_here(key),
            None => self.clone().forget_later(key.clone(), text),
        }
    }

    /// Declares a key gone, here and for all processes.
    pub(crate) async fn invalidate(self: &Arc<Self>, key: &K) {
        self.forget_here(key);
        let Some(remote) = &self.settings.remote else { return };
        let text = key.to_string();
        if remote.forget(&self.settings.name, &text).await {
            // The old value may have been found in Redis meanwhile.
            self.forget_here(key);
        } else {
            self.clone().forget_later(key.clone(), text);
        }
    }

    /// Redis could not be told that a key is gone: it is tried again until the value would have expired.
    pub(crate) fn forget_later(self: Arc<Self>, key: K, text: String) {
        self.counters.away.count();
        let name = &self.settings.name;
        let Ok(place) = self.forgetting.clone().try_acquire_owned() else {
            tracing::warn!(cache = name, "too many invalidations wait for Redis; this one is left to the expiry");
            return;
        };
        let until = Instant::now() + self.settings.expire_after;
        tokio::spawn(async move {
            let mut pause = FIRST_PAUSE;
            while let Some(remote) = &self.settings.remote
                && Instant::now() < until
                && !remote.forget(&self.settings.name, &text).await
            {
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            self.forget_here(&key);
            drop(place);
        });
    }

    pub(crate) fn keep_here(&self, key: &K, epoch: u64, value: Known<V>, fresh_for: Duration, kept_for: Duration) {
        if kept_for.is_zero() || self.epoch(key) != epoch {
            return;
        }
        let fresh_until = Instant::now() + fresh_for;
        self.local.insert(key.clone(), Arc::new(Entry { value, fresh_until, kept_for }));
        // Declared gone between the question and the insert: whoever did that did not see it.
        if self.epoch(key) != epoch {
            self.local.invalidate(key);
        }
    }

    pub(crate) fn forget_here(&self, key: &K) {
        self.epochs[self.shard(key)].fetch_add(1, Ordering::SeqCst);
        self.leave_behind(key);
    }

    /// The same. Returns the new epoch if nothing was declared gone since this one.
    fn forget_here_since(&self, key: &K, epoch: u64) -> Option<u64> {
        let known = self.epochs[self.shard(key)].fetch_add(1, Ordering::SeqCst);
        self.leave_behind(key);
        (known == epoch).then_some(known + 1)
    }

    fn leave_behind(&self, key: &K) {
        self.local.invalidate(key);
        // Those who come from now on do not wait for a load that began before.
        self.flights.leave_behind(key);
        self.refreshing.leave_behind(key);
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

    /// By a random part.
    pub(crate) fn shorter(&self, time: Duration) -> Duration {
        time.mul_f64(1.0 - self.settings.jitter * rand::rng().random::<f64>())
    }
}

impl<K: Key, V: Cached, E: Send + Sync + 'static> Told for Inner<K, V, E> {
    fn gone(&self, key: &str) {
        match key.parse::<K>() {
            Ok(key) => self.forget_here(&key),
            Err(_) => {
                // Which key it is cannot be said, so it may be any.
                tracing::warn!(
                    cache = self.settings.name,
                    key,
                    "the key of a message cannot be read; the local level is cleared"
                );
                self.doubtful();
            }
        }
    }

    fn loaded(&self, key: &str) {
        if let Ok(key) = key.parse::<K>() {
            self.signal(&key).notify_waiters();
        }
    }

    fn doubtful(&self) {
        self.epochs.iter().for_each(|epoch| _ = epoch.fetch_add(1, Ordering::SeqCst));
        self.local.invalidate_all();
        self.flights.leave_all_behind();
        self.refreshing.leave_all_behind();
        self.signals.iter().for_each(Notify::notify_waiters);
    }
}

pub(crate) async fn release(guard: Option<Guard>) {
    if let Some(guard) = guard
        && let Err(error) = guard.release().await
    {
        tracing::debug!(%error, "the lock of a load was lost before its end");
    }
}

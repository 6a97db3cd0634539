//! Keeping what was brought, for its time, and forgetting it when it is old.

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use stampede_lock::Guard;

use crate::builder::{Builder, Cached, Key};
use crate::cache::{Inner, Known, SHARDS};
use crate::entry::{Entry, decode, encode};
use crate::load::release;
use crate::remote::{Found, Told};

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

    /// Stores in Redis what was loaded after this version was read, and gives the lock back.
    pub(crate) async fn store(
        self: Arc<Self>,
        key: K,
        version: Vec<u8>,
        value: Known<V>,
        times: Times,
        guard: Option<Guard>,
    ) {
        if let Some(remote) = &self.settings.remote {
            let stored = match encode(value.as_deref(), times.fresh_for) {
                Ok(bytes) => {
                    remote.store(&self.settings.name, &key.to_string(), &version, &bytes, times.kept_for).await
                }
                Err(error) => self.cannot_be_written(&error),
            };
            if !stored {
                // It is old by now. The message may be on its way; this is sure.
                self.forget_here(&key);
            }
        }
        release(guard).await;
    }

    pub(crate) fn cannot_be_written(&self, error: &serde_json::Error) -> bool {
        tracing::error!(cache = self.settings.name, %error, "a value cannot be written as JSON; it is not kept in Redis");
        true
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
        self.local.invalidate(key);
        // Whoever comes from now on does not wait for a load that began before.
        self.flights.leave_behind(key);
        self.refreshing.leave_behind(key);
        self.forgotten.notify_waiters();
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
        if let Ok(key) = key.parse::<K>() {
            self.forget_here(&key);
        }
    }

    fn doubtful(&self) {
        self.epochs.iter().for_each(|epoch| _ = epoch.fetch_add(1, Ordering::SeqCst));
        self.local.invalidate_all();
        self.flights.leave_all_behind();
        self.refreshing.leave_all_behind();
        self.forgotten.notify_waiters();
    }
}

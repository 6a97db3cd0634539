//! Reading through the levels, and writing past them.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rand::RngExt as _;
use stampede_lock::{Error as LockError, Guard};
use tokio::sync::Semaphore;

use crate::builder::{Builder, Cached, Key};
use crate::entry::{Entry, KeptFor, decode, encode};
use crate::error::Error;
use crate::filter::Filter;
use crate::flight::Flights;
use crate::remote::{Found, Told};
use crate::stats::{Counters, Stats};

type Known<V> = Option<Arc<V>>;
type Outcome<V, E> = Result<Known<V>, Error<E>>;

/// How many invalidations are tried again at once while Redis is away. More are left to the expiry.
const MAX_FORGETTING: usize = 1024;
const SHARDS: usize = 1024;

/// Values by key from a source, kept in the process and, if there is one, in Redis. Cheap to clone. Made by a [`Builder`].
pub struct Cache<K: Key, V: Cached, E> {
    inner: Arc<Inner<K, V, E>>,
}

struct Inner<K: Key, V: Cached, E> {
    settings: Builder,
    local: moka::sync::Cache<K, Arc<Entry<V>>>,
    /// Counts what was declared gone, by hash: what was read before must not be kept after.
    epochs: Box<[AtomicU64]>,
    hasher: RandomState,
    flights: Arc<Flights<K, Outcome<V, E>>>,
    refreshing: Arc<Flights<K, ()>>,
    loads: Semaphore,
    forgetting: Arc<Semaphore>,
    counters: Counters,
    filter: Option<Filter<K>>,
}

impl<K: Key, V: Cached, E: Send + Sync + 'static> Cache<K, V, E> {
    pub(crate) fn new(settings: Builder, filter: Option<Filter<K>>) -> Self {
        let inner = Arc::new(Inner {
            local: moka::sync::Cache::builder().max_capacity(settings.local_capacity).expire_after(KeptFor).build(),
            epochs: (0..SHARDS).map(|_| AtomicU64::new(0)).collect(),
            hasher: RandomState::new(),
            flights: Arc::new(Flights::new()),
            refreshing: Arc::new(Flights::new()),
            loads: Semaphore::new(settings.loads_at_once),
            forgetting: Arc::new(Semaphore::new(MAX_FORGETTING)),
            counters: Counters::default(),
            filter,
            settings,
        });
        if let Some(remote) = &inner.settings.remote {
            let told: Weak<dyn Told> = Arc::downgrade(&(inner.clone() as Arc<dyn Told>));
            remote.register(&inner.settings.name, told);
        }
        Self { inner }
    }

    /// The value of a key: from the process, from Redis, or from the source, which is asked once for everybody. `None`: there is none.
    ///
    /// # Errors
    /// [`Error::Source`] if the source failed, [`Error::TooSlow`] if it took too long. Redis being away is no error.
    pub async fn get_or_load<F, L>(&self, key: &K, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let inner = &self.inner;
        if let Some(entry) = inner.local.get(key) {
            if entry.is_fresh() {
                inner.counters.of_hit(&entry.value, |counters| &counters.local_hits).count();
                return Ok(entry.value.clone());
            }
            // Whoever is first sees to it; nobody waits.
            inner.counters.stale.count();
            inner.refresh_once(key, load);
            return Ok(entry.value.clone());
        }
        let (ticket, started) = inner.flights.join(key, || inner.clone().fetch(key.clone(), load));
        if !started {
            inner.counters.waits.count();
        }
        let outcome = match tokio::time::timeout(inner.settings.wait_at_most, ticket.outcome()).await {
            Ok(Some(outcome)) => outcome,
            Ok(None) => Err(Error::Broken),
            Err(_) => Err(Error::TooSlow),
        };
        if outcome.is_err() {
            inner.counters.errors.count();
        }
        outcome
    }

    /// Keeps a value that is known to be the source's, without asking it. `None`: there is none.
    pub async fn put(&self, key: &K, value: Option<V>) {
        let inner = &self.inner;
        let epoch = inner.epoch(key);
        let version = inner.find(key).await.map(|found| found.version);
        inner.keep(key, epoch, version, value.map(Arc::new)).await;
    }

    /// Keeps many values, before the crowd comes.
    pub async fn warm(&self, values: impl IntoIterator<Item = (K, V)>) {
        for (key, value) in values {
            self.put(&key, Some(value)).await;
        }
    }

    /// The value has changed in its source: nobody gets the old one from here on. In other processes as soon as the message arrives,
    /// and within their local time if it does not; if Redis is away, it is told in the background, and the expiry is the bound.
    pub async fn invalidate(&self, key: &K) {
        let inner = &self.inner;
        inner.forget_here(key);
        let Some(remote) = &inner.settings.remote else { return };
        let text = key.to_string();
        if remote.forget(&inner.settings.name, &text).await {
            return;
        }
        inner.counters.away.count();
        let Ok(place) = inner.forgetting.clone().try_acquire_owned() else {
            tracing::warn!(
                cache = inner.settings.name,
                "too many invalidations wait for Redis; this one is left to the expiry"
            );
            return;
        };
        let (remote, name) = (remote.clone(), inner.settings.name.clone());
        let until = Instant::now() + inner.settings.expire_after;
        tokio::spawn(async move {
            let mut pause = Duration::from_millis(50);
            while Instant::now() < until && !remote.forget(&name, &text).await {
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(Duration::from_secs(2));
            }
            drop(place);
        });
    }

    /// Changes the source, and then declares the value gone: in this order, also if the change failed (who knows how far it came) or the
    /// caller goes away in between.
    ///
    /// # Errors
    /// Whatever the change says.
    ///
    /// # Panics
    /// If the change does.
    pub async fn update<T, C, F>(&self, key: &K, change: F) -> Result<T, C>
    where
        T: Send + 'static,
        C: Send + 'static,
        F: Future<Output = Result<T, C>> + Send + 'static,
    {
        let (cache, key) = (self.clone(), key.clone());
        let changing = tokio::spawn(async move {
            let outcome = change.await;
            cache.invalidate(&key).await;
            outcome
        });
        match changing.await {
            Ok(outcome) => outcome,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// What the cache has done so far.
    pub fn stats(&self) -> Stats {
        self.inner.counters.read()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.settings.name
    }
}

impl<K: Key, V: Cached, E: Send + Sync + 'static> Inner<K, V, E> {
    /// A key that the process does not have.
    async fn fetch<F, L>(self: Arc<Self>, key: K, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        // Somebody may have brought it since we looked.
        if let Some(entry) = self.local.get(&key) {
            return Ok(entry.value.clone());
        }
        let epoch = self.epoch(&key);
        let mut version = None;
        let mut guard = None;
        if let Some(found) = self.find(&key).await {
            if let Some((value, fresh_for)) = self.take_in(&key, epoch, &found) {
                self.counters.of_hit(&value, |counters| &counters.remote_hits).count();
                if fresh_for.is_zero() && self.settings.refresh_after.is_some() {
                    self.counters.stale.count();
                    self.refresh_once(&key, load);
                }
                return Ok(value);
            }
            if self.is_filtered(&key).await {
                return Ok(None);
            }
            version = Some(found.version);
            guard = self.lock_for(&key, self.settings.wait_at_most / 2).await;
            if guard.is_some() {
                // A second look: whoever had the lock before has brought it, perhaps.
                if let Some(found) = self.find(&key).await {
                    if let Some((value, _)) = self.take_in(&key, epoch, &found) {
                        self.counters.of_hit(&value, |counters| &counters.remote_hits).count();
                        release(guard).await;
                        return Ok(value);
                    }
                    version = Some(found.version);
                }
            }
        }
        if version.is_none() && self.is_filtered(&key).await {
            return Ok(None);
        }
        self.counters.misses.count();
        let outcome = self.load(load).await;
        if let Ok(value) = &outcome {
            self.keep(&key, epoch, version, value.clone()).await;
        }
        release(guard).await;
        outcome
    }

    /// Is it sure that there is no such key?
    async fn is_filtered(&self, key: &K) -> bool {
        let Some(filter) = &self.filter else { return false };
        let filtered = !filter.may_exist(key).await;
        if filtered {
            self.counters.filtered.count();
        }
        filtered
    }

    /// A key that is stale. Nobody waits for this.
    fn refresh_once<F, L>(self: &Arc<Self>, key: &K, load: L)
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        self.refreshing.join(key, || self.clone().refresh(key.clone(), load));
    }

    /// One process brings the key up to date, the others leave it to that one.
    async fn refresh<F, L>(self: Arc<Self>, key: K, load: L)
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let epoch = self.epoch(&key);
        let (mut version, mut guard) = (None, None);
        if let Some(found) = self.find(&key).await {
            let lock =
                self.settings.remote.as_ref().and_then(|remote| remote.lock(&self.settings.name, &key.to_string()));
            let Some(lock) = lock else { return };
            match lock.try_lock().await {
                Ok(got) => guard = Some(got),
                // Somebody else is at it. What it brings is found when the stale one has to go here.
                Err(LockError::NotAcquired { .. }) => return,
                Err(_) => self.counters.away.count(),
            }
            // A second look, if there was somebody to wait for.
            let found = if guard.is_some() { self.find(&key).await.unwrap_or(found) } else { found };
            if let Some((_, fresh_for)) = self.take_in(&key, epoch, &found)
                && !fresh_for.is_zero()
            {
                return release(guard).await;
            }
            version = Some(found.version);
        }
        match self.load(load).await {
            Ok(value) => self.keep(&key, epoch, version, value).await,
            Err(_) => self.counters.errors.count(),
        }
        release(guard).await;
    }

    /// The lock under which one process at a time loads this key. `None` if Redis is away or the others take too long: then it is
    /// loaded without.
    async fn lock_for(&self, key: &K, wait: Duration) -> Option<Guard> {
        let lock = self.settings.remote.as_ref()?.lock(&self.settings.name, &key.to_string())?;
        let got = match lock.try_lock().await {
            Err(LockError::NotAcquired { .. }) => lock.lock_within(wait).await,
            other => other,
        };
        got.inspect_err(|error| tracing::debug!(%error, "loading without a lock")).ok()
    }

    async fn load<F, L>(&self, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send,
        F: Future<Output = Result<Option<V>, E>> + Send,
    {
        let loading = async {
            // The semaphore is never closed.
            let _place = self.loads.acquire().await.ok();
            self.counters.loads.count();
            load().await
        };
        match tokio::time::timeout(self.settings.load_within, loading).await {
            Ok(Ok(value)) => Ok(value.map(Arc::new)),
            Ok(Err(error)) => Err(Error::Source(Arc::new(error))),
            Err(_) => Err(Error::TooSlow),
        }
    }

    /// What Redis knows. `None` if it is away, or there is none.
    async fn find(&self, key: &K) -> Option<Found> {
        let remote = self.settings.remote.as_ref()?;
        let found = remote.find(&self.settings.name, &key.to_string()).await;
        if found.is_none() {
            self.counters.away.count();
        }
        found
    }

    /// Keeps in the process what Redis had.
    fn take_in(&self, key: &K, epoch: u64, found: &Found) -> Option<(Known<V>, Duration)> {
        let (value, fresh_for) = decode::<V>(found.value.as_ref()?)?;
        let value = value.map(Arc::new);
        let kept_for = self.shorter(if value.is_some() { self.settings.local_for } else { self.local_empty_for() });
        self.keep_here(key, epoch, value.clone(), fresh_for, kept_for);
        Some((value, fresh_for))
    }

    fn local_empty_for(&self) -> Duration {
        self.settings.local_for.min(self.settings.empty_for)
    }

    /// Keeps what was loaded. `version`: what Redis said before the load; without it, nothing is stored there.
    async fn keep(&self, key: &K, epoch: u64, version: Option<Vec<u8>>, value: Known<V>) {
        let Builder { expire_after, refresh_after, empty_for, local_for, remote, name, .. } = &self.settings;
        let kept_for = self.shorter(if value.is_some() { *expire_after } else { *empty_for });
        let fresh_for = match refresh_after {
            Some(time) if value.is_some() => self.shorter(*time).min(kept_for),
            _ => kept_for,
        };
        let here_for = if remote.is_some() { self.shorter(*local_for).min(kept_for) } else { kept_for };
        self.keep_here(key, epoch, value.clone(), fresh_for, here_for);
        if let (Some(remote), Some(version)) = (remote, version) {
            match encode(value.as_deref(), fresh_for) {
                Ok(bytes) => remote.store(name, &key.to_string(), &version, &bytes, kept_for).await,
                Err(error) => tracing::error!(cache = name, %error, "a value cannot be written as JSON"),
            }
        }
    }

    fn keep_here(&self, key: &K, epoch: u64, value: Known<V>, fresh_for: Duration, kept_for: Duration) {
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

    fn forget_here(&self, key: &K) {
        self.epochs[self.shard(key)].fetch_add(1, Ordering::SeqCst);
        self.local.invalidate(key);
        // Whoever comes from now on does not wait for a load that began before.
        self.flights.leave_behind(key);
        self.refreshing.leave_behind(key);
    }

    fn epoch(&self, key: &K) -> u64 {
        self.epochs[self.shard(key)].load(Ordering::SeqCst)
    }

    fn shard(&self, key: &K) -> usize {
        usize::try_from(self.hasher.hash_one(key) % SHARDS as u64).unwrap_or(0)
    }

    /// By a random part.
    fn shorter(&self, time: Duration) -> Duration {
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
    }
}

async fn release(guard: Option<Guard>) {
    if let Some(guard) = guard
        && let Err(error) = guard.release().await
    {
        tracing::debug!(%error, "the lock of a load was lost before its end");
    }
}

impl Counters {
    fn of_hit<V>(&self, value: &Known<V>, hit: fn(&Self) -> &crate::stats::Counter) -> &crate::stats::Counter {
        if value.is_some() { hit(self) } else { &self.empties }
    }
}

impl<K: Key, V: Cached, E> Clone for Cache<K, V, E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<K: Key, V: Cached, E> fmt::Debug for Cache<K, V, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("name", &self.inner.settings.name).finish_non_exhaustive()
    }
}

//! Reading through the levels, and writing past them.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::{FutureExt as _, StreamExt as _};
use rand::RngExt as _;
use stampede_lock::{Error as LockError, Guard};
use tokio::sync::{Notify, Semaphore};

use crate::background::Background;
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
const WARM_AT_ONCE: usize = 16;
/// After a refresh that came to nothing, the next is begun so much later.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Values by key from a source, kept in the process and, if there is one, in Redis. Cheap to clone. Made by a [`Builder`].
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use stampede_cache::{Builder, Cache};
///
/// static PRICE: AtomicU64 = AtomicU64::new(500);
/// let prices: Cache<u64, u64, std::io::Error> = Builder::new("price").build();
/// let price = async || prices.get_or_load(&7, || async { Ok(Some(PRICE.load(Ordering::SeqCst))) }).await;
/// assert_eq!(price().await?.as_deref(), Some(&500));
///
/// // The source first, and then the cache.
/// prices.update(&7, async { Ok::<_, std::io::Error>(PRICE.store(450, Ordering::SeqCst)) }).await?;
/// assert_eq!(price().await?.as_deref(), Some(&450));
///
/// // That there is none is remembered, too.
/// assert_eq!(prices.get_or_load(&8, || async { Ok(None) }).await?, None);
/// assert_eq!(prices.get_or_load(&8, || async { panic!("known") }).await?, None);
/// # Ok(()) }
/// ```
pub struct Cache<K: Key, V: Cached, E> {
    inner: Arc<Inner<K, V, E>>,
}

/// What a look under the lock came to.
enum Looked<V> {
    /// Somebody else has brought it.
    Found(Known<V>, Guard),
    /// It is for us to load. With its version, if Redis told.
    Alone(Guard, Option<Vec<u8>>),
    /// No lock: Redis is away, or whoever has it takes too long.
    Unlocked,
}

#[derive(Debug, Clone, Copy)]
struct Times {
    kept_for: Duration,
    fresh_for: Duration,
    here_for: Duration,
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
    /// Something was declared gone.
    forgotten: Notify,
    forgetting: Arc<Semaphore>,
    background: Background,
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
            forgotten: Notify::new(),
            forgetting: Arc::new(Semaphore::new(MAX_FORGETTING)),
            background: Background::new(),
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

    /// Puts a value in the place of whatever is known or being loaded. For whoever has just written it to the source, and nobody else: what
    /// was only read may be old by now, and [`get_or_load`](Self::get_or_load) knows that.
    pub async fn put(&self, key: &K, value: Option<V>) {
        let (inner, key) = (self.inner.clone(), key.clone());
        to_the_end(async move {
            let value = value.map(Arc::new);
            let times = inner.times(value.is_some());
            inner.forget_here(&key);
            inner.keep_here(&key, inner.epoch(&key), value.clone(), times.fresh_for, times.here_for);
            let Some(remote) = &inner.settings.remote else { return };
            let (name, text) = (&inner.settings.name, key.to_string());
            let stored = match encode(value.as_deref(), times.fresh_for) {
                Ok(bytes) => remote.put(name, &text, &bytes, times.kept_for).await,
                Err(error) => inner.cannot_be_written(&error),
            };
            if !stored {
                inner.clone().forget_later(key, text);
            }
        })
        .await;
    }

    /// Reads many keys from the source, before the crowd comes, a few at a time.
    ///
    /// # Errors
    /// The first that a load ends with; the others are loaded nevertheless.
    pub async fn warm<F, L>(&self, keys: impl IntoIterator<Item = K>, load: L) -> Result<(), Error<E>>
    where
        L: Fn(K) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let load = Arc::new(load);
        let loads = keys.into_iter().map(|key| {
            let (load, wanted) = (load.clone(), key.clone());
            async move { self.get_or_load(&key, move || load(wanted)).await.map(drop) }
        });
        let loaded: Vec<_> = futures_util::stream::iter(loads).buffer_unordered(WARM_AT_ONCE).collect().await;
        loaded.into_iter().collect()
    }

    /// The value has changed in its source: nobody gets the old one from here on. In other processes as soon as the message arrives,
    /// and within their local time if it does not; if Redis is away, it is told in the background, and the expiry is the bound.
    ///
    /// It goes on if the caller goes away.
    pub async fn invalidate(&self, key: &K) {
        let (inner, key) = (self.inner.clone(), key.clone());
        to_the_end(async move {
            inner.forget_here(&key);
            let Some(remote) = &inner.settings.remote else { return };
            let text = key.to_string();
            if remote.forget(&inner.settings.name, &text).await {
                // Somebody may have found the old one in Redis meanwhile.
                inner.forget_here(&key);
            } else {
                inner.clone().forget_later(key, text);
            }
        })
        .await;
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
        let changed = to_the_end(async move {
            let outcome = AssertUnwindSafe(change).catch_unwind().await;
            cache.invalidate(&key).await;
            outcome
        });
        changed.await.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Waits until no load is under way, and what was given to callers is stored in Redis too, as far as it can be. For the end of a
    /// process: otherwise another may wait for the lock of one that is gone.
    pub async fn settled(&self) {
        self.inner.background.settled().await;
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
        let _counted = self.background.count();
        // Somebody may have brought it since we looked.
        if let Some(entry) = self.local.get(&key) {
            return Ok(entry.value.clone());
        }
        let epoch = self.epoch(&key);
        let found = self.find(&key).await;
        if let Some((value, fresh_for)) = found.as_ref().and_then(|found| self.take_in(&key, epoch, found)) {
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
        let Some(found) = found else {
            // Redis is away, or there is none.
            self.counters.misses.count();
            let value = self.load(load).await?;
            self.keep(&key, epoch, &value);
            return Ok(value);
        };
        self.load_alone(key, epoch, found.version, load).await
    }

    /// Loads a key that nobody has, one process at a time if possible.
    async fn load_alone<F, L>(self: Arc<Self>, key: K, epoch: u64, mut version: Vec<u8>, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let wait = self.settings.wait_at_most;
        let mut locking = Box::pin(self.clone().lock_and_look(key.clone(), epoch, wait));
        let mut guard = None;
        let mut waiting = true;
        if let Ok(looked) = tokio::time::timeout(wait / 2, &mut locking).await {
            waiting = false;
            match looked {
                Looked::Found(value, guard) => {
                    self.background.spawn(release(Some(guard)));
                    return Ok(value);
                }
                Looked::Alone(got, seen) => (guard, version) = (Some(got), seen.unwrap_or(version)),
                Looked::Unlocked => {}
            }
        }
        self.counters.misses.count();
        let mut loading = Box::pin(self.load(load));
        let outcome = loop {
            tokio::select! {
                outcome = &mut loading => break outcome,
                // Whoever has the lock takes long, or is dead: we load as well, and take what comes first.
                looked = &mut locking, if waiting => {
                    waiting = false;
                    match looked {
                        Looked::Found(value, guard) => {
                            self.background.spawn(release(Some(guard)));
                            return Ok(value);
                        }
                        Looked::Alone(got, _) => guard = Some(got),
                        Looked::Unlocked => {}
                    }
                }
                // What we load is old by now: whoever loads what is new need not wait for us.
                () = self.forgotten.notified(), if guard.is_some() => {
                    if self.epoch(&key) != epoch {
                        self.background.spawn(release(guard.take()));
                    }
                }
            }
        };
        drop(loading);
        let value = outcome.inspect_err(|_| self.background.spawn(release(guard.take())))?;
        let times = self.keep(&key, epoch, &value);
        // Nobody waits for this.
        self.background.spawn(self.clone().store(key, version, value.clone(), times, guard));
        Ok(value)
    }

    /// Waits for the lock of a key, and looks once more whether somebody has brought it.
    async fn lock_and_look(self: Arc<Self>, key: K, epoch: u64, wait: Duration) -> Looked<V> {
        let remote = self.settings.remote.as_ref();
        let Some(lock) = remote.and_then(|remote| remote.lock(&self.settings.name, &key.to_string())) else {
            return Looked::Unlocked;
        };
        let got = match lock.try_lock().await {
            Err(LockError::NotAcquired { .. }) => lock.lock_within(wait).await,
            other => other,
        };
        match got {
            Ok(guard) => {
                let found = self.find(&key).await;
                match found.as_ref().and_then(|found| self.take_in(&key, epoch, found)) {
                    Some((value, _)) => {
                        self.counters.of_hit(&value, |counters| &counters.remote_hits).count();
                        Looked::Found(value, guard)
                    }
                    None => Looked::Alone(guard, found.map(|found| found.version)),
                }
            }
            Err(error) => {
                tracing::debug!(%error, "loading without a lock");
                Looked::Unlocked
            }
        }
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
        let _counted = self.background.count();
        let epoch = self.epoch(&key);
        let is_fresh =
            |found: &Found| self.take_in(&key, epoch, found).is_some_and(|(_, fresh_for)| !fresh_for.is_zero());
        let (mut version, mut guard) = (None, None);
        if let Some(found) = self.find(&key).await {
            if is_fresh(&found) {
                return;
            }
            let remote = self.settings.remote.as_ref();
            let Some(lock) = remote.and_then(|remote| remote.lock(&self.settings.name, &key.to_string())) else {
                return;
            };
            match lock.try_lock().await {
                Ok(got) => guard = Some(got),
                // Somebody else is at it. Looking again at once would not help.
                Err(LockError::NotAcquired { .. }) => return tokio::time::sleep(REFRESH_PAUSE).await,
                Err(_) => self.counters.away.count(),
            }
            // A second look: somebody may have just finished.
            let found = if guard.is_some() { self.find(&key).await.unwrap_or(found) } else { found };
            if is_fresh(&found) {
                return release(guard).await;
            }
            version = Some(found.version);
        }
        match self.load(load).await {
            Ok(value) => {
                let times = self.keep(&key, epoch, &value);
                if let Some(version) = version {
                    self.clone().store(key, version, value, times, guard).await;
                }
            }
            Err(_) => {
                self.counters.errors.count();
                release(guard).await;
                tokio::time::sleep(REFRESH_PAUSE).await;
            }
        }
    }

    async fn load<F, L>(&self, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send,
        F: Future<Output = Result<Option<V>, E>> + Send,
    {
        let loading = async {
            // Longer than anybody waits for it, nobody needs it. The semaphore is never closed.
            let place = tokio::time::timeout(self.settings.wait_at_most, self.loads.acquire()).await;
            let _place = place.map_err(|_| Error::TooSlow)?;
            self.counters.loads.count();
            load().await.map_err(|error| Error::Source(Arc::new(error)))
        };
        let loaded = tokio::time::timeout(self.settings.load_within, loading).await;
        Ok(loaded.unwrap_or(Err(Error::TooSlow))?.map(Arc::new))
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
        let here_for = self.times(value.is_some()).here_for;
        // What is not refreshed is not kept for longer than it is fresh.
        let kept_for = if self.settings.refresh_after.is_some() { here_for } else { here_for.min(fresh_for) };
        self.keep_here(key, epoch, value.clone(), fresh_for, kept_for);
        Some((value, fresh_for))
    }

    /// How long a new value, or that there is none, is kept, is fresh, and is kept in the process.
    fn times(&self, exists: bool) -> Times {
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
    fn keep(&self, key: &K, epoch: u64, value: &Known<V>) -> Times {
        let times = self.times(value.is_some());
        self.keep_here(key, epoch, value.clone(), times.fresh_for, times.here_for);
        times
    }

    /// Stores in Redis what was loaded after this version was read, and gives the lock back.
    async fn store(self: Arc<Self>, key: K, version: Vec<u8>, value: Known<V>, times: Times, guard: Option<Guard>) {
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

    fn cannot_be_written(&self, error: &serde_json::Error) -> bool {
        tracing::error!(cache = self.settings.name, %error, "a value cannot be written as JSON; it is not kept in Redis");
        true
    }

    /// Redis could not be told that a key is gone: it is tried again until the value would have expired.
    fn forget_later(self: Arc<Self>, key: K, text: String) {
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
        self.forgotten.notify_waiters();
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
        self.forgotten.notify_waiters();
    }
}

/// Carries it out even if the caller goes away.
async fn to_the_end<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down, and the caller with it.
            Err(_) => std::future::pending().await,
        },
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

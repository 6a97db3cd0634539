//! The public API of the cache.

use std::fmt;
use std::hash::RandomState;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::{Notify, Semaphore};
use tokio_util::task::TaskTracker;

use crate::builder::{Builder, CacheKey, CacheValue};
use crate::entry::{Cached, Entry, EntryExpiry};
use crate::error::Error;
use crate::filter::Filter;
use crate::listener::InvalidationListener;
use crate::remote::VERSION_TTL;
use crate::single_flight::SingleFlight;
use crate::stats::{Counters, Stats};

pub(crate) type LoadResult<V, E> = Result<Cached<V>, Error<E>>;

/// How many invalidations may be retried at once while Redis is unavailable. Further ones are left to the expiry.
const MAX_PENDING_INVALIDATIONS: usize = 1024;
/// Keys are divided by hash into this many shards, each with an epoch and a signal.
pub(crate) const SHARDS: usize = 1024;
const WARM_CONCURRENCY: usize = 16;

/// A read-through cache: values by key from a source, kept in the process and, if configured, in Redis. Cheap to clone. Created by a
/// [`Builder`].
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
/// // `update` changes the source and then invalidates the key.
/// prices.update(&7, async { Ok::<_, std::io::Error>(PRICE.store(450, Ordering::SeqCst)) }).await?;
/// assert_eq!(price().await?.as_deref(), Some(&450));
///
/// // The cache also remembers that a key does not exist.
/// assert_eq!(prices.get_or_load(&8, || async { Ok(None) }).await?, None);
/// assert_eq!(prices.get_or_load(&8, || async { panic!("cached") }).await?, None);
/// # Ok(()) }
/// ```
pub struct Cache<K: CacheKey, V: CacheValue, E> {
    inner: Arc<Inner<K, V, E>>,
}

pub(crate) struct Inner<K: CacheKey, V: CacheValue, E> {
    pub(crate) settings: Builder,
    pub(crate) local: moka::sync::Cache<K, Arc<Entry<V>>>,
    /// Counts invalidations by shard: a value that was read in an earlier epoch must not be inserted.
    pub(crate) epochs: Box<[AtomicU64]>,
    pub(crate) hasher: RandomState,
    pub(crate) loads: Arc<SingleFlight<K, LoadResult<V, E>>>,
    pub(crate) refreshes: Arc<SingleFlight<K, ()>>,
    pub(crate) load_permits: Semaphore,
    /// By shard, like `epochs`: wakes tasks that load or wait for a key when it is invalidated or its load in another process ends.
    pub(crate) signals: Box<[Notify]>,
    pub(crate) invalidation_permits: Arc<Semaphore>,
    /// Loads, and the storing of values that callers already have.
    pub(crate) tasks: TaskTracker,
    pub(crate) counters: Counters,
    pub(crate) filter: Option<Filter<K>>,
}

impl<K: CacheKey, V: CacheValue, E: Send + Sync + 'static> Cache<K, V, E> {
    pub(crate) fn new(settings: Builder, filter: Option<Filter<K>>) -> Self {
        let tasks = TaskTracker::new();
        // `TaskTracker::wait` returns only on a closed tracker; a closed one still accepts tasks.
        tasks.close();
        let inner = Arc::new(Inner {
            local: moka::sync::Cache::builder().max_capacity(settings.local_capacity).expire_after(EntryExpiry).build(),
            epochs: (0..SHARDS).map(|_| AtomicU64::new(0)).collect(),
            hasher: RandomState::new(),
            loads: Arc::new(SingleFlight::new()),
            refreshes: Arc::new(SingleFlight::new()),
            load_permits: Semaphore::new(settings.max_concurrent_loads),
            signals: (0..SHARDS).map(|_| Notify::new()).collect(),
            invalidation_permits: Arc::new(Semaphore::new(MAX_PENDING_INVALIDATIONS)),
            tasks,
            counters: Counters::default(),
            filter,
            settings,
        });
        if let Some(remote) = &inner.settings.remote {
            let listener: Weak<dyn InvalidationListener> =
                Arc::downgrade(&(inner.clone() as Arc<dyn InvalidationListener>));
            remote.register(&inner.settings.name, listener);
        }
        Self { inner }
    }

    /// Returns the value of a key: from the process, from Redis, or from the source, which is called once for all concurrent callers.
    /// `None` means that the key does not exist.
    ///
    /// # Errors
    /// [`Error::Source`] if the source failed, [`Error::Timeout`] if it took too long, [`Error::Panicked`] if it panicked. An unavailable
    /// Redis is not an error.
    pub async fn get_or_load<F, L>(&self, key: &K, load: L) -> LoadResult<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let inner = &self.inner;
        if let Some(entry) = inner.local.get(key) {
            if entry.is_fresh() {
                inner.counters.for_hit(&entry.value, |counters| &counters.local_hits).increment();
                return Ok(entry.value.clone());
            }
            inner.counters.stale_hits.increment();
            inner.start_refresh(key, load);
            return Ok(entry.value.clone());
        }
        let (handle, started) = inner.loads.join(key, || inner.clone().fetch(key.clone(), load));
        if !started {
            inner.counters.coalesced.increment();
        }
        let result = match tokio::time::timeout(inner.settings.wait_timeout, handle.result()).await {
            Ok(Some(result)) => result,
            Ok(None) => Err(Error::Panicked),
            Err(_) => Err(Error::Timeout),
        };
        if result.is_err() {
            inner.counters.errors.increment();
        }
        result
    }

    /// Writes a new value to the source and caches it: the change must write to the source what it returns. If other changes of the key
    /// overlap with this one, the cache cannot know which of them reached the source last; it then invalidates the key, as
    /// [`update`](Self::update) does, and the next reader loads it. The same happens if the change fails.
    ///
    /// The operation completes even if the caller is dropped.
    ///
    /// # Errors
    /// The error of the change.
    ///
    /// # Panics
    /// If the change panics.
    pub async fn put<C, F>(&self, key: &K, change: F) -> Result<Cached<V>, C>
    where
        C: Send + 'static,
        F: Future<Output = Result<Option<V>, C>> + Send + 'static,
    {
        let (inner, key) = (self.inner.clone(), key.clone());
        let changed = run_detached(async move {
            let (epoch, started) = (inner.epoch(&key), Instant::now());
            let version = inner.version(&key).await;
            let outcome = AssertUnwindSafe(change).catch_unwind().await;
            let outcome = outcome.map(|changed| changed.map(|value| value.map(Arc::new)));
            match &outcome {
                // The version expires, so after a long change it says nothing about other changes.
                Ok(Ok(value)) if started.elapsed() < VERSION_TTL / 2 => {
                    inner.put(&key, epoch, version, value.clone()).await;
                }
                _ => inner.invalidate(&key).await,
            }
            outcome
        });
        changed.await.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Loads many keys ahead of demand, a few at a time.
    ///
    /// # Errors
    /// The first error of a load; the other keys are loaded nevertheless.
    pub async fn warm<F, L>(&self, keys: impl IntoIterator<Item = K>, load: L) -> Result<(), Error<E>>
    where
        L: Fn(K) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let load = Arc::new(load);
        let loads = keys.into_iter().map(|key| {
            let (load, loaded_key) = (load.clone(), key.clone());
            async move { self.get_or_load(&key, move || load(loaded_key)).await.map(drop) }
        });
        let loaded: Vec<_> = futures_util::stream::iter(loads).buffer_unordered(WARM_CONCURRENCY).collect().await;
        loaded.into_iter().collect()
    }

    /// Invalidates a key after its value has changed in the source: later calls on this cache do not return the old value. Other processes
    /// stop returning it when the message arrives, or after their local TTL if the message is lost. If Redis is unavailable, the
    /// invalidation is retried in the background until the value would have expired.
    ///
    /// The operation completes even if the caller is dropped.
    pub async fn invalidate(&self, key: &K) {
        let (inner, key) = (self.inner.clone(), key.clone());
        run_detached(async move { inner.invalidate(&key).await }).await;
    }

    /// Changes the source and then invalidates the key, also if the change fails (it may have been carried out in part) or the caller is
    /// dropped in between.
    ///
    /// # Errors
    /// The error of the change.
    ///
    /// # Panics
    /// If the change panics.
    pub async fn update<T, C, F>(&self, key: &K, change: F) -> Result<T, C>
    where
        T: Send + 'static,
        C: Send + 'static,
        F: Future<Output = Result<T, C>> + Send + 'static,
    {
        let (inner, key) = (self.inner.clone(), key.clone());
        let changed = run_detached(async move {
            let outcome = AssertUnwindSafe(change).catch_unwind().await;
            inner.invalidate(&key).await;
            outcome
        });
        changed.await.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Waits until no load is in progress and the values that callers have received are stored in Redis, as far as possible. To be called
    /// before a process exits: otherwise another process may have to wait until the lock of an interrupted load expires.
    pub async fn drain(&self) {
        self.inner.tasks.wait().await;
    }

    /// The counters of the cache.
    pub fn stats(&self) -> Stats {
        self.inner.counters.read()
    }

    /// The name of the cache.
    pub fn name(&self) -> &str {
        &self.inner.settings.name
    }
}

/// Runs a future to completion even if the caller is dropped.
async fn run_detached<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(work).await {
        Ok(output) => output,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down and drops the caller too.
            Err(_) => std::future::pending().await,
        },
    }
}

impl<K: CacheKey, V: CacheValue, E> Clone for Cache<K, V, E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<K: CacheKey, V: CacheValue, E> fmt::Debug for Cache<K, V, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("name", &self.inner.settings.name).finish_non_exhaustive()
    }
}

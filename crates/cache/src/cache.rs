//! The cache as its callers see it.

use std::fmt;
use std::hash::RandomState;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::{Notify, Semaphore};

use crate::background::Background;
use crate::builder::{Builder, Cached, Key};
use crate::entry::{Entry, KeptFor};
use crate::error::Error;
use crate::filter::Filter;
use crate::flight::Flights;
use crate::listener::Told;
use crate::remote::VERSION_KEPT;
use crate::stats::{Counters, Stats};

pub(crate) type Known<V> = Option<Arc<V>>;
pub(crate) type Outcome<V, E> = Result<Known<V>, Error<E>>;

/// How many invalidations are tried again at once while Redis is away. More are left to the expiry.
const MAX_FORGETTING: usize = 1024;
pub(crate) const SHARDS: usize = 1024;
const WARM_AT_ONCE: usize = 16;

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

pub(crate) struct Inner<K: Key, V: Cached, E> {
    pub(crate) settings: Builder,
    pub(crate) local: moka::sync::Cache<K, Arc<Entry<V>>>,
    /// Counts what was declared gone, by hash: what was read before must not be kept after.
    pub(crate) epochs: Box<[AtomicU64]>,
    pub(crate) hasher: RandomState,
    pub(crate) flights: Arc<Flights<K, Outcome<V, E>>>,
    pub(crate) refreshing: Arc<Flights<K, ()>>,
    pub(crate) loads: Semaphore,
    /// By hash, as `epochs`: wakes those who load or wait for a key that was declared gone, or whose load elsewhere has ended.
    pub(crate) signals: Box<[Notify]>,
    pub(crate) forgetting: Arc<Semaphore>,
    pub(crate) background: Background,
    pub(crate) counters: Counters,
    pub(crate) filter: Option<Filter<K>>,
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
            signals: (0..SHARDS).map(|_| Notify::new()).collect(),
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

    /// Writes a new value to the source, and then keeps it: the change must write to the source what it returns. If other changes of the
    /// key overlap with this one, it is unknown here which of them the source saw last; then the key is declared gone, as by
    /// [`update`](Self::update), and the next reader loads it. The same if the change fails.
    ///
    /// It goes on if the caller goes away.
    ///
    /// # Errors
    /// Whatever the change says.
    ///
    /// # Panics
    /// If the change does.
    pub async fn put<C, F>(&self, key: &K, change: F) -> Result<Known<V>, C>
    where
        C: Send + 'static,
        F: Future<Output = Result<Option<V>, C>> + Send + 'static,
    {
        let (inner, key) = (self.inner.clone(), key.clone());
        let changed = to_the_end(async move {
            let (epoch, started) = (inner.epoch(&key), Instant::now());
            let version = inner.version(&key).await;
            let outcome = AssertUnwindSafe(change).catch_unwind().await;
            let outcome = outcome.map(|changed| changed.map(|value| value.map(Arc::new)));
            match &outcome {
                // A version that is not kept for ever cannot be compared for ever.
                Ok(Ok(value)) if started.elapsed() < VERSION_KEPT / 2 => {
                    inner.put(&key, epoch, version, value.clone()).await;
                }
                _ => inner.invalidate(&key).await,
            }
            outcome
        });
        changed.await.unwrap_or_else(|panic| resume_unwind(panic))
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
        to_the_end(async move { inner.invalidate(&key).await }).await;
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
        let (inner, key) = (self.inner.clone(), key.clone());
        let changed = to_the_end(async move {
            let outcome = AssertUnwindSafe(change).catch_unwind().await;
            inner.invalidate(&key).await;
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

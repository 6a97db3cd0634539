//! A Bloom filter in front of a source: answers whether a key can exist.
//!
//! The filter rules a key out only if every existing key is known to be in the filter. That holds as long as
//!
//! - the filter was built from the source, page by page, to the end;
//! - every new key is announced ([`Filter::announce`]) *before* it is written to the source, and is written within
//!   [`FilterConfig::max_create_delay`]. Announcements also go to a filter that is being built, and the build reads the source only after
//!   all keys that were announced before its start have been written;
//! - Redis has lost nothing: a shared filter that is missing, incomplete, or older than the last restart of Redis is not used. Then every
//!   key may exist, and the filter is rebuilt in the background.
//!
//! A background task rebuilds the filter for as long as the filter exists. After an error, a panic or a timeout it retries with a backoff.
//!
//! On a cluster it is unknown whether a node was restarted, so there the shared filter never rules a key out.

mod local;
mod shared;

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::builder::{CacheKey, MAX_DURATION};
use crate::remote::Remote;
use local::LocalFilter;
use shared::{Generation, SharedFilter};

/// The settings of a filter.
#[derive(Debug, Clone, Copy)]
pub struct FilterConfig {
    /// The number of keys for which the false positive rate holds; with more keys it rises. Default: 1,000,000.
    pub capacity: usize,
    /// The maximum time between the announcement of a key and its being written to the source. A build waits for this time before it
    /// reads the source. Default: 10 seconds.
    pub max_create_delay: Duration,
    /// How often the filter is rebuilt, which removes deleted keys. At least 100 ms. Default: 1 hour.
    pub rebuild_interval: Duration,
}

impl Default for FilterConfig {
    fn default() -> Self {
        let (max_create_delay, rebuild_interval) = (Duration::from_secs(10), Duration::from_secs(3600));
        Self { capacity: 1_000_000, max_create_delay, rebuild_interval }
    }
}

impl FilterConfig {
    fn clamped(self) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number below 2^32")]
        let max_capacity = (MAX_BITS / bits_per_key()) as usize;
        Self {
            capacity: self.capacity.clamp(1, max_capacity),
            // Only the upper bound is limited: if the delay were too short, the filter could rule out a key that exists.
            max_create_delay: self.max_create_delay.min(MAX_DURATION),
            rebuild_interval: self.rebuild_interval.clamp(MIN_REBUILD_INTERVAL, MAX_DURATION),
        }
    }
}

fn bits_per_key() -> f64 {
    -FALSE_POSITIVE_RATE.ln() / (2f64.ln() * 2f64.ln())
}

/// At the capacity, 1 of 200 missing keys passes.
const FALSE_POSITIVE_RATE: f64 = 0.005;
/// Slightly below the maximum size of a string in Redis (512 MiB), in bits.
const MAX_BITS: f64 = 4.0e9;
const MIN_REBUILD_INTERVAL: Duration = Duration::from_millis(100);
/// How long the source may take to return a page of keys.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Page<K> = Pin<Box<dyn Future<Output = Result<Vec<K>, BoxError>> + Send>>;

/// A new key could not be announced because Redis is unavailable. The key must not be created now: another node could rule it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the new key could not be announced because Redis is unavailable")]
pub struct AnnounceError;

/// Answers whether a key can exist. Cheap to clone; see [`Builder::build_filtered`](crate::Builder::build_filtered).
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use stampede_cache::{Filter, FilterConfig};
///
/// let config = FilterConfig { max_create_delay: Duration::from_millis(10), ..FilterConfig::default() };
/// // The source has the keys 1 to 100 and is read in pages.
/// let filter = Filter::<u64>::local(config, |after| async move {
///     let from = after.unwrap_or(0) + 1;
///     Ok::<_, std::io::Error>((from..=100).take(30).collect())
/// });
/// assert!(filter.may_exist(&1000).await, "not built yet");
/// while !filter.is_current().await {
///     tokio::time::sleep(Duration::from_millis(5)).await;
/// }
/// assert!(filter.may_exist(&7).await && !filter.may_exist(&1000).await);
/// filter.announce(&1000).await?; // then write it to the source
/// assert!(filter.may_exist(&1000).await);
/// # Ok(()) }
/// ```
pub struct Filter<K> {
    inner: Arc<Inner<K>>,
    _rebuild: Arc<RebuildTask>,
}

struct Inner<K> {
    bits: Bits,
    config: FilterConfig,
    keys_after: Box<dyn Fn(Option<K>) -> Page<K> + Send + Sync>,
    /// Notified when a caller finds that there is no current filter.
    rebuild_requested: Notify,
}

enum Bits {
    Local(Box<LocalFilter>),
    Shared(Box<SharedFilter>),
}

/// Aborts the rebuilds when the last clone of the filter is dropped.
struct RebuildTask(AbortHandle);

impl Drop for RebuildTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<K: CacheKey> Filter<K> {
    /// A filter in this process. Correct only if no other process creates keys.
    ///
    /// `keys_after` reads the source: it returns the page of keys after the given one, or the first page. An empty page is the end.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn local<F, E>(config: FilterConfig, keys_after: impl Fn(Option<K>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Vec<K>, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let config = config.clamped();
        Self::new(Bits::Local(Box::new(LocalFilter::new(config.capacity))), config, keys_after)
    }

    /// A filter in Redis, shared by all processes. One of them builds it. The name is a part of its keys in Redis.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn shared<F, E>(
        remote: &Remote,
        name: &str,
        config: FilterConfig,
        keys_after: impl Fn(Option<K>) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Vec<K>, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let config = config.clamped();
        let shared = SharedFilter::new(remote.clone(), name, config.capacity);
        Self::new(Bits::Shared(Box::new(shared)), config, keys_after)
    }

    fn new<F, E>(bits: Bits, config: FilterConfig, keys_after: impl Fn(Option<K>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Vec<K>, E>> + Send + 'static,
        E: Into<BoxError>,
    {
        let keys_after = Box::new(move |after: Option<K>| -> Page<K> {
            let page = keys_after(after);
            Box::pin(async move { page.await.map_err(Into::into) })
        });
        let inner = Arc::new(Inner { bits, config, keys_after, rebuild_requested: Notify::new() });
        let rebuild = RebuildTask(tokio::spawn(inner.clone().run_rebuilds()).abort_handle());
        Self { inner, _rebuild: Arc::new(rebuild) }
    }

    /// Adds a key that is about to be created. Call it before the key is written to the source, and write the key through
    /// [`Cache::update`](crate::Cache::update), because the cache may have stored that the key does not exist.
    ///
    /// # Errors
    /// [`AnnounceError`]: the key must not be created now.
    pub async fn announce(&self, key: &K) -> Result<(), AnnounceError> {
        let text = key.to_string();
        match &self.inner.bits {
            Bits::Local(local) => local.announce(&text),
            Bits::Shared(shared) => shared.announce(&text).await?,
        }
        Ok(())
    }

    /// Whether the key may exist. Also `true` if there is no current filter.
    pub async fn may_exist(&self, key: &K) -> bool {
        let text = key.to_string();
        let answer = match &self.inner.bits {
            Bits::Local(local) => local.may_exist(&text),
            Bits::Shared(shared) => shared.may_exist(&text).await,
        };
        if answer.is_none() {
            self.inner.rebuild_requested.notify_one();
        }
        answer.unwrap_or(true)
    }

    /// Whether the filter is built and can rule keys out.
    pub async fn is_current(&self) -> bool {
        self.inner.bits.is_current().await
    }
}

impl<K: CacheKey> Inner<K> {
    async fn run_rebuilds(self: Arc<Self>) {
        let mut backoff = MIN_BACKOFF;
        loop {
            // Reading the source is code of the caller and may panic.
            let rebuilt = AssertUnwindSafe(self.rebuild()).catch_unwind().await;
            match rebuilt.unwrap_or_else(|_| Err("reading the source panicked".into())) {
                Ok(()) => {
                    backoff = MIN_BACKOFF;
                    // Wait for the next interval, or until the filter is found to be missing.
                    let _ = tokio::time::timeout(self.config.rebuild_interval, self.wait_until_missing()).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "the filter could not be rebuilt; no key is ruled out");
                    tokio::time::sleep(backoff).await;
                    backoff = (2 * backoff).min(MAX_BACKOFF);
                }
            }
        }
    }

    /// Waits until a caller has found that there is no current filter.
    async fn wait_until_missing(&self) {
        loop {
            self.rebuild_requested.notified().await;
            // The request may be older than the last build, or another process may have built the filter.
            tokio::time::sleep(MIN_BACKOFF).await;
            if !self.bits.is_current().await {
                return;
            }
        }
    }

    /// Builds the filter from the source, unless it is current or another process builds it.
    async fn rebuild(&self) -> Result<(), BoxError> {
        match &self.bits {
            Bits::Local(local) => {
                local.begin();
                tokio::time::sleep(self.config.max_create_delay).await;
                self.read_all(None).await?;
                local.finish();
            }
            Bits::Shared(shared) => {
                if let Some((generation, guard)) = shared.begin(&self.config).await? {
                    // An announcement that began before the build may still be running, so its maximum duration is added.
                    tokio::time::sleep(self.config.max_create_delay + shared.max_announce_duration()).await;
                    let built = async {
                        self.read_all(Some(&generation)).await?;
                        shared.finish(&generation).await
                    };
                    let built = built.await;
                    if built.is_err() {
                        shared.delete_bits(&generation).await;
                    }
                    let released = guard.release().await;
                    built?;
                    released?;
                }
            }
        }
        Ok(())
    }

    /// Adds all keys of the source to the filter that is being built.
    async fn read_all(&self, generation: Option<&Generation>) -> Result<(), BoxError> {
        let mut after: Option<K> = None;
        loop {
            let page = tokio::time::timeout(PAGE_TIMEOUT, (self.keys_after)(after.clone()));
            let page = page.await.map_err(|_| "timed out reading a page of keys from the source")??;
            let texts: Vec<String> = page.iter().map(ToString::to_string).collect();
            match (&self.bits, generation) {
                (Bits::Shared(shared), Some(generation)) => shared.add(generation, &texts).await?,
                (Bits::Local(local), _) => local.add(&texts),
                (Bits::Shared(_), None) => {}
            }
            let Some(last) = page.into_iter().next_back() else { return Ok(()) };
            let last = Some(last);
            if last == after {
                return Err("the source returned the same page twice".into());
            }
            after = last;
        }
    }
}

impl Bits {
    async fn is_current(&self) -> bool {
        match self {
            Self::Local(local) => local.may_exist("").is_some(),
            Self::Shared(shared) => shared.may_exist("").await.is_some(),
        }
    }
}

impl<K> Clone for Filter<K> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), _rebuild: self._rebuild.clone() }
    }
}

impl<K> fmt::Debug for Filter<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter")
    }
}

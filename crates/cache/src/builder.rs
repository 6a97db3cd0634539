//! The settings of a cache.

use std::fmt::Display;
use std::hash::Hash;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cache::Cache;
use crate::filter::Filter;
use crate::remote::Remote;

/// The upper bound of all durations, so that adding one to an instant cannot overflow.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Whether a name is not empty and has no characters with a meaning in keys and messages.
pub(crate) fn is_valid_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(|c: char| ":{}".contains(c) || c.is_control())
}

/// The bounds of a key. Its [`Display`] text identifies it in Redis and in messages, and [`FromStr`] must parse that text. If it does not,
/// every invalidation by another process clears the whole local level.
pub trait CacheKey: Hash + Eq + Clone + Display + FromStr + Send + Sync + 'static {}

impl<K: Hash + Eq + Clone + Display + FromStr + Send + Sync + 'static> CacheKey for K {}

/// The bounds of a value.
pub trait CacheValue: Serialize + DeserializeOwned + Send + Sync + 'static {}

impl<V: Serialize + DeserializeOwned + Send + Sync + 'static> CacheValue for V {}

/// Builds a [`Cache`].
///
/// ```
/// # #[tokio::main] async fn main() {
/// use std::time::Duration;
/// use stampede_cache::{Builder, Cache};
///
/// let shops: Cache<u64, String, std::io::Error> = Builder::new("shop")
///     .expire_after(Duration::from_secs(600))
///     .refresh_after(Duration::from_secs(60))
///     .expire_empty_after(Duration::from_secs(10))
///     .local(10_000, Duration::from_secs(5))
///     .build();
/// let shop = shops.get_or_load(&7, || async { Ok(Some("Seven".to_owned())) }).await.unwrap();
/// assert_eq!(*shop.unwrap(), "Seven");
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Builder {
    pub(crate) name: String,
    pub(crate) expire_after: Duration,
    pub(crate) refresh_after: Option<Duration>,
    pub(crate) jitter: f64,
    pub(crate) expire_empty_after: Duration,
    pub(crate) local_capacity: u64,
    pub(crate) local_ttl: Duration,
    pub(crate) wait_timeout: Duration,
    pub(crate) load_timeout: Duration,
    pub(crate) max_concurrent_loads: usize,
    pub(crate) remote: Option<Remote>,
}

impl Builder {
    /// The name is a part of the keys in Redis, after that of the application, so it must be unique within the application. Use a new name
    /// when the type of the values changes; otherwise processes of the old and the new version keep replacing each other's values.
    ///
    /// # Panics
    /// If the name is empty or contains `:`, `{`, `}` or a control character, which have a meaning in keys.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        assert!(is_valid_name(&name), "{name:?} is not a valid name for a cache");
        Self {
            name,
            expire_after: Duration::from_secs(600),
            refresh_after: None,
            jitter: 0.1,
            expire_empty_after: Duration::from_secs(30),
            local_capacity: 10_000,
            local_ttl: Duration::from_secs(5),
            wait_timeout: Duration::from_secs(5),
            load_timeout: Duration::from_secs(30),
            max_concurrent_loads: 64,
            remote: None,
        }
    }

    /// When a value expires. Default: 10 minutes.
    #[must_use]
    pub fn expire_after(mut self, time: Duration) -> Self {
        self.expire_after = time.min(MAX_DURATION);
        self
    }

    /// When a value becomes stale. Protects against a *cache breakdown* (many callers of one expired key): a stale value is still returned
    /// at once, while one process loads the key in the background. Default: values are fresh until they expire.
    #[must_use]
    pub fn refresh_after(mut self, time: Duration) -> Self {
        self.refresh_after = Some(time.min(MAX_DURATION));
        self
    }

    /// The maximum fraction, from 0 to 1, by which lifetimes are randomly shortened. Protects against a *cache avalanche*: values that were
    /// loaded at the same time do not expire at the same time. Default: 0.1.
    #[must_use]
    pub fn jitter(mut self, fraction: f64) -> Self {
        self.jitter = if fraction.is_nan() { 0.0 } else { fraction.clamp(0.0, 1.0) };
        self
    }

    /// How long the cache remembers that a key does not exist. Protects against *cache penetration*: repeated requests for a missing key do
    /// not reach the source. Default: 30 seconds.
    #[must_use]
    pub fn expire_empty_after(mut self, time: Duration) -> Self {
        self.expire_empty_after = time.min(MAX_DURATION);
        self
    }

    /// How many values the process keeps, and for how long if there is also a Redis level. The TTL bounds how long a stale value can be
    /// returned after its invalidation message was lost. Without Redis, values are kept until they expire. Default: 10,000 values for
    /// 5 seconds.
    #[must_use]
    pub fn local(mut self, capacity: u64, ttl: Duration) -> Self {
        (self.local_capacity, self.local_ttl) = (capacity, ttl.min(MAX_DURATION));
        self
    }

    /// How long a caller waits for a value that is in neither level before it gets [`Error::Timeout`](crate::Error::Timeout). Default:
    /// 5 seconds.
    #[must_use]
    pub fn wait_timeout(mut self, time: Duration) -> Self {
        self.wait_timeout = time.min(MAX_DURATION);
        self
    }

    /// How long a load may take, at most 30 minutes. Default: 30 seconds.
    #[must_use]
    pub fn load_timeout(mut self, time: Duration) -> Self {
        self.load_timeout = time.min(Duration::from_secs(1800));
        self
    }

    /// How many calls of the source may run at once in this process, also while Redis is unavailable. Default: 64.
    #[must_use]
    pub fn max_concurrent_loads(mut self, number: usize) -> Self {
        self.max_concurrent_loads = number.max(1);
        self
    }

    /// Adds Redis as the second level and as the channel for invalidations between processes.
    #[must_use]
    pub fn remote(mut self, remote: Remote) -> Self {
        self.remote = Some(remote);
        self
    }

    /// Builds the cache. `E` is the error of its source.
    pub fn build<K: CacheKey, V: CacheValue, E: Send + Sync + 'static>(self) -> Cache<K, V, E> {
        Cache::new(self, None)
    }

    /// Builds the cache with a filter in front of its source. Protects against *cache penetration* by any number of different keys: keys
    /// that do not exist do not reach the source. New keys must be announced to the filter before they are written to the source.
    pub fn build_filtered<K: CacheKey, V: CacheValue, E: Send + Sync + 'static>(
        self,
        filter: Filter<K>,
    ) -> Cache<K, V, E> {
        Cache::new(self, Some(filter))
    }
}

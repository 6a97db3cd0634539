//! How a cache behaves.

use std::fmt::Display;
use std::hash::Hash;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cache::Cache;
use crate::filter::Filter;
use crate::remote::Remote;

/// No time is longer: for ever.
pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// Not empty, and without characters that have a meaning in keys and messages.
pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(|letter: char| ":{}".contains(letter) || letter.is_control())
}

/// What a key must be able to do: its text is its name in Redis and in messages, and [`FromStr`] reads what [`Display`] writes. If it does
/// not, every message from another process clears the local level.
pub trait Key: Hash + Eq + Clone + Display + FromStr + Send + Sync + 'static {}

impl<K: Hash + Eq + Clone + Display + FromStr + Send + Sync + 'static> Key for K {}

/// What a value must be able to do.
pub trait Cached: Serialize + DeserializeOwned + Send + Sync + 'static {}

impl<V: Serialize + DeserializeOwned + Send + Sync + 'static> Cached for V {}

/// The settings of a [`Cache`], each a protection against something.
///
/// ```
/// # #[tokio::main] async fn main() {
/// use std::time::Duration;
/// use stampede_cache::{Builder, Cache};
///
/// let shops: Cache<u64, String, std::io::Error> = Builder::new("shop")
///     .expire_after(Duration::from_secs(600))
///     .refresh_after(Duration::from_secs(60))
///     .empty_for(Duration::from_secs(10))
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
    pub(crate) empty_for: Duration,
    pub(crate) local_capacity: u64,
    pub(crate) local_for: Duration,
    pub(crate) wait_at_most: Duration,
    pub(crate) load_within: Duration,
    pub(crate) loads_at_once: usize,
    pub(crate) remote: Option<Remote>,
}

impl Builder {
    /// The name is a part of the keys in Redis, after that of the application: every cache of an application has its own.
    /// Give it another name when the type of its values changes, or processes of both versions load each other's values over and over.
    ///
    /// # Panics
    /// If the name is empty or has one of `:{}` or a control character in it, which have their meaning in keys.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        assert!(is_name(&name), "{name:?} cannot be the name of a cache");
        Self {
            name,
            expire_after: Duration::from_secs(600),
            refresh_after: None,
            jitter: 0.1,
            empty_for: Duration::from_secs(30),
            local_capacity: 10_000,
            local_for: Duration::from_secs(5),
            wait_at_most: Duration::from_secs(5),
            load_within: Duration::from_secs(30),
            loads_at_once: 64,
            remote: None,
        }
    }

    /// How long a value is kept at most; ten minutes without this.
    #[must_use]
    pub fn expire_after(mut self, time: Duration) -> Self {
        self.expire_after = time.min(LONGEST);
        self
    }

    /// *Breakdown*: after this time a value is stale, and is still given at once while one process loads it anew in the background. Nobody
    /// waits but for a key that nobody has. Without this a value is as good as new until it expires.
    #[must_use]
    pub fn refresh_after(mut self, time: Duration) -> Self {
        self.refresh_after = Some(time.min(LONGEST));
        self
    }

    /// *Avalanche*: values expire earlier by a random part of their time, this one at most (0 to 1; a tenth without this), so that what
    /// was loaded together does not expire together.
    #[must_use]
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) };
        self
    }

    /// *Penetration*: that there is no value is remembered for this time; half a minute without this.
    #[must_use]
    pub fn empty_for(mut self, time: Duration) -> Self {
        self.empty_for = time.min(LONGEST);
        self
    }

    /// How many values the process keeps, and for how long if Redis keeps them too: so old may a value be whose message was lost.
    /// 10,000 for five seconds without this. Without Redis they are kept until they expire.
    #[must_use]
    pub fn local(mut self, capacity: u64, time: Duration) -> Self {
        (self.local_capacity, self.local_for) = (capacity, time.min(LONGEST));
        self
    }

    /// How long a caller waits for a value that nobody has; five seconds without this. Then it hears
    /// [`Error::TooSlow`](crate::Error::TooSlow).
    #[must_use]
    pub fn wait_at_most(mut self, time: Duration) -> Self {
        self.wait_at_most = time.min(LONGEST);
        self
    }

    /// How long the source may take, half a minute without this. At most half an hour.
    #[must_use]
    pub fn load_within(mut self, time: Duration) -> Self {
        self.load_within = time.min(Duration::from_secs(1800));
        self
    }

    /// How many calls of the source may be under way at once in this process, whatever happens to Redis; 64 without this.
    #[must_use]
    pub fn loads_at_once(mut self, number: usize) -> Self {
        self.loads_at_once = number.max(1);
        self
    }

    /// Redis as the second level, and to tell the other processes what is gone. Without it the process is on its own.
    #[must_use]
    pub fn remote(mut self, remote: Remote) -> Self {
        self.remote = Some(remote);
        self
    }

    /// The cache. `E` is the error of its source.
    pub fn build<K: Key, V: Cached, E: Send + Sync + 'static>(self) -> Cache<K, V, E> {
        Cache::new(self, None)
    }

    /// The cache, with a filter in front of its source. *Penetration*: keys that do not exist do not reach the source, whatever their
    /// number. New keys must be announced to the filter before they are written.
    pub fn build_filtered<K: Key, V: Cached, E: Send + Sync + 'static>(self, filter: Filter<K>) -> Cache<K, V, E> {
        Cache::new(self, Some(filter))
    }
}

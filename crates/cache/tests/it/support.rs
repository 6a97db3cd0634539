use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stampede_cache::{Builder, Cache, Remote, RemoteConfig};
use stampede_testkit::redis;
pub use stampede_testkit::until;

pub type Numbers = Cache<u64, u64, Infallible>;

/// A source that counts its calls and its maximum concurrency.
#[derive(Debug, Clone, Default)]
pub struct Source(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    values: Mutex<HashMap<u64, u64>>,
    calls: AtomicU64,
    concurrent: AtomicU64,
    max_concurrent: AtomicU64,
}

impl Source {
    pub fn set(&self, key: u64, value: u64) {
        self.0.values.lock().unwrap().insert(key, value);
    }

    pub fn value(&self, key: u64) -> Option<u64> {
        self.0.values.lock().unwrap().get(&key).copied()
    }

    pub fn calls(&self) -> u64 {
        self.0.calls.load(Ordering::SeqCst)
    }

    pub fn max_concurrent(&self) -> u64 {
        self.0.max_concurrent.load(Ordering::SeqCst)
    }

    pub async fn read(self, key: u64, load_time: Duration) -> Result<Option<u64>, Infallible> {
        self.0.calls.fetch_add(1, Ordering::SeqCst);
        let now = self.0.concurrent.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.max_concurrent.fetch_max(now, Ordering::SeqCst);
        let value = self.value(key);
        // The value is read before the delay, so it may be outdated when it is returned.
        tokio::time::sleep(load_time).await;
        self.0.concurrent.fetch_sub(1, Ordering::SeqCst);
        Ok(value)
    }

    /// The page of keys after this one.
    pub fn keys_after(&self, after: Option<u64>) -> Vec<u64> {
        let values = self.0.values.lock().unwrap();
        let mut keys: Vec<u64> = values.keys().copied().filter(|key| after.is_none_or(|after| *key > after)).collect();
        keys.sort_unstable();
        keys.truncate(1000);
        keys
    }

    /// Reads a key through the cache.
    pub async fn get(&self, cache: &Numbers, key: u64) -> Option<u64> {
        self.get_slowly(cache, key, Duration::from_millis(1)).await
    }

    /// Reads a key through the cache, with a load that takes the given time.
    pub async fn get_slowly(&self, cache: &Numbers, key: u64, load_time: Duration) -> Option<u64> {
        let source = self.clone();
        cache.get_or_load(&key, move || source.read(key, load_time)).await.unwrap().map(|value| *value)
    }
}

/// The application of all nodes.
pub const APPLICATION: &str = "test";

pub fn remote(port: u16) -> Remote {
    Remote::new(APPLICATION, redis::url(port), RemoteConfig::default()).unwrap()
}

/// The cache of a new node.
pub async fn node(port: u16, settings: impl FnOnce(Builder) -> Builder) -> Numbers {
    settings(Builder::new("numbers").remote(remote(port))).build()
}

/// Changes the source through [`Cache::update`].
pub async fn change(cache: &Numbers, source: &Source, key: u64, value: u64) {
    let source = source.clone();
    let changing = cache.update(&key, async move {
        source.set(key, value);
        Ok::<_, Infallible>(())
    });
    changing.await.unwrap();
}

/// Waits until this many nodes have subscribed to invalidations.
pub async fn listening(port: u16, nodes: usize) {
    until("all nodes have subscribed", || async {
        redis::ask(port, &["pubsub", "numsub", "test:cache:invalidated"]).unwrap().ends_with(&format!("{nodes}"))
    })
    .await;
}

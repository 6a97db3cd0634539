//! The subscription of a process: passes on which keys were declared gone, and which were loaded, to the caches of the process.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use redis::{RedisResult, Value};
use stampede_redis::{Client, timeout_error};

use crate::remote::Keys;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The subscription is asked for a sign of life this often.
const PING_EVERY: Duration = Duration::from_secs(3);

/// A cache that hears what happens to its keys in other processes.
pub(crate) trait Told: Send + Sync {
    /// This key was declared gone.
    fn gone(&self, key: &str);
    /// The load of this key has ended: there may be a value, or the lock may be free.
    fn loaded(&self, key: &str);
    /// Perhaps any key was declared gone: messages may have been missed.
    fn doubtful(&self);
}

/// The caches of a process by their names.
#[derive(Default)]
pub(crate) struct Caches(Mutex<HashMap<String, Vec<Weak<dyn Told>>>>);

impl Caches {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Weak<dyn Told>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn register(&self, name: &str, cache: Weak<dyn Told>) {
        let mut caches = self.lock();
        let named = caches.entry(name.to_owned()).or_default();
        named.retain(|known| known.strong_count() > 0);
        named.push(cache);
    }

    /// Tells those who are still there; forgets the others.
    fn tell_all(&self, what: impl Fn(&dyn Told)) {
        self.lock().retain(|_, caches| {
            caches.retain(|cache| cache.upgrade().inspect(|cache| what(&**cache)).is_some());
            !caches.is_empty()
        });
    }

    fn tell(&self, name: &str, what: impl Fn(&dyn Told)) {
        let known = self.lock().get(name).cloned().unwrap_or_default();
        known.iter().filter_map(Weak::upgrade).for_each(|cache| what(&*cache));
    }
}

/// A message: the cache's name, which has no control characters, and the key.
pub(crate) fn message(cache: &str, key: &str) -> String {
    format!("{cache}\0{key}")
}

/// Listens for ever.
pub(crate) async fn listen(link: Arc<Client>, keys: Arc<Keys>, caches: Arc<Caches>, answer_within: Duration) {
    let mut pause = FIRST_PAUSE;
    loop {
        // A key's `FromStr` is the caller's code. If it panics, the subscription is made again, which clears the local level.
        match AssertUnwindSafe(serve(&link, &keys, &caches, answer_within, &mut pause)).catch_unwind().await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "no subscription; trying again"),
            Err(_) => tracing::error!("a message could not be handled: reading its key panicked"),
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn serve(
    link: &Client,
    keys: &Keys,
    caches: &Caches,
    answer_within: Duration,
    pause: &mut Duration,
) -> RedisResult<()> {
    let (mut sink, mut messages) = link.pubsub().await?.split();
    in_time(answer_within, sink.subscribe(&[&keys.gone, &keys.loaded])).await?;
    *pause = FIRST_PAUSE;
    // Messages that were sent before the subscription were missed.
    caches.tell_all(|cache| cache.doubtful());
    let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING_EVERY, PING_EVERY);
    loop {
        tokio::select! {
            message = messages.next() => {
                let Some(message) = message else { return Ok(()) };
                let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or_default();
                let Some((name, key)) = text.split_once('\0') else { continue };
                if message.get_channel_name() == keys.gone {
                    caches.tell(name, |cache| cache.gone(key));
                } else {
                    caches.tell(name, |cache| cache.loaded(key));
                }
            }
            _ = ping.tick() => in_time(answer_within, sink.ping::<Value>()).await.map(drop)?,
        }
    }
}

async fn in_time<T>(within: Duration, work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    tokio::time::timeout(within, work).await.unwrap_or_else(|_| Err(timeout_error()))
}

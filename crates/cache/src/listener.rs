//! The Redis subscription of a process: passes invalidations and finished loads of other processes on to the caches of this one.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use parking_lot::Mutex;
use redis::{RedisResult, Value};
use stampede_redis::{Client, timeout_error};

use crate::remote::Keys;

const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// How often a ping checks that the subscription is alive.
const PING_INTERVAL: Duration = Duration::from_secs(3);

/// A cache that is notified of what other processes do with its keys.
pub(crate) trait InvalidationListener: Send + Sync {
    /// This key was invalidated.
    fn on_invalidated(&self, key: &str);
    /// The load of this key has ended: there may be a value, or the lock may be free.
    fn on_load_ended(&self, key: &str);
    /// Messages may have been missed, so any key may have been invalidated.
    fn on_messages_missed(&self);
}

/// The caches of a process by name.
#[derive(Default)]
pub(crate) struct Listeners(Mutex<HashMap<String, Vec<Weak<dyn InvalidationListener>>>>);

impl Listeners {
    pub(crate) fn register(&self, name: &str, listener: Weak<dyn InvalidationListener>) {
        let mut listeners = self.0.lock();
        let named = listeners.entry(name.to_owned()).or_default();
        named.retain(|listener| listener.strong_count() > 0);
        named.push(listener);
    }

    /// Notifies all caches, and removes those that were dropped.
    fn notify_all(&self, notify: impl Fn(&dyn InvalidationListener)) {
        self.0.lock().retain(|_, listeners| {
            listeners.retain(|listener| listener.upgrade().inspect(|listener| notify(&**listener)).is_some());
            !listeners.is_empty()
        });
    }

    fn notify(&self, name: &str, notify: impl Fn(&dyn InvalidationListener)) {
        let listeners = self.0.lock().get(name).cloned().unwrap_or_default();
        listeners.iter().filter_map(Weak::upgrade).for_each(|listener| notify(&*listener));
    }
}

/// A message: the cache's name, which has no control characters, and the key.
pub(crate) fn message(cache: &str, key: &str) -> String {
    format!("{cache}\0{key}")
}

/// Keeps a subscription open until the task is aborted.
pub(crate) async fn run_subscription(
    client: Arc<Client>,
    keys: Arc<Keys>,
    listeners: Arc<Listeners>,
    response_timeout: Duration,
) {
    let mut backoff = MIN_BACKOFF;
    loop {
        // `FromStr` of a key is code of the caller. If it panics, the subscription is opened again, which clears the local level.
        match AssertUnwindSafe(receive(&client, &keys, &listeners, response_timeout, &mut backoff)).catch_unwind().await
        {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "the Redis subscription failed; retrying"),
            Err(_) => tracing::error!("parsing the key of an invalidation message panicked"),
        }
        tokio::time::sleep(backoff).await;
        backoff = (2 * backoff).min(MAX_BACKOFF);
    }
}

/// Subscribes and passes messages on until the connection ends.
async fn receive(
    client: &Client,
    keys: &Keys,
    listeners: &Listeners,
    response_timeout: Duration,
    backoff: &mut Duration,
) -> RedisResult<()> {
    let (mut sink, mut messages) = client.pubsub().await?.split();
    with_timeout(response_timeout, sink.subscribe(&[&keys.invalidated, &keys.load_ended])).await?;
    *backoff = MIN_BACKOFF;
    // Messages that were sent before the subscription were missed.
    listeners.notify_all(|listener| listener.on_messages_missed());
    let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING_INTERVAL, PING_INTERVAL);
    loop {
        tokio::select! {
            message = messages.next() => {
                let Some(message) = message else { return Ok(()) };
                let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or_default();
                let Some((name, key)) = text.split_once('\0') else { continue };
                if message.get_channel_name() == keys.invalidated {
                    listeners.notify(name, |listener| listener.on_invalidated(key));
                } else {
                    listeners.notify(name, |listener| listener.on_load_ended(key));
                }
            }
            _ = ping.tick() => with_timeout(response_timeout, sink.ping::<Value>()).await.map(drop)?,
        }
    }
}

async fn with_timeout<T>(timeout: Duration, work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| Err(timeout_error()))
}

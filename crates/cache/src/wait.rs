//! Which process loads a key, and how the others wait for it.
//!
//! The one that has the lock of the key loads it, and renews the lock for as long as that takes. The others wait: for the message that
//! the load has ended, and in case it is lost they look again every [`LOOK_EVERY`]. A lock that is not renewed any more, because its
//! process has died, is taken over when its lease ends.

use std::time::{Duration, Instant};

use stampede_lock::{Error as LockError, Guard};

use crate::builder::{Cached, Key};
use crate::cache::{Inner, Known};
use crate::keep::release;
use crate::remote::Found;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The lease is Redis' time, and ours is in whole milliseconds: a look this much later finds it ended.
const AFTER: Duration = Duration::from_millis(2);

/// What waiting for a key came to.
pub(crate) enum Waited<V> {
    /// Another process has loaded it.
    Found(Known<V>),
    /// It is for this process to load. With the version of the key, if Redis told it.
    Locked(Guard, Option<Vec<u8>>),
    /// No lock: Redis is away, or the others have taken longer than a load may take.
    Unlocked,
}

/// What a look into Redis came to.
enum Looked<V> {
    Value(Known<V>),
    /// There is none. With the version of the key.
    Nothing(Vec<u8>),
    Away,
}

impl<K: Key, V: Cached, E: Send + Sync + 'static> Inner<K, V, E> {
    /// Gets the lock of a key that is not in Redis, or waits until another process has loaded it.
    pub(crate) async fn lock_or_wait(&self, key: &K) -> Waited<V> {
        let remote = self.settings.remote.as_ref();
        let Some(lock) = remote.and_then(|remote| remote.lock(&self.settings.name, &key.to_string())) else {
            return Waited::Unlocked;
        };
        let until = Instant::now() + self.settings.load_within + self.settings.wait_at_most;
        loop {
            // Before the looks, so that no message is missed after them.
            let signal = self.signal(key).notified();
            let lease = match lock.try_lock().await {
                Ok(guard) => return self.look_under_lock(key, guard).await,
                Err(LockError::NotAcquired { remaining }) => remaining.unwrap_or(LOOK_EVERY),
                Err(error) => {
                    tracing::debug!(%error, "loading without a lock");
                    return Waited::Unlocked;
                }
            };
            match self.look(key, true).await {
                Looked::Value(value) => return Waited::Found(value),
                Looked::Away => return Waited::Unlocked,
                Looked::Nothing(_) => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            // By the end of the lease it may have been renewed, and then it is waited for again.
            let _ = tokio::time::timeout((lease + AFTER).min(LOOK_EVERY).min(left), signal).await;
            match self.look(key, false).await {
                Looked::Value(value) => return Waited::Found(value),
                Looked::Nothing(_) if Instant::now() < until => {}
                Looked::Nothing(_) | Looked::Away => return Waited::Unlocked,
            }
        }
    }

    /// Waits until the load of another process has ended, or a while.
    pub(crate) async fn wait_for_load(&self, key: &K) {
        let signal = self.signal(key).notified();
        if let Some(remote) = &self.settings.remote {
            remote.wait(&self.settings.name, &key.to_string()).await;
        }
        let _ = tokio::time::timeout(LOOK_EVERY, signal).await;
    }

    /// Another process may have loaded the key between the last look and the lock.
    async fn look_under_lock(&self, key: &K, guard: Guard) -> Waited<V> {
        match self.look(key, false).await {
            Looked::Value(value) => {
                self.background.spawn(release(Some(guard)));
                Waited::Found(value)
            }
            Looked::Nothing(version) => Waited::Locked(guard, Some(version)),
            Looked::Away => Waited::Locked(guard, None),
        }
    }

    /// `wait`: if there is no value, a message is asked for when its load has ended.
    async fn look(&self, key: &K, wait: bool) -> Looked<V> {
        let epoch = self.epoch(key);
        let Some(found) = self.find_as(key, wait).await else { return Looked::Away };
        match self.take_in(key, epoch, &found) {
            Some((value, _)) => {
                self.counters.of_hit(&value, |counters| &counters.remote_hits).count();
                Looked::Value(value)
            }
            None => Looked::Nothing(found.version),
        }
    }

    /// What Redis knows. `None` if it is away, or there is none.
    pub(crate) async fn find(&self, key: &K) -> Option<Found> {
        self.find_as(key, false).await
    }

    async fn find_as(&self, key: &K, wait: bool) -> Option<Found> {
        let (remote, name, text) = (self.settings.remote.as_ref()?, &self.settings.name, key.to_string());
        let found = if wait { remote.find_or_wait(name, &text).await } else { remote.find(name, &text).await };
        if found.is_none() {
            self.counters.away.count();
        }
        found
    }
}

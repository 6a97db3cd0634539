//! Bringing a key that the process does not have, or has only stale: from Redis, or from the source, one load for everybody.

use std::sync::Arc;
use std::time::Duration;

use stampede_lock::{Error as LockError, Guard};

use crate::builder::{Cached, Key};
use crate::cache::{Inner, Known, Outcome};
use crate::error::Error;
use crate::remote::Found;
use crate::stats::{Counter, Counters};

/// After a refresh that came to nothing, the next is begun so much later.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// What a look under the lock came to.
enum Looked<V> {
    /// Somebody else has brought it.
    Found(Known<V>, Guard),
    /// It is for us to load. With its version, if Redis told.
    Alone(Guard, Option<Vec<u8>>),
    /// No lock: Redis is away, or whoever has it takes too long.
    Unlocked,
}

impl<K: Key, V: Cached, E: Send + Sync + 'static> Inner<K, V, E> {
    /// A key that the process does not have.
    pub(crate) async fn fetch<F, L>(self: Arc<Self>, key: K, load: L) -> Outcome<V, E>
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
    pub(crate) fn refresh_once<F, L>(self: &Arc<Self>, key: &K, load: L)
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

    pub(crate) async fn load<F, L>(&self, load: L) -> Outcome<V, E>
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
    pub(crate) async fn find(&self, key: &K) -> Option<Found> {
        let remote = self.settings.remote.as_ref()?;
        let found = remote.find(&self.settings.name, &key.to_string()).await;
        if found.is_none() {
            self.counters.away.count();
        }
        found
    }
}

pub(crate) async fn release(guard: Option<Guard>) {
    if let Some(guard) = guard
        && let Err(error) = guard.release().await
    {
        tracing::debug!(%error, "the lock of a load was lost before its end");
    }
}

impl Counters {
    pub(crate) fn of_hit<V>(&self, value: &Known<V>, hit: fn(&Self) -> &Counter) -> &Counter {
        if value.is_some() { hit(self) } else { &self.empties }
    }
}

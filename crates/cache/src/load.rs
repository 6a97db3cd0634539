//! Bringing a key that the process does not have, or has only stale: from Redis, or from the source, one load for everybody.

use std::sync::Arc;
use std::time::Duration;

use stampede_lock::{Error as LockError, Guard};

use crate::builder::{Cached, Key};
use crate::cache::{Inner, Known, Outcome};
use crate::error::Error;
use crate::keep::release;
use crate::remote::Found;
use crate::stats::{Counter, Counters};
use crate::wait::Waited;

/// After a refresh that failed, the next is begun so much later.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

impl<K: Key, V: Cached, E: Send + Sync + 'static> Inner<K, V, E> {
    /// A key that the process does not have.
    pub(crate) async fn fetch<F, L>(self: Arc<Self>, key: K, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
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
            let _counted = self.background.count();
            self.counters.misses.count();
            let value = self.load(load).await?;
            self.keep(&key, epoch, &value);
            return Ok(value);
        };
        self.load_alone(key, found.version, load).await
    }

    /// Loads a key that nobody has, one process at a time if possible.
    async fn load_alone<F, L>(self: Arc<Self>, key: K, mut version: Vec<u8>, load: L) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let mut guard = None;
        match self.lock_or_wait(&key).await {
            Waited::Found(value) => return Ok(value),
            Waited::Locked(got, seen) => (guard, version) = (Some(got), seen.unwrap_or(version)),
            Waited::Unlocked => {}
        }
        // From here on, not while it waits: the end of a process does not wait for loads of others.
        let _counted = self.background.count();
        self.counters.misses.count();
        // What was declared gone while this one waited is not in what it loads.
        let epoch = self.epoch(&key);
        let outcome = self.load_under(&key, epoch, &mut guard, load).await;
        let value = outcome.inspect_err(|_| self.background.spawn(self.clone().end_load(key.clone(), guard.take())))?;
        let times = self.keep(&key, epoch, &value);
        // No caller waits for this.
        self.background.spawn(self.clone().store(key, (epoch, version), value.clone(), times, guard));
        Ok(value)
    }

    /// Loads a key, and gives its lock back before the end if what is loaded is old by then: a process that loads what is new need not
    /// wait for it.
    async fn load_under<F, L>(
        self: &Arc<Self>,
        key: &K,
        epoch: u64,
        guard: &mut Option<Guard>,
        load: L,
    ) -> Outcome<V, E>
    where
        L: FnOnce() -> F + Send,
        F: Future<Output = Result<Option<V>, E>> + Send,
    {
        let mut loading = Box::pin(self.load(load));
        loop {
            let signal = self.signal(key).notified();
            if guard.is_some() && self.epoch(key) != epoch {
                self.background.spawn(self.clone().end_load(key.clone(), guard.take()));
            }
            tokio::select! {
                outcome = &mut loading => return outcome,
                () = signal, if guard.is_some() => {}
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
                // Another process is at it. The next caller looks again when that one has ended.
                Err(LockError::NotAcquired { .. }) => return self.wait_for_load(&key).await,
                Err(_) => self.counters.away.count(),
            }
            // A second look: somebody may have just finished.
            let found = if guard.is_some() { self.find(&key).await.unwrap_or(found) } else { found };
            if is_fresh(&found) {
                return release(guard).await;
            }
            version = Some(found.version);
        }
        let (_counted, epoch) = (self.background.count(), self.epoch(&key));
        match self.load_under(&key, epoch, &mut guard, load).await {
            Ok(value) => {
                let times = self.keep(&key, epoch, &value);
                if let Some(version) = version {
                    self.clone().store(key, (epoch, version), value, times, guard).await;
                }
            }
            Err(_) => {
                self.counters.errors.count();
                self.end_load(key, guard).await;
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
}

impl Counters {
    pub(crate) fn of_hit<V>(&self, value: &Known<V>, hit: fn(&Self) -> &Counter) -> &Counter {
        if value.is_some() { hit(self) } else { &self.empties }
    }
}

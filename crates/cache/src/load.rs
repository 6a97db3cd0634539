//! Fetches a key that is missing or stale in the process: from Redis, or from the source with one load for all callers.

use std::sync::Arc;
use std::time::Duration;

use stampede_lock::{Error as LockError, Guard};

use crate::builder::{CacheKey, CacheValue};
use crate::cache::{Inner, LoadResult};
use crate::error::Error;
use crate::load_lock::Acquired;
use crate::remote::RemoteEntry;
use crate::store::release_lock;

/// The delay after a failed refresh before the next one can start.
const REFRESH_BACKOFF: Duration = Duration::from_millis(100);

impl<K: CacheKey, V: CacheValue, E: Send + Sync + 'static> Inner<K, V, E> {
    /// Fetches a key that the local level does not have.
    pub(crate) async fn fetch<F, L>(self: Arc<Self>, key: K, load: L) -> LoadResult<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        // Another load may have ended between the caller's lookup and the start of this one.
        if let Some(entry) = self.local.get(&key) {
            return Ok(entry.value.clone());
        }
        let epoch = self.epoch(&key);
        let entry = self.get_remote(&key).await;
        if let Some((value, fresh_for)) = entry.as_ref().and_then(|entry| self.insert_remote(&key, epoch, entry)) {
            self.counters.for_hit(&value, |counters| &counters.remote_hits).increment();
            if fresh_for.is_zero() && self.settings.refresh_after.is_some() {
                self.counters.stale_hits.increment();
                self.start_refresh(&key, load);
            }
            return Ok(value);
        }
        if self.is_filtered(&key).await {
            return Ok(None);
        }
        let Some(entry) = entry else {
            // Redis is unavailable or not configured.
            let _token = self.tasks.token();
            self.counters.misses.increment();
            let value = self.load(load).await?;
            self.insert_loaded(&key, epoch, &value);
            return Ok(value);
        };
        self.load_exclusively(key, entry.version, load).await
    }

    /// Loads a key that is not in Redis, in one process at a time if possible.
    async fn load_exclusively<F, L>(self: Arc<Self>, key: K, mut version: Vec<u8>, load: L) -> LoadResult<V, E>
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let mut guard = None;
        match self.lock_or_wait(&key).await {
            Acquired::Value(value) => return Ok(value),
            Acquired::Lock(acquired, current) => (guard, version) = (Some(acquired), current.unwrap_or(version)),
            Acquired::Nothing => {}
        }
        // Tracked only from here on: `drain` does not wait for loads of other processes.
        let _token = self.tasks.token();
        self.counters.misses.increment();
        // Read after the wait: an invalidation during the wait does not affect what is loaded now.
        let epoch = self.epoch(&key);
        let result = self.load_with_lock(&key, epoch, &mut guard, load).await;
        let value = result.inspect_err(|_| drop(self.tasks.spawn(self.clone().end_load(key.clone(), guard.take()))))?;
        let lifetimes = self.insert_loaded(&key, epoch, &value);
        // In the background: callers do not wait for the value to be stored.
        self.tasks.spawn(self.clone().store(key, (epoch, version), value.clone(), lifetimes, guard));
        Ok(value)
    }

    /// Loads a key. If the key is invalidated during the load, its lock is released before the end, so that a process that loads the new
    /// value does not wait for this load.
    async fn load_with_lock<F, L>(
        self: &Arc<Self>,
        key: &K,
        epoch: u64,
        guard: &mut Option<Guard>,
        load: L,
    ) -> LoadResult<V, E>
    where
        L: FnOnce() -> F + Send,
        F: Future<Output = Result<Option<V>, E>> + Send,
    {
        let mut loading = Box::pin(self.load(load));
        loop {
            let signal = self.signal(key).notified();
            if guard.is_some() && self.epoch(key) != epoch {
                self.tasks.spawn(self.clone().end_load(key.clone(), guard.take()));
            }
            tokio::select! {
                result = &mut loading => return result,
                () = signal, if guard.is_some() => {}
            }
        }
    }

    /// Whether the filter rules the key out.
    async fn is_filtered(&self, key: &K) -> bool {
        let Some(filter) = &self.filter else { return false };
        let filtered = !filter.may_exist(key).await;
        if filtered {
            self.counters.filtered.increment();
        }
        filtered
    }

    /// Starts a refresh of a stale key in the background, unless one is in progress.
    pub(crate) fn start_refresh<F, L>(self: &Arc<Self>, key: &K, load: L)
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        self.refreshes.join(key, || self.clone().refresh(key.clone(), load));
    }

    /// Refreshes a key if no other process does.
    async fn refresh<F, L>(self: Arc<Self>, key: K, load: L)
    where
        L: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<Option<V>, E>> + Send + 'static,
    {
        let epoch = self.epoch(&key);
        let is_fresh = |entry: &RemoteEntry| {
            self.insert_remote(&key, epoch, entry).is_some_and(|(_, fresh_for)| !fresh_for.is_zero())
        };
        let (mut version, mut guard) = (None, None);
        if let Some(entry) = self.get_remote(&key).await {
            if is_fresh(&entry) {
                return;
            }
            let remote = self.settings.remote.as_ref();
            let Some(lock) = remote.and_then(|remote| remote.lock(&self.settings.name, &key.to_string())) else {
                return;
            };
            match lock.try_lock().await {
                Ok(acquired) => guard = Some(acquired),
                // Another process is refreshing the key. The next caller reads Redis again when that load has ended.
                Err(LockError::NotAcquired { .. }) => return self.wait_for_load(&key).await,
                Err(_) => self.counters.remote_unavailable.increment(),
            }
            // Another process may have stored a fresh value before this one got the lock.
            let entry = if guard.is_some() { self.get_remote(&key).await.unwrap_or(entry) } else { entry };
            if is_fresh(&entry) {
                return release_lock(guard).await;
            }
            version = Some(entry.version);
        }
        let (_token, epoch) = (self.tasks.token(), self.epoch(&key));
        match self.load_with_lock(&key, epoch, &mut guard, load).await {
            Ok(value) => {
                let lifetimes = self.insert_loaded(&key, epoch, &value);
                if let Some(version) = version {
                    self.clone().store(key, (epoch, version), value, lifetimes, guard).await;
                }
            }
            Err(_) => {
                self.counters.errors.increment();
                self.end_load(key, guard).await;
                tokio::time::sleep(REFRESH_BACKOFF).await;
            }
        }
    }

    /// Calls the source, bounded in time and concurrency.
    pub(crate) async fn load<F, L>(&self, load: L) -> LoadResult<V, E>
    where
        L: FnOnce() -> F + Send,
        F: Future<Output = Result<Option<V>, E>> + Send,
    {
        let loading = async {
            // After `wait_timeout` no caller waits for the value any more. The semaphore is never closed.
            let permit = tokio::time::timeout(self.settings.wait_timeout, self.load_permits.acquire()).await;
            let _permit = permit.map_err(|_| Error::Timeout)?;
            self.counters.loads.increment();
            load().await.map_err(|error| Error::Source(Arc::new(error)))
        };
        let loaded = tokio::time::timeout(self.settings.load_timeout, loading).await;
        Ok(loaded.unwrap_or(Err(Error::Timeout))?.map(Arc::new))
    }
}

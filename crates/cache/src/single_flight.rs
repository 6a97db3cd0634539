//! Merges concurrent loads of a key into one. The load runs in a task of its own, so it completes even if all its callers are dropped.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

/// The loads in progress by key. `T` is the result of a load.
#[derive(Debug)]
pub(crate) struct SingleFlight<K, T> {
    in_progress: Mutex<HashMap<K, watch::Receiver<Option<T>>>>,
}

/// A handle to wait for the result of a load.
#[derive(Debug)]
pub(crate) struct FlightHandle<T>(watch::Receiver<Option<T>>);

impl<K: Hash + Eq + Clone + Send + 'static, T: Clone + Send + Sync + 'static> SingleFlight<K, T> {
    pub(crate) fn new() -> Self {
        Self { in_progress: Mutex::default() }
    }

    /// Joins the load of this key that is in progress, or starts one. The second value says whether this call started it.
    pub(crate) fn join<F>(self: &Arc<Self>, key: &K, load: impl FnOnce() -> F) -> (FlightHandle<T>, bool)
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut in_progress = self.in_progress.lock();
        if let Some(result) = in_progress.get(key) {
            return (FlightHandle(result.clone()), false);
        }
        let (sender, receiver) = watch::channel(None);
        in_progress.insert(key.clone(), receiver.clone());
        drop(in_progress);
        let guard = FlightGuard { flights: self.clone(), key: key.clone(), receiver: receiver.clone() };
        let load = load();
        tokio::spawn(async move {
            let result = load.await;
            // The key is removed before the result is sent: a caller that arrives in between starts another load, which finds the value
            // in the cache.
            drop(guard);
            sender.send_replace(Some(result));
        });
        (FlightHandle(receiver), true)
    }

    /// Lets later callers start a new load. Callers that already wait for the load in progress still get its result.
    pub(crate) fn forget(&self, key: &K) {
        self.in_progress.lock().remove(key);
    }

    pub(crate) fn forget_all(&self) {
        self.in_progress.lock().clear();
    }
}

/// Removes a load from the map when it ends, also if it panicked.
struct FlightGuard<K: Hash + Eq, T> {
    flights: Arc<SingleFlight<K, T>>,
    key: K,
    receiver: watch::Receiver<Option<T>>,
}

impl<K: Hash + Eq, T> Drop for FlightGuard<K, T> {
    fn drop(&mut self) {
        let mut in_progress = self.flights.in_progress.lock();
        // After `forget` the entry may belong to a newer load.
        if in_progress.get(&self.key).is_some_and(|receiver| receiver.same_channel(&self.receiver)) {
            in_progress.remove(&self.key);
        }
    }
}

impl<T: Clone> FlightHandle<T> {
    /// The result of the load; `None` if it panicked.
    pub(crate) async fn result(mut self) -> Option<T> {
        self.0.wait_for(Option::is_some).await.ok().and_then(|result| result.clone())
    }
}

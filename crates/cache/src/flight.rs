//! One load for everybody who wants the same key at the same time. The load is a task of its own: it ends even if all who wanted it go.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// The loads under way. `T` is what each of them ends with.
#[derive(Debug)]
pub(crate) struct Flights<K, T> {
    under_way: Mutex<HashMap<K, watch::Receiver<Option<T>>>>,
}

type UnderWay<'a, K, T> = MutexGuard<'a, HashMap<K, watch::Receiver<Option<T>>>>;

/// To wait for a load.
#[derive(Debug)]
pub(crate) struct Ticket<T>(watch::Receiver<Option<T>>);

impl<K: Hash + Eq + Clone + Send + 'static, T: Clone + Send + Sync + 'static> Flights<K, T> {
    pub(crate) fn new() -> Self {
        Self { under_way: Mutex::default() }
    }

    fn under_way(&self) -> UnderWay<'_, K, T> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the load of this key that is under way, or starts one. The second says whether it was started.
    pub(crate) fn join<F>(self: &Arc<Self>, key: &K, load: impl FnOnce() -> F) -> (Ticket<T>, bool)
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut under_way = self.under_way();
        if let Some(known) = under_way.get(key) {
            return (Ticket(known.clone()), false);
        }
        let (done, ticket) = watch::channel(None);
        under_way.insert(key.clone(), ticket.clone());
        drop(under_way);
        let landing = Landing { flights: self.clone(), key: key.clone(), ticket: ticket.clone() };
        let load = load();
        tokio::spawn(async move {
            let outcome = load.await;
            // First it is not under way any more, then it is told: who comes between the two starts anew and finds it in the cache.
            drop(landing);
            done.send_replace(Some(outcome));
        });
        (Ticket(ticket), true)
    }

    /// Who waits for the load that is under way gets what it brings; who comes from now on does not.
    pub(crate) fn leave_behind(&self, key: &K) {
        self.under_way().remove(key);
    }

    pub(crate) fn leave_all_behind(&self) {
        self.under_way().clear();
    }
}

/// Takes the load off the list, also if it panicked.
struct Landing<K: Hash + Eq, T> {
    flights: Arc<Flights<K, T>>,
    key: K,
    ticket: watch::Receiver<Option<T>>,
}

impl<K: Hash + Eq, T> Drop for Landing<K, T> {
    fn drop(&mut self) {
        let mut under_way = self.flights.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        // Not another load, if this one was left behind.
        if under_way.get(&self.key).is_some_and(|known| known.same_channel(&self.ticket)) {
            under_way.remove(&self.key);
        }
    }
}

impl<T: Clone> Ticket<T> {
    /// What the load ended with; `None` if it panicked.
    pub(crate) async fn outcome(mut self) -> Option<T> {
        self.0.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone())
    }
}

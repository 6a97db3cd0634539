//! The cache of sessions: many small maps, so that requests do not contend for one lock. Bounded: a full map evicts some of its
//! sessions, which are read from the ledger when they are used again.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use stampede_core::ports::SessionId;

const SHARDS: usize = 64;
/// A full map evicts one session in this many.
const EVICT_ONE_IN: usize = 8;

pub(crate) struct Sessions<T> {
    hasher: RandomState,
    shards: Vec<Mutex<HashMap<SessionId, Arc<T>>>>,
    per_shard: usize,
}

impl<T> Sessions<T> {
    pub(crate) fn new(bound: u64) -> Self {
        let per_shard = usize::try_from(bound).unwrap_or(usize::MAX).div_ceil(SHARDS).max(1);
        let shards = (0..SHARDS).map(|_| Mutex::new(HashMap::new())).collect();
        Self { hasher: RandomState::new(), shards, per_shard }
    }

    fn shard(&self, id: SessionId) -> MutexGuard<'_, HashMap<SessionId, Arc<T>>> {
        let place = usize::try_from(self.hasher.hash_one(id) % SHARDS as u64).unwrap_or(0);
        self.shards[place].lock()
    }

    pub(crate) fn get(&self, id: SessionId) -> Option<Arc<T>> {
        self.shard(id).get(&id).cloned()
    }

    /// Inserts a session, replacing the one that is there.
    pub(crate) fn put(&self, id: SessionId, session: Arc<T>) {
        let mut shard = self.shard(id);
        self.make_room(&mut shard, id);
        shard.insert(id, session);
    }

    /// The session that is there; inserts this one if there is none.
    pub(crate) fn get_or_put(&self, id: SessionId, session: Arc<T>) -> Arc<T> {
        let mut shard = self.shard(id);
        self.make_room(&mut shard, id);
        shard.entry(id).or_insert(session).clone()
    }

    pub(crate) fn remove(&self, id: SessionId) {
        self.shard(id).remove(&id);
    }

    fn make_room(&self, shard: &mut HashMap<SessionId, Arc<T>>, id: SessionId) {
        if shard.len() >= self.per_shard && !shard.contains_key(&id) {
            let mut n = 0;
            shard.retain(|_, _| {
                n += 1;
                n % EVICT_ONE_IN != 1
            });
        }
    }

    /// Keeps the sessions for which the predicate holds.
    pub(crate) fn retain(&self, predicate: impl Fn(&T) -> bool) {
        for shard in &self.shards {
            shard.lock().retain(|_, session| predicate(session));
        }
    }
}

impl<T> fmt::Debug for Sessions<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("per_shard", &self.per_shard).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_stays_within_its_bound_and_has_the_newest_session() {
        let sessions = Sessions::new(1000);
        for n in 0..10_000_u128 {
            let id = SessionId(n.to_be_bytes());
            sessions.put(id, Arc::new(n));
            assert_eq!(sessions.get(id).as_deref(), Some(&n));
        }
        let count = || sessions.shards.iter().map(|shard| shard.lock().len()).sum::<usize>();
        assert!((500..=1024).contains(&count()), "{}", count());
        sessions.retain(|n| n % 2 == 0);
        let odd = |shard: &Mutex<HashMap<SessionId, Arc<u128>>>| shard.lock().values().any(|n| **n % 2 == 1);
        assert!(count() > 0 && !sessions.shards.iter().any(odd));
        let id = SessionId(1_u128.to_be_bytes());
        assert_eq!(*sessions.get_or_put(id, Arc::new(1)), 1);
        assert_eq!(*sessions.get_or_put(id, Arc::new(2)), 1, "what is there stays");
    }
}

//! Counters of a cache.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::entry::Cached;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters since the cache was created.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)+
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)+
        }

        impl Counters {
            pub(crate) fn read(&self) -> Stats {
                Stats { $($name: self.$name.0.load(Ordering::Relaxed),)+ }
            }
        }

        impl Stats {
            /// Every counter with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Values returned from the local level.
    local_hits,
    /// Values returned from Redis.
    remote_hits,
    /// Keys found in neither level.
    misses,
    /// Cached "does not exist" results returned.
    empty_hits,
    /// Stale values returned while a refresh runs in the background.
    stale_hits,
    /// Keys that the filter ruled out.
    filtered,
    /// Calls of the source.
    loads,
    /// Callers that waited for a load that was already in progress.
    coalesced,
    /// Loads that failed, and callers that timed out.
    errors,
    /// Calls to Redis that failed, or were skipped because earlier ones had failed.
    remote_unavailable,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn increment(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Counters {
    /// The counter for a hit: the given one for a value, `empty_hits` if the key does not exist.
    pub(crate) fn for_hit<V>(&self, value: &Cached<V>, hit: fn(&Self) -> &Counter) -> &Counter {
        if value.is_some() { hit(self) } else { &self.empty_hits }
    }
}

//! What a cache has done so far.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// What a cache has done since it was made.
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
            /// Every figure with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Answered from the process.
    local_hits,
    /// Answered from Redis.
    remote_hits,
    /// Neither had it.
    misses,
    /// Answered with "there is none", remembered from before.
    empties,
    /// Answered with a value that was being refreshed meanwhile.
    stale,
    /// Stopped by the filter: there is none.
    filtered,
    /// Calls of the source.
    loads,
    /// Those who waited for somebody else's load.
    waits,
    /// Loads that failed, and those who waited too long.
    errors,
    /// Times that Redis did not answer, or was left alone because it had not.
    away,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

//! The scripts of each kind of lock. They are idempotent per lease id: sent twice, they act once.

use std::sync::LazyLock;

use stampede_redis::Script;

/// A script, preceded by the library files it needs. Only those, because every function definition costs Redis time with each call.
macro_rules! script {
    ($name:ident, $file:literal $(, $library:literal)*) => {
        static $name: LazyLock<Script> = LazyLock::new(|| {
            Script::new(concat!($(include_str!(concat!("lua/lib/", $library)),)* include_str!(concat!("lua/", $file))))
        });
    };
}

script!(SIMPLE_ACQUIRE, "simple_acquire.lua");
script!(SIMPLE_RELEASE, "simple_release.lua");
script!(SIMPLE_RENEW, "simple_renew.lua");
script!(SIMPLE_RENEW_OR_ACQUIRE, "simple_renew_or_acquire.lua");
script!(REENTRANT_ACQUIRE, "reentrant_acquire.lua", "time.lua", "acquire.lua");
script!(REENTRANT_RELEASE, "reentrant_release.lua", "release.lua");
script!(REENTRANT_RENEW, "reentrant_renew.lua", "time.lua");
script!(FAIR_ACQUIRE, "fair_acquire.lua", "time.lua", "acquire.lua", "queue.lua");
script!(FAIR_RELEASE, "fair_release.lua", "time.lua", "release.lua", "queue.lua");
script!(FAIR_RENEW_QUEUE_ENTRY, "fair_renew_queue_entry.lua", "time.lua");
script!(READ_ACQUIRE, "read_acquire.lua", "time.lua", "acquire.lua");
script!(READ_RELEASE, "read_release.lua", "time.lua");
script!(READ_RENEW, "read_renew.lua", "time.lua");
script!(WRITE_ACQUIRE, "write_acquire.lua", "time.lua", "acquire.lua");

/// The kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Simple,
    Reentrant,
    Fair,
    Read,
    Write,
}

impl Kind {
    pub(crate) fn acquire(self) -> &'static Script {
        match self {
            Self::Simple => &SIMPLE_ACQUIRE,
            Self::Reentrant => &REENTRANT_ACQUIRE,
            Self::Fair => &FAIR_ACQUIRE,
            Self::Read => &READ_ACQUIRE,
            Self::Write => &WRITE_ACQUIRE,
        }
    }

    pub(crate) fn release(self) -> &'static Script {
        match self {
            Self::Simple => &SIMPLE_RELEASE,
            Self::Reentrant | Self::Write => &REENTRANT_RELEASE,
            Self::Fair => &FAIR_RELEASE,
            Self::Read => &READ_RELEASE,
        }
    }

    pub(crate) fn renew(self) -> &'static Script {
        match self {
            Self::Simple => &SIMPLE_RENEW,
            Self::Reentrant | Self::Fair | Self::Write => &REENTRANT_RENEW,
            Self::Read => &READ_RENEW,
        }
    }

    /// For a simple lock that is a member of a Redlock.
    pub(crate) fn renew_or_acquire() -> &'static Script {
        &SIMPLE_RENEW_OR_ACQUIRE
    }

    /// Renews the queue entry of a waiter; only the fair lock has a queue.
    pub(crate) fn renew_queue_entry() -> &'static Script {
        &FAIR_RENEW_QUEUE_ENTRY
    }

    /// The suffixes of the keys after the lock's own, in the order of the scripts' KEYS.
    pub(crate) fn key_suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Simple => &[],
            Self::Reentrant => &["fence"],
            Self::Fair => &["fence", "queue", "alive"],
            Self::Read | Self::Write => &["fence", "readers"],
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn script_headers_name_the_keys_and_arguments_that_the_body_uses() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/redis/lua");
        assert_eq!(stampede_testkit::lua::check_headers(folder).unwrap(), 14);
    }
}

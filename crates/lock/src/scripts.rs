//! The scripts of each kind of lock. They are idempotent by the hold that they are about: sent twice, they act once.

use std::sync::LazyLock;

use stampede_redis::Script;

/// A script and the parts that it needs in front of it. Only those: making a function costs Redis something with every call.
macro_rules! script {
    ($name:ident, $file:literal $(, $part:literal)*) => {
        static $name: LazyLock<Script> = LazyLock::new(|| {
            Script::new(concat!($(include_str!(concat!("lua/parts/", $part)),)* include_str!(concat!("lua/", $file))))
        });
    };
}

script!(SIMPLE_ACQUIRE, "simple_acquire.lua");
script!(SIMPLE_RELEASE, "simple_release.lua");
script!(SIMPLE_RENEW, "simple_renew.lua");
script!(SIMPLE_RENEW_OR_ACQUIRE, "simple_renew_or_acquire.lua");
script!(REENTRANT_ACQUIRE, "reentrant_acquire.lua", "time.lua", "take.lua");
script!(REENTRANT_RELEASE, "reentrant_release.lua", "give_back.lua");
script!(REENTRANT_RENEW, "reentrant_renew.lua", "time.lua");
script!(FAIR_ACQUIRE, "fair_acquire.lua", "time.lua", "take.lua", "line.lua");
script!(FAIR_RELEASE, "fair_release.lua", "time.lua", "give_back.lua", "line.lua");
script!(FAIR_KEEP, "fair_keep.lua", "time.lua");
script!(READ_ACQUIRE, "read_acquire.lua", "time.lua", "take.lua");
script!(READ_RELEASE, "read_release.lua", "time.lua");
script!(READ_RENEW, "read_renew.lua", "time.lua");
script!(WRITE_ACQUIRE, "write_acquire.lua", "time.lua", "take.lua");

/// What a lock promises to whom.
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

    /// For a simple lock that is one of a red lock's.
    pub(crate) fn renew_or_acquire() -> &'static Script {
        &SIMPLE_RENEW_OR_ACQUIRE
    }

    /// A sign of life of a waiter in line; only the fair lock has a line.
    pub(crate) fn keep() -> &'static Script {
        &FAIR_KEEP
    }

    /// The keys after the lock's own, in the order of the scripts' KEYS.
    pub(crate) fn more_keys(self) -> &'static [&'static str] {
        match self {
            Self::Simple => &[],
            Self::Reentrant => &["fence"],
            Self::Fair => &["fence", "line", "living"],
            Self::Read | Self::Write => &["fence", "readers"],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// Every `KEYS[n]` and `ARGV[n]` in a text.
    fn named(text: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for word in ["KEYS[", "ARGV["] {
            for (at, _) in text.match_indices(word) {
                let rest = &text[at..];
                found.insert(rest[..=rest.find(']').unwrap()].to_owned());
            }
        }
        found
    }

    #[test]
    fn the_head_of_a_script_names_what_its_body_uses() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lua");
        let mut seen = 0;
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let body_at = text.find("\nlocal ").or(text.find("\nif ")).unwrap();
            let (head, body) = text.split_at(body_at);
            assert!(head.lines().all(|line| line.starts_with("--")), "{path:?}");
            assert!(head.contains("-- Returns "), "{path:?} says what it returns");
            assert_eq!(named(head), named(body), "{path:?}");
            seen += 1;
        }
        assert_eq!(seen, 14);
    }
}

//! Named places where a test can abort the process or pause it. Without the cargo feature `failpoints` they are nothing.
//!
//! `STAMPEDE_FAILPOINTS="record.committed=abort@3;record.begin=pause:50"`: abort when `record.committed` is reached for the
//! third time; pause 50 ms at `record.begin` every time.
//!
//! `STAMPEDE_CLOCK_FILE=PATH` sets the clock of the process off by the milliseconds that the file holds, such as `-3600000`. The file is read
//! again every few milliseconds, so that the clock can jump while the process runs.
//!
//! `STAMPEDE_PLANT="sync-off"` plants a known bug by name, so that the tests can show that they would notice it.

/// Every failpoint, in the order a buyer's order passes them.
pub const ALL: [&str; 5] = ["buy.admitted", "record.begin", "record.inserted", "record.committed", "buy.answer"];

/// Every bug that can be planted:
///
/// - `sync-off`: SQLite commits without waiting for the disk
/// - `skip-duplicate`: neither gate nor ledger look whether a person has one already
/// - `release-twice`: a cancellation gives the stock back twice
/// - `answer-early`: buyers hear yes before the commit
/// - `reconcile-count`: the gate's cap is set from the ledger's count while orders are on their way
pub const BUGS: [&str; 5] = ["sync-off", "skip-duplicate", "release-twice", "answer-early", "reconcile-count"];

#[cfg(feature = "failpoints")]
mod armed {
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;

    enum Action {
        Abort,
        Pause(Duration),
    }

    struct Point {
        action: Action,
        /// Act from this hit on.
        from_hit: u64,
        hits: AtomicU64,
    }

    fn points() -> &'static HashMap<String, Point> {
        static POINTS: OnceLock<HashMap<String, Point>> = OnceLock::new();
        POINTS.get_or_init(|| {
            let text = std::env::var("STAMPEDE_FAILPOINTS").unwrap_or_default();
            let read = |text| parse(text).unwrap_or_else(|| panic!("STAMPEDE_FAILPOINTS: cannot read {text:?}"));
            text.split(';').filter(|s| !s.is_empty()).map(read).collect()
        })
    }

    fn parse(text: &str) -> Option<(String, Point)> {
        let (name, rest) = text.split_once('=')?;
        let (action, from_hit) = match rest.split_once('@') {
            Some((action, n)) => (action, n.parse().ok()?),
            None => (rest, 1),
        };
        let action = match action.split_once(':') {
            None if action == "abort" => Action::Abort,
            Some(("pause", ms)) => Action::Pause(Duration::from_millis(ms.parse().ok()?)),
            _ => return None,
        };
        let known = super::ALL.contains(&name);
        known.then(|| (name.to_owned(), Point { action, from_hit, hits: AtomicU64::new(0) }))
    }

    #[expect(clippy::disallowed_methods, reason = "a pause that stops its thread is what was asked for")]
    pub(super) fn hit(name: &str) {
        let Some(point) = points().get(name) else { return };
        if point.hits.fetch_add(1, Ordering::SeqCst) + 1 < point.from_hit {
            return;
        }
        match point.action {
            Action::Abort => std::process::abort(),
            Action::Pause(span) => std::thread::sleep(span),
        }
    }

    /// How often the file with the clock's offset is read.
    const CLOCK_READ_EVERY: Duration = Duration::from_millis(5);

    pub(super) fn clock_offset_ms() -> i64 {
        static OFFSET: OnceLock<Option<Arc<AtomicI64>>> = OnceLock::new();
        let offset = OFFSET.get_or_init(|| std::env::var_os("STAMPEDE_CLOCK_FILE").map(follow));
        offset.as_ref().map_or(0, |offset| offset.load(Ordering::Relaxed))
    }

    /// What the file holds, kept up to date for as long as the process runs.
    #[expect(clippy::disallowed_methods, reason = "a thread of its own that only reads a file now and then")]
    fn follow(path: OsString) -> Arc<AtomicI64> {
        let read = move || std::fs::read_to_string(&path).ok()?.trim().parse::<i64>().ok();
        let offset = Arc::new(AtomicI64::new(read().unwrap_or(0)));
        let kept = offset.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(CLOCK_READ_EVERY);
                // A file that is being written is read the next time.
                if let Some(offset) = read() {
                    kept.store(offset, Ordering::Relaxed);
                }
            }
        });
        offset
    }

    pub(super) fn planted(bug: &str) -> bool {
        static PLANTED: OnceLock<Vec<String>> = OnceLock::new();
        let planted = PLANTED.get_or_init(|| {
            let text = std::env::var("STAMPEDE_PLANT").unwrap_or_default();
            let all: Vec<String> = text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
            for name in &all {
                assert!(super::BUGS.contains(&name.as_str()), "STAMPEDE_PLANT: there is no bug {name:?}");
            }
            all
        });
        planted.iter().any(|name| name == bug)
    }
}

/// The process passes the place called `name`.
#[inline]
pub fn hit(name: &'static str) {
    debug_assert!(ALL.contains(&name), "failpoint {name} is not in the list");
    #[cfg(feature = "failpoints")]
    armed::hit(name);
    #[cfg(not(feature = "failpoints"))]
    let _ = name;
}

/// Is this bug to be committed on purpose? Never without the feature.
#[inline]
pub fn planted(bug: &'static str) -> bool {
    debug_assert!(BUGS.contains(&bug), "the bug {bug} is not in the list");
    #[cfg(feature = "failpoints")]
    return armed::planted(bug);
    #[cfg(not(feature = "failpoints"))]
    {
        let _ = bug;
        false
    }
}

/// How far the clock of this process is set off, in milliseconds. Never without the feature.
#[inline]
pub fn clock_offset_ms() -> i64 {
    #[cfg(feature = "failpoints")]
    return armed::clock_offset_ms();
    #[cfg(not(feature = "failpoints"))]
    0
}

//! Failpoints: named places where a test can abort or pause the process. Also planted bugs and a clock offset for tests.
//!
//! All of it is compiled only with the cargo feature `failpoints`. Without it, the functions are constants that the compiler removes.
//!
//! - `STAMPEDE_FAILPOINTS="record.committed=abort@3;record.begin=pause:50"`: abort the third time that `record.committed` is reached; pause
//!   for 50 ms each time that `record.begin` is reached
//! - `STAMPEDE_CLOCK_FILE=PATH`: add the number of milliseconds in the file, such as `-3600000`, to the clock of the process. The file is
//!   read every few milliseconds, so a test can change the clock while the process runs
//! - `STAMPEDE_PLANTED_BUGS="sync-off"`: plant known bugs, separated by commas, so that the tests can show that they detect them

/// The failpoints of every tier, in the order in which an order passes them.
pub const BUYING: [&str; 5] = ["buy.admitted", "record.begin", "record.inserted", "record.committed", "buy.answer"];

/// The failpoints of tiers with a gate on a server: before an outbox entry is settled; during a rebuild of the gate.
pub const SERVER_GATE: [&str; 5] =
    ["outbox.settle", "rebuild.begun", "rebuild.closed", "rebuild.loading", "rebuild.opened"];

/// The failpoints of a queue in a broker: a batch is confirmed and its buyers are not answered; deliveries are recorded and not acknowledged.
pub const BROKER: [&str; 2] = ["queue.published", "queue.ack"];

/// Between the ledger's commit and the change of the gate: a sale was created; a sale was edited; the ledger's cap of a sale was lowered.
/// `reduce.gate`: the gate has a lower cap, and the ledger's total is not reduced yet.
pub const EDITING: [&str; 4] = ["sale.created", "sale.edited", "reduce.ledger", "reduce.gate"];

/// Every bug that can be planted:
///
/// - `sync-off`: SQLite commits without waiting for the disk
/// - `skip-duplicate`: neither the gate nor the ledger checks whether the user already has an order
/// - `release-twice`: a cancellation returns the stock twice
/// - `answer-early`: buyers get their response before the commit
/// - `reconcile-count`: the gate's cap is set from the ledger's count while admitted orders are not yet recorded
pub const BUGS: [&str; 5] = ["sync-off", "skip-duplicate", "release-twice", "answer-early", "reconcile-count"];

#[cfg(feature = "failpoints")]
mod enabled {
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
        /// The first hit that runs the action.
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

    fn is_failpoint(name: &str) -> bool {
        [&super::BUYING[..], &super::SERVER_GATE, &super::BROKER, &super::EDITING].concat().contains(&name)
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
        is_failpoint(name).then(|| (name.to_owned(), Point { action, from_hit, hits: AtomicU64::new(0) }))
    }

    /// Runs the action of the failpoint `name`, if it has one.
    #[expect(clippy::disallowed_methods, reason = "the action is to block the thread")]
    pub fn hit(name: &'static str) {
        debug_assert!(is_failpoint(name), "failpoint {name} is not in a list");
        let Some(point) = points().get(name) else { return };
        if point.hits.fetch_add(1, Ordering::SeqCst) + 1 < point.from_hit {
            return;
        }
        match point.action {
            Action::Abort => std::process::abort(),
            Action::Pause(span) => std::thread::sleep(span),
        }
    }

    /// How often the file with the clock offset is read.
    const CLOCK_READ_INTERVAL: Duration = Duration::from_millis(5);

    /// The offset of this process's clock in milliseconds.
    pub fn clock_offset_ms() -> i64 {
        static OFFSET: OnceLock<Option<Arc<AtomicI64>>> = OnceLock::new();
        let offset = OFFSET.get_or_init(|| std::env::var_os("STAMPEDE_CLOCK_FILE").map(follow));
        offset.as_ref().map_or(0, |offset| offset.load(Ordering::Relaxed))
    }

    /// Reads the file in a background thread for as long as the process runs, and returns the current offset.
    #[expect(clippy::disallowed_methods, reason = "a separate thread that only polls a file")]
    fn follow(path: OsString) -> Arc<AtomicI64> {
        let read = move || std::fs::read_to_string(&path).ok()?.trim().parse::<i64>().ok();
        let offset = Arc::new(AtomicI64::new(read().unwrap_or(0)));
        let shared = offset.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(CLOCK_READ_INTERVAL);
                // A file that is being written is read at the next interval.
                if let Some(offset) = read() {
                    shared.store(offset, Ordering::Relaxed);
                }
            }
        });
        offset
    }

    /// Whether this bug is planted.
    pub fn planted(bug: &'static str) -> bool {
        debug_assert!(super::BUGS.contains(&bug), "the bug {bug} is not in the list");
        static PLANTED: OnceLock<Vec<String>> = OnceLock::new();
        let planted = PLANTED.get_or_init(|| {
            let text = std::env::var("STAMPEDE_PLANTED_BUGS").unwrap_or_default();
            let all: Vec<String> = text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
            for name in &all {
                assert!(super::BUGS.contains(&name.as_str()), "STAMPEDE_PLANTED_BUGS: unknown bug {name:?}");
            }
            all
        });
        planted.iter().any(|name| name == bug)
    }
}

#[cfg(not(feature = "failpoints"))]
mod disabled {
    #[inline]
    pub const fn hit(_name: &'static str) {}

    #[inline]
    pub const fn planted(_bug: &'static str) -> bool {
        false
    }

    #[inline]
    pub const fn clock_offset_ms() -> i64 {
        0
    }
}

#[cfg(not(feature = "failpoints"))]
pub use disabled::{clock_offset_ms, hit, planted};
#[cfg(feature = "failpoints")]
pub use enabled::{clock_offset_ms, hit, planted};

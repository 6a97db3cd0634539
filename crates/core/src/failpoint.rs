//! Failpoints: named places where a test can abort, pause or hold the process. Also planted bugs and a clock offset for tests.
//!
//! All of it is compiled only with the cargo feature `failpoints`. Without it, the functions are constants that the compiler removes.
//!
//! - `STAMPEDE_FAILPOINTS="record.committed=abort@3;record.begin=pause:50"`: abort the third time that `record.committed` is reached; pause
//!   for 50 ms each time that `record.begin` is reached
//! - `STAMPEDE_FAILPOINTS="session.found=hold:PATH"`: if there is a file `PATH` when the failpoint is reached, rename it to `PATH.reached`,
//!   and wait until the test deletes that. A file that is not empty is meant for the failpoint of one thing, such as the id of a sale
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
/// `edit.gate`: the gate has an edit, and the ledger does not know that yet. `reduce.gate`: the gate has a lower cap, and the ledger's total
/// is not reduced yet.
pub const EDITING: [&str; 5] = ["sale.created", "sale.edited", "edit.gate", "reduce.ledger", "reduce.gate"];

/// A new order was made for a payment that has arrived late, and the payment is not moved to it yet.
pub const PAYMENTS: [&str; 1] = ["payments.readmitted"];

/// A look-up of a session has read it from the ledger, and has not copied it to Redis; it has found the session open, and has not cached it.
pub const SESSIONS: [&str; 2] = ["session.loaded", "session.found"];

/// Orders whose time to pay has ended were read, and are not locked yet.
pub const EXPIRY: [&str; 1] = ["expire.read"];

/// Every bug that can be planted:
///
/// - `sync-off`: SQLite commits without waiting for the disk
/// - `skip-duplicate`: neither the gate nor the ledger checks whether the user already has an order
/// - `release-twice`: a cancellation returns the stock twice
/// - `answer-early`: buyers get their response before the commit
/// - `reconcile-count`: the gate's cap is set from the ledger's count while admitted orders are not yet recorded
/// - `skip-drain`: a rebuild opens the sales before everything that RabbitMQ has confirmed is recorded
/// - `skip-wait`: a rebuild does not wait until no order can be confirmed any more that was admitted before it
pub const BUGS: [&str; 7] =
    ["sync-off", "skip-duplicate", "release-twice", "answer-early", "reconcile-count", "skip-drain", "skip-wait"];

#[cfg(feature = "failpoints")]
mod enabled {
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;

    enum Action {
        Abort,
        Pause(Duration),
        Hold(PathBuf),
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
        let all = [
            &super::BUYING[..],
            &super::SERVER_GATE,
            &super::BROKER,
            &super::EDITING,
            &super::PAYMENTS,
            &super::SESSIONS,
            &super::EXPIRY,
        ];
        all.concat().contains(&name)
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
            Some(("hold", path)) => Action::Hold(path.into()),
            _ => return None,
        };
        is_failpoint(name).then(|| (name.to_owned(), Point { action, from_hit, hits: AtomicU64::new(0) }))
    }

    /// Whether the failpoint `name` has an action. In asynchronous code that others wait for, it belongs on a thread that may block.
    pub fn is_set(name: &'static str) -> bool {
        points().contains_key(name)
    }

    /// Runs the action of the failpoint `name`, if it has one.
    pub fn hit(name: &'static str) {
        hit_for(name, "");
    }

    /// Runs the action of the failpoint `name`, if it has one, for `subject`: what is being done there.
    #[expect(clippy::disallowed_methods, reason = "the action is to block the thread")]
    pub fn hit_for(name: &'static str, subject: &str) {
        debug_assert!(is_failpoint(name), "failpoint {name} is not in a list");
        let Some(point) = points().get(name) else { return };
        if point.hits.fetch_add(1, Ordering::SeqCst) + 1 < point.from_hit {
            return;
        }
        match &point.action {
            Action::Abort => std::process::abort(),
            Action::Pause(span) => std::thread::sleep(*span),
            Action::Hold(file) => hold(file, subject),
        }
    }

    /// Blocks the thread that renames the file, until the test deletes it.
    #[expect(clippy::disallowed_methods, reason = "the action is to block the thread")]
    fn hold(file: &Path, subject: &str) {
        let Ok(meant_for) = std::fs::read_to_string(file) else { return };
        if !meant_for.is_empty() && meant_for != subject {
            return;
        }
        let mut reached = file.as_os_str().to_owned();
        reached.push(".reached");
        let reached = PathBuf::from(reached);
        // There is no file, or another thread has renamed it.
        if std::fs::rename(file, &reached).is_err() {
            return;
        }
        while reached.exists() {
            std::thread::sleep(READ_INTERVAL);
        }
    }

    /// How often a file is read or looked for.
    const READ_INTERVAL: Duration = Duration::from_millis(5);

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
                std::thread::sleep(READ_INTERVAL);
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
    pub const fn hit_for(_name: &'static str, _subject: &str) {}

    #[inline]
    pub const fn is_set(_name: &'static str) -> bool {
        false
    }

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
pub use disabled::{clock_offset_ms, hit, hit_for, is_set, planted};
#[cfg(feature = "failpoints")]
pub use enabled::{clock_offset_ms, hit, hit_for, is_set, planted};

//! Measures how long nothing could be sold.

use std::time::Instant;

use metrics::{Histogram, histogram};
use parking_lot::Mutex;

/// Since when sales are closed on this node: from the first sign of it until they are open again.
pub(super) struct ClosedTimer {
    since: Mutex<Option<Instant>>,
    seconds: Histogram,
}

impl Default for ClosedTimer {
    fn default() -> Self {
        Self { since: Mutex::default(), seconds: histogram!("stampede_gate_closed_seconds") }
    }
}

impl ClosedTimer {
    /// Sales are closed, from now on unless they were before.
    pub(super) fn begin(&self) {
        self.since.lock().get_or_insert_with(Instant::now);
    }

    /// Sales are open.
    pub(super) fn end(&self) {
        if let Some(since) = self.since.lock().take() {
            let closed = since.elapsed();
            self.seconds.record(closed);
            tracing::info!(closed_ms = closed.as_millis(), "sales are open again");
        }
    }
}

impl std::fmt::Debug for ClosedTimer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClosedTimer").field("since", &self.since).finish_non_exhaustive()
    }
}

//! How long a sale that is over stays in the gate.

use std::time::Duration;

use stampede_core::{Sale, Timestamp};

/// How long after its end a sale's marks stay in the gate.
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Whether the sale ended so long ago that its marks are no longer in the gate.
pub(crate) fn is_past_retention(sale: &Sale, now: Timestamp) -> bool {
    sale.window.end.plus(RETENTION) <= now
}

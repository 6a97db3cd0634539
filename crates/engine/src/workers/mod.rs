//! Tasks that run beside the requests, in every tier.
//!
//! - [`event_delivery`]: sends the steps of orders to a receiver of the operator
//! - [`expired`]: deletes expired sessions and login codes
//! - [`index`]: copies the orders of sales that are long over into the index by user
//! - [`lease`]: renews the worker number of the id generator
//! - [`payment_deadlines`]: cancels orders that were not paid in time
//! - [`pending_releases`]: releases the marks of orders that died in the ledger
//! - [`refunds`]: returns payments
//! - [`quarantined`]: shows how many orders are in quarantine
//! - [`sessions`]: writes the new expiries of sessions, and drops ended ones from memory

pub(crate) mod event_delivery;
pub(crate) mod expired;
pub(crate) mod index;
pub(crate) mod lease;
pub(crate) mod payment_deadlines;
pub(crate) mod pending_releases;
pub(crate) mod quarantined;
pub(crate) mod refunds;
pub(crate) mod sessions;

use std::time::Duration;

use stampede_core::ports::{Ledger, LedgerError};
use stampede_core::{Clock, Timestamp};

/// The earlier of the times of this node and of the database: one clock that jumps ahead makes nothing due, and no pause longer.
async fn earlier_now(clock: &dyn Clock, ledger: &dyn Ledger) -> Result<Timestamp, LedgerError> {
    Ok(clock.now().min(ledger.now().await?))
}

/// The pause after this many attempts, if it doubles with each.
fn doubled(first: Duration, tries: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(tries.saturating_sub(1)))
}

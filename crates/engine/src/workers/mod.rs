//! Tasks that run beside the requests, in every tier.
//!
//! - [`expired`]: deletes expired sessions and login codes
//! - [`index`]: copies the orders of sales that are long over into the index by user
//! - [`lease`]: renews the worker number of the id generator
//! - [`pending_releases`]: releases the marks of orders that died in the ledger
//! - [`sessions`]: writes the new expiries of sessions, and drops ended ones from memory

pub(crate) mod expired;
pub(crate) mod index;
pub(crate) mod lease;
pub(crate) mod pending_releases;
pub(crate) mod sessions;

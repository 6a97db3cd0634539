//! What runs beside the requests.
//!
//! - [`index`]: copies the orders of sales that are long over into the index by user
//! - [`lease`]: keeps the worker number of the id maker
//! - [`owed`]: settles what the gate is owed after cancellations
//! - [`watch`]: sees what other processes did to the sales
//! - [`planted`]: a worker that does harm, for the tests of the tests
//! - [`sessions`]: writes moved expiries, forgets what has expired

pub(crate) mod index;
pub(crate) mod lease;
pub(crate) mod pending_releases;
pub(crate) mod planted;
pub(crate) mod sessions;
pub(crate) mod watch;

//! What runs beside the requests.
//!
//! - [`lease`]: keeps the worker number of the id maker
//! - [`owed`]: settles what the gate is owed after cancellations
//! - [`watch`]: sees what other processes did to the sales
//! - [`sessions`]: writes moved expiries, forgets what has expired

pub(crate) mod lease;
pub(crate) mod owed;
pub(crate) mod sessions;
pub(crate) mod watch;

//! Locks that stand on their own and know nothing of what they guard.
//!
//! - [`keyed`]: an asynchronous mutex per key inside one process

pub mod keyed;

pub use keyed::{Guard, Keyed};

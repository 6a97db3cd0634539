//! Sliding-window rate limits in bounded memory.
//!
//! - [`local`]: inside one process
//! - [`mod@network`]: addresses that count as one

pub mod local;
pub mod network;

pub use local::{Limit, SlidingWindow};
pub use network::network;

//! Sliding-window rate limits in bounded memory.
//!
//! - [`SlidingWindow`]: counts per key, inside one process
//! - [`network()`]: the key of an IP address, so that addresses of one IPv6 network share a limit

mod network;
mod sliding_window;

pub use network::network;
pub use sliding_window::{Limit, SlidingWindow};

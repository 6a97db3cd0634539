//! Sliding-window rate limits in bounded memory.
//!
//! - [`local`]: inside one process

pub mod local;

pub use local::{Limit, SlidingWindow};

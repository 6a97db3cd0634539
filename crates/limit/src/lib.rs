//! Sliding-window rate limits in bounded memory, for one process or over many that share a Redis server.
//!
//! - [`SlidingWindow`]: counts per key, inside one process
//! - [`Limiter`]: a limit that holds in one process or over all nodes, depending on its [`Counters`]; [`check_all`], [`undo_all`]: several
//!   limits at once
//! - [`RedisCounters`]: counters in Redis; checks that arrive during a call are sent together in the next one
//! - [`rate_limit_key`]: the key of an IP address, so that addresses of one IPv6 network share a limit; [`network()`]: the same for any
//!   prefix length

mod limiter;
mod network;
mod redis_counters;
mod sliding_window;

pub use limiter::{Check, Counted, Counters, Limiter, Refused, check_all, undo_all};
pub use network::{network, rate_limit_key};
pub use redis_counters::RedisCounters;
pub use sliding_window::{Limit, SlidingWindow};

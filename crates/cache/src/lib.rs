//! A typed read-through cache with an in-process level, an optional Redis level and protection against cache stampedes.
//!
//! - [`Cache`]: values by key from a source; concurrent requests for a key share one load, in the process and across all processes
//! - [`Builder`]: settings of a cache: expiry, refresh, jitter, timeouts, concurrency
//! - [`Remote`]: the Redis level that the caches of a process share; without it a cache is local to the process
//! - [`Filter`]: a Bloom filter that answers whether a key can exist, in the process or in Redis
//! - [`Stats`]: counters of a cache
//!
//! Internal modules:
//!
//! - `cache`: the public API
//! - `load`: fetches a key from Redis or the source
//! - `load_lock`: decides which process loads a key
//! - `store`: inserts and invalidates values
//! - `single_flight`: merges concurrent loads of a key
//! - `entry`: a value with its expiry, and its encoding in Redis
//! - `remote`: the commands sent to Redis
//! - `listener`: the Redis subscription
//! - `breaker`: skips Redis while it does not respond

#![warn(missing_docs)]

mod breaker;
mod builder;
mod cache;
mod entry;
mod error;
mod filter;
mod listener;
mod load;
mod load_lock;
mod remote;
mod single_flight;
mod stats;
mod store;

pub use builder::{Builder, CacheKey, CacheValue};
pub use cache::Cache;
pub use error::Error;
pub use filter::{AnnounceError, Filter, FilterConfig};
pub use remote::{Remote, RemoteConfig};
pub use stampede_redis::{Servers, Tls, TlsError, TlsFiles};
pub use stats::Stats;

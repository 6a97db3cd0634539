//! Reads that no crowd can break. It knows nothing of what it keeps.
//!
//! - [`Cache`]: values by key from a source, loaded once for everybody who wants them at the same time, in the process and over all processes
//! - [`Builder`]: its settings, each a protection: empty values, jittered and logical expiry, bounds
//! - [`Remote`]: Redis behind the caches of a process; without it a cache lives in the process alone
//! - [`Filter`]: whether a key can exist at all, in the process or in Redis
//! - [`Stats`]: what a cache has done
//!
//! How it works inside: `cache` is what callers see, `load` brings a key, `wait` decides which process loads it, `keep` keeps and forgets it, `flight` makes one load of many, `entry` is a value and its
//! times, `remote` is Redis: what is there and who loads; `listener` is its subscription, and `breaker` stops questions to it while it is away.

#![warn(missing_docs)]

mod background;
mod breaker;
mod builder;
mod cache;
mod entry;
mod error;
mod filter;
mod flight;
mod keep;
mod listener;
mod load;
mod remote;
mod stats;
mod wait;

pub use builder::{Builder, Cached, Key};
pub use cache::Cache;
pub use error::Error;
pub use filter::{Filter, FilterSettings, Unannounced};
pub use remote::{Remote, RemoteConfig};
pub use stampede_redis::Servers;
pub use stats::Stats;

//! Reads that no crowd can break. It knows nothing of what it keeps.
//!
//! - [`Cache`]: values by key from a source, loaded once for everybody who wants them at the same time, in the process and over all processes
//! - [`Builder`]: its settings, each a protection: empty values, jittered and logical expiry, bounds
//! - [`Remote`]: Redis behind the caches of a process; without it a cache lives in the process alone
//! - [`Filter`]: whether a key can exist at all, in the process or in Redis
//! - [`Stats`]: what a cache has done
//!
//! How it works inside: `cache` is what callers see, `load` brings a key, `keep` keeps and forgets it, `flight` makes one load of many, `entry` is a value and its
//! times, `remote` is Redis: what is there, who loads, who is told.

#![warn(missing_docs)]

mod background;
mod builder;
mod cache;
mod entry;
mod error;
mod filter;
mod flight;
mod keep;
mod load;
mod remote;
mod stats;

pub use builder::{Builder, Cached, Key};
pub use cache::Cache;
pub use error::Error;
pub use filter::{Filter, FilterSettings, Unannounced};
pub use remote::{Remote, RemoteConfig};
pub use stats::Stats;

//! The Redis client that the other crates share.
//!
//! - [`Client`]: one connection to a single server, to a master behind Sentinel, or to a cluster. It reconnects when the connection
//!   breaks, and [`CommandError`] tells a command that was not executed from one whose outcome is unknown.
//! - [`Servers`]: where Redis runs, by URLs with user, password, database number and TLS; [`TlsFiles`]: certificates.
//! - `cluster`: commands to a cluster. Only commands that a node refused to execute are sent again.
//! - `pipeline`: batches commands that arrive while others are in flight.
//! - [`Script`]: a Lua script, called by its hash.
//! - [`Backoff`]: the delay between retries; [`jitter`]: spreads delays.

#![warn(missing_docs)]

mod backoff;
mod client;
mod cluster;
mod error;
mod pipeline;
mod script;
mod servers;
mod tls;

pub use backoff::{Backoff, jitter};
pub use client::Client;
pub use error::{CommandError, EvalShaError, timeout_error};
pub use script::Script;
pub use servers::Servers;
pub use stampede_tls::{Tls, TlsError, TlsFiles};

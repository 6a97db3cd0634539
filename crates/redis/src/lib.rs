//! The way to Redis that the other crates share; it knows nothing of what is sent.
//!
//! - [`Link`]: one connection to one server, a master behind sentinels, or a cluster; made anew when it breaks, and a command that was
//!   not answered is told apart from one that was not sent ([`Failure`])
//! - `cluster`: what a node refused to carry out is sent again, and nothing else
//! - `line`: what comes while commands are under way goes together
//! - [`Script`]: sent by its hash, and by its text if Redis does not know it

#![warn(missing_docs)]

mod cluster;
mod line;
mod link;
mod script;

pub use link::{Failure, Link, Servers, too_late};
pub use script::Script;

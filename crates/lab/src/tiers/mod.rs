//! The four tiers of Stampede itself: one node over HTTP, on the private MariaDB and Redis of the lab.
//!
//! In order: [`solo`], [`shared`], [`queued`], [`shielded`]. [`measure()`] has what they go through.

mod measure;
pub mod queued;
pub mod shared;
pub mod shielded;
pub mod solo;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use crate::version::Version;

pub use measure::{AFTER_KILL, BEFORE_KILL, LOST, measure};

pub const VERSIONS: &[&Version] = &[&solo::VERSION, &shared::VERSION, &queued::VERSION, &shielded::VERSION];

/// What a node is started with.
#[derive(Debug, Clone)]
pub struct TierNode {
    pub tier: &'static str,
    pub data_dir: PathBuf,
    /// The token of the administrator.
    pub token: String,
    pub database: String,
    /// `None` in a tier without Redis.
    pub redis: Option<String>,
}

/// Builds the command that serves on the given address, or on any free one.
pub type NodeCommand = Box<dyn Fn(Option<SocketAddr>) -> Command + Send>;

/// Prepares the command of a node that allows load tests. Only the program `stampede` can: this crate does not contain the server.
pub type PrepareNode = fn(&TierNode) -> std::io::Result<NodeCommand>;

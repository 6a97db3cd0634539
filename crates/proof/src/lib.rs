//! Load test with verification.
//!
//! - [`mod@bench`]: the phases of a benchmark; `storm`: its last one; `drain`: how fast the queue is emptied
//! - [`generator`]: the load generator; [`history`], [`recorder`]: the recorded requests and responses
//! - [`system`]: the nodes, the administration routes and the ledger
//! - [`check`]: the invariants
//! - [`report`]: the result; [`machine`]: the processor time and memory that were used
//! - [`process`], [`servers`]: child processes and private database servers; [`http`]: an HTTP client

pub mod bench;
pub mod check;
mod drain;
pub mod generator;
pub mod history;
pub mod http;
pub mod machine;
pub mod process;
pub mod recorder;
pub mod report;
pub mod servers;
mod storm;
pub mod system;

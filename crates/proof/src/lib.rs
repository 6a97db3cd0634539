//! Load test with verification.
//!
//! - [`mod@bench`]: the phases of a benchmark; `storm`: its last one
//! - [`generator`]: buyers on raw connections; [`history`]: what they sent and how they were answered
//! - [`system`]: the nodes, the administrator's routes and the ledger
//! - [`check`]: the invariants
//! - [`report`]: the result; [`machine`]: what the processes and the machine used meanwhile

pub mod bench;
pub mod check;
pub mod generator;
pub mod history;
pub mod machine;
pub mod report;
mod storm;
pub mod system;

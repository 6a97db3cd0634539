//! Load that proves.
//!
//! - [`generator`]: a crowd on raw connections; [`history`]: what it asked and heard
//! - [`machine`]: what the processes and the machine used meanwhile

pub mod bench;
pub mod check;
pub mod generator;
pub mod history;
pub mod machine;
pub mod report;
pub mod system;

//! May this person have one now? Answered atomically.
//!
//! - [`memory`]: in this process, for the tier `solo`

pub mod memory;

pub use memory::MemoryGate;

//! Gates: decide atomically whether a user may buy.
//!
//! - [`memory`]: in this process, for the tier `solo`
//!
//! What every gate does is defined by [`stampede_core::ports::Gate`] and checked by `tests/it/conformance.rs`.

pub mod memory;

pub use memory::MemoryGate;

//! Gates: decide atomically whether a user may buy.
//!
//! - [`memory`]: in this process, for the tier `solo`
//! - [`redis`]: in Redis, common to all nodes, for the other tiers
//!
//! What every gate does is defined by [`stampede_core::ports::Gate`] and checked by `tests/it/conformance.rs`.

pub mod memory;
pub mod redis;

pub use memory::MemoryGate;
pub use redis::RedisGate;

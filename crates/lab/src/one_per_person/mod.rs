//! One order per person, on one node.
//!
//! In order: [`check_then_insert`], [`leaking_lock`], [`striped_locks`], [`keyed_lock`], [`unique_index`].

pub mod check_then_insert;
pub mod keyed_lock;
pub mod leaking_lock;
pub mod striped_locks;
pub mod unique_index;

use crate::version::Version;

pub const VERSIONS: &[&Version] = &[
    &check_then_insert::VERSION,
    &leaking_lock::VERSION,
    &striped_locks::VERSION,
    &keyed_lock::VERSION,
    &unique_index::VERSION,
];

//! The locks from outside, as their users have them.

mod exclusion;
mod fair;
mod faults;
mod fence;
mod keyed;
mod many_servers;
mod read_write;
mod reentrant;
mod support;
mod topology;
mod waiting;
mod watchdog;

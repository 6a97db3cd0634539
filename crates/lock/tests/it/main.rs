//! The locks from outside, as their users have them.

mod closing;
mod cluster_faults;
mod exclusion;
mod fair;
mod faults;
mod fence;
mod herds;
mod keyed;
mod kinds;
mod many_servers;
mod outages;
mod read_write;
mod red_heals;
mod reentrant;
mod replicas;
mod support;
mod topology;
mod waiting;
mod watchdog;

//! The versions through which a flash sale is usually built, each fixing the flaw of the one before, run against real servers and measured
//! side by side. Only the command `stampede lab` uses this crate.
//!
//! - One module per family, one file per version: [`stock`], [`one_per_person`], [`pre_deduction`], [`queues`], [`locks`],
//!   [`sold_out`], [`reads`], [`limits`], [`tiers`]. Each file begins with what the version adds, what is wrong with it, and what the next one
//!   fixes.
//! - [`version`]: what the lab knows of a version; [`registry`]: all of them
//! - [`mod@run`]: runs versions and compares the results with what is expected; [`measured`]: a result
//! - [`driver`]: the load; [`race`]: provokes races; [`kill`]: kills nodes; [`meter`]: counts statements and commands
//! - [`site`]: the tables and keys of one run; [`servers`]: the private servers
//! - [`report`]: the table, JSON and the HTML page

pub mod driver;
mod error;
pub mod kill;
pub mod limits;
pub mod locks;
pub mod measured;
pub mod meter;
pub mod one_per_person;
pub mod pre_deduction;
pub mod queues;
pub mod race;
pub mod reads;
pub mod registry;
pub mod report;
pub mod run;
pub mod servers;
pub mod site;
pub mod sold_out;
pub mod stock;
pub mod tiers;
pub mod version;

pub use error::{Error, Result};
pub use measured::{Flaw, Measured};
pub use run::{Lab, Options, Progress, VersionResult, run};
pub use version::{Expected, Family, Version};

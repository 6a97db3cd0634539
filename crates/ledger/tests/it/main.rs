//! The conformance suite on every supported database.

mod audit;
mod conformance;
mod servers;
mod sqlite;

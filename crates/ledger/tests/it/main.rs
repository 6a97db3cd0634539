//! One conformance suite over every database there is.

mod conformance;
mod servers;
mod sqlite;

//! One conformance suite over every database there is.

mod audit;
mod conformance;
mod servers;
mod sqlite;

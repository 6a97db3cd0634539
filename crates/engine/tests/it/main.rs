//! The engine on a real ledger: one that fails at chosen moments, and one that another process writes to.

mod audit;
mod config;
mod faulty;
mod lua;
mod outages;
mod quarantine;
mod sessions;
mod tier;
mod watch;

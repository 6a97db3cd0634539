//! The cache from outside, on private Redis servers.

mod crowd;
mod filter;
mod local;
mod outage;
mod support;
mod update;

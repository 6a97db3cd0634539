//! The cache from outside, on private Redis servers.

mod application;
mod created;
mod crowd;
mod filter;
mod local;
mod outage;
mod scripts;
mod subscription;
mod support;
mod update;
mod wait;

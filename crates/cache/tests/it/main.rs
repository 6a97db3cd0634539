//! Tests of the public API on private Redis servers.

mod application;
mod cache_stampede;
mod created_keys;
mod filter;
mod invalidation;
mod load_lock;
mod local;
mod outage;
mod scripts;
mod subscription;
mod support;
mod tls;

//! The HTTP API: parses requests, calls the engine, writes responses.
//!
//! - [`server`]: accepts connections and shuts down gracefully; `connections`: their limits; `write_timeout`, [`tls`]
//! - [`service`]: one request from its head to its response; `host`, `cors`
//! - `router`: the routes; [`openapi`]: the document made from them
//! - `buy`: buying, on the fast path and through the router
//! - [`app`]: what the handlers share; `extract`: bodies, ids, query strings, callers and their limits; `pagination`
//! - [`problem`]: refusals as `application/problem+json` with a stable code, in English and Chinese
//! - [`credentials`]: administrators and their roles; `predictable`: secrets that could be guessed; [`address`]: where a request comes from; `security_log`: logins and denied access
//! - `metrics`: request counts and durations; `log_throttle`: limits on log lines
//! - one file per resource: `login`, `sales`, `shops`, `orders`, `operations` (with `readiness`), `page`, `load_test`; `admin`: what
//!   administrators do

pub mod address;
mod admin;
pub mod app;
mod buy;
mod connections;
mod cors;
pub mod credentials;
mod extract;
mod host;
mod load_test;
mod log_throttle;
mod login;
mod metrics;
pub mod openapi;
mod operations;
mod orders;
mod page;
mod pagination;
mod payments;
mod predictable;
pub mod problem;
mod readiness;
mod router;
mod sales;
mod security_log;
pub mod server;
pub mod service;
mod shops;
pub mod tls;
mod write_timeout;

pub use address::Network;
pub use app::{App, Config, Surface};
pub use axum::http::HeaderValue;
pub use credentials::{AdminToken, InvalidAdminToken, Role};
pub use predictable::is_predictable;
pub use server::{ServerConfig, serve};
pub use service::HttpService;

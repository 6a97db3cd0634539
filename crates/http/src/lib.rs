//! The edge. Thin: parse, call the engine, answer.
//!
//! - [`server`]: accepts connections, answers requests, shuts down gracefully; `connections`: their bounds; `patient`, [`tls`],
//!   `cors`, `throttle`
//! - [`app`]: what the handlers share
//! - [`problem`]: every no, as `application/problem+json` with a stable code, in English and Chinese
//! - [`credentials`]: administrators and their roles; [`address`]: where a request comes from; `host`: the `Host` header;
//!   `security_log`: who was refused
//! - [`openapi`]: the routes, and the document made from them; `figures`: how many, how long
//! - `extract`: bodies, ids, queries, who is asking
//! - one file per resource: `login`, `sales`, `shops`, `orders`, `admin`, `audit`, `quarantine`, `users`, `operations` (with `readiness`), `page`,
//!   `load_test`

pub mod address;
mod admin;
pub mod app;
mod audit;
mod connections;
mod cors;
pub mod credentials;
mod extract;
mod figures;
mod host;
mod load_test;
mod login;
mod marks;
pub mod openapi;
mod operations;
mod orders;
mod page;
mod patient;
pub mod problem;
mod quarantine;
mod readiness;
mod sales;
mod security_log;
pub mod server;
mod shops;
mod throttle;
pub mod tls;
mod users;

pub use address::Network;
pub use app::{App, Config, Surface};
pub use axum::http::HeaderValue;
pub use credentials::{AdminToken, BadToken, Role};
pub use server::{ServerConfig, serve};

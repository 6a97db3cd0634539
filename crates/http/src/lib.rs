//! The edge. Thin: parse, call the engine, answer.
//!
//! - [`server`]: connections, their limits, graceful shutdown; `patient`, [`tls`], `cors`
//! - [`app`]: what the handlers share
//! - [`problem`]: every no, as `application/problem+json` with a stable code, in English and Chinese
//! - [`credentials`]: administrators and their roles; [`address`]: where a request comes from; `security_log`: who was refused
//! - [`openapi`]: the routes, and the document made from them; `figures`: how many, how long
//! - `extract`: bodies, ids, queries, who is asking
//! - one file per resource: `login`, `sales`, `shops`, `orders`, `admin`, `audit`, `quarantine`, `operations`, `page`, `load_test`

pub mod address;
mod admin;
pub mod app;
mod audit;
mod cors;
pub mod credentials;
mod extract;
mod figures;
mod load_test;
mod login;
pub mod openapi;
mod operations;
mod orders;
mod page;
mod patient;
pub mod problem;
mod quarantine;
mod sales;
mod security_log;
pub mod server;
mod shops;
pub mod tls;

pub use address::Network;
pub use app::{App, Config, Surface};
pub use axum::http::HeaderValue;
pub use credentials::{AdminToken, BadToken, Role};
pub use server::{ServerConfig, serve};

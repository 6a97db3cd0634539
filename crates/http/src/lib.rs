//! The edge. Thin: parse, call the engine, answer.
//!
//! - [`server`]: connections, their limits, graceful shutdown
//! - [`app`]: what the handlers share; the routes
//! - [`problem`]: every no, as `application/problem+json` with a stable code, in English and Chinese
//! - `extract`: bodies, ids, queries, who is asking
//! - one file per resource: `login`, `sales`, `orders`, `admin`, `operations`, `page`

mod admin;
pub mod app;
mod extract;
mod login;
mod operations;
mod orders;
mod page;
pub mod problem;
mod sales;
pub mod server;

pub use app::{AdminToken, App, Config, Surface};
pub use server::{ServerConfig, serve};

//! The client against real Redis servers.

mod scripts;
mod tls;

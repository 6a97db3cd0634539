//! For tests: private temporary servers, child processes that end with the test, a TCP proxy that injects faults, an HTTP client. A
//! dev-dependency only: what `stampede bench` needs too is part of `stampede-proof` and re-exported here.
//!
//! - [`process`], [`mariadb`], [`postgres`], [`rabbitmq`], [`Client`]: re-exported from `stampede-proof`
//! - [`redis`]: Redis servers: standalone, with a replica and a sentinel, as a cluster; with TLS
//! - [`fake_clock`]: a clock for servers that a test can set
//! - [`proxy`]: a TCP proxy that closes connections, delays, stops reading, drops responses
//! - [`lua`]: checks the header comments of Redis scripts
//! - [`until`]: waits for a condition; [`soak`]: how many repetitions

pub mod fake_clock;
pub mod lua;
pub mod proxy;
pub mod redis;
pub mod soak;
mod wait;

pub use fake_clock::FakeClock;
pub use proxy::Proxy;
pub use soak::count;
pub use stampede_proof::http::{Client, Exchange, Reply, observe};
pub use stampede_proof::process::{self, Process};
pub use stampede_proof::servers::{Server, free_port, mariadb, postgres, rabbitmq};
pub use wait::until;

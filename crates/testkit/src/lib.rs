//! For tests: private throw-away servers, processes that die with the test, a proxy that breaks connections, a plain HTTP
//! client. Knows nothing of Stampede.
//!
//! - [`process`]: a child process that is killed by its pid, also when the test process dies
//! - [`mariadb`], [`postgres`], [`redis`]: servers on free ports with data of their own
//! - [`fake_clock`]: a clock for them that can be set
//! - [`proxy`]: a TCP proxy that can cut, delay, stop reading and drop
//! - [`http`]: one keep-alive connection
//! - [`lua`]: the heads of scripts for Redis
//! - [`seed`]: a number to replay a failure by
//! - [`soak`]: how much

pub mod fake_clock;
pub mod http;
pub mod lua;
pub mod mariadb;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod redis;
pub mod seed;
mod server;
pub mod soak;

pub use fake_clock::FakeClock;
pub use http::{Client, Exchange, Reply, observe};
pub use process::Process;
pub use proxy::Proxy;
pub use seed::Dice;
pub use server::Server;
pub use soak::count;

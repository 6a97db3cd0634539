//! For tests: processes that die with the test, and a client that speaks plain HTTP/1.1. Knows nothing of Stampede.
//!
//! - [`process`]: a child process that is killed by its pid, also when the test process dies
//! - [`http`]: one keep-alive connection
//! - [`seed`]: a number to replay a failure by
//! - [`soak`]: how much

pub mod http;
pub mod process;
pub mod seed;
pub mod soak;

pub use http::{Client, Reply};
pub use process::Process;
pub use seed::Dice;
pub use soak::count;

//! The error of this crate.

/// Why a version could not be run to its end. A flaw that was found is not an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("MariaDB: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("Redis: {0}")]
    Redis(#[from] redis::RedisError),
    #[error("RabbitMQ: {0}")]
    RabbitMq(#[from] lapin::Error),
    #[error("lock: {0}")]
    Lock(#[from] stampede_lock::Error),
    #[error("private server: {0}")]
    Server(#[from] std::io::Error),
    #[error("tier: {}", chain(.0))]
    Tier(#[from] stampede_proof::system::SystemError),
    #[error("timed out: {0}")]
    TimedOut(&'static str),
    #[error("{0}")]
    Failed(String),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

//! Errors, and what a caller can do about them.

use std::time::Duration;

use stampede_redis::CommandError;

/// Why a lock was not acquired, or is no longer held.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another owner holds the lock. Try again later, or wait with [`Lock::try_lock_for`](crate::Lock::try_lock_for).
    #[error("the lock is held by another owner")]
    NotAcquired {
        /// The remaining TTL of the other lease. The lease may be renewed, and it may be released earlier.
        remaining: Option<Duration>,
    },
    /// The lease expired before it was renewed or released. Stop working: another owner may have held the lock since.
    #[error("the lock is lost: its lease expired")]
    Lost,
    /// The lease expired, and another owner holds the lock now. That owner's lease is left untouched. Stop working.
    #[error("the lock is lost: it is held by another owner")]
    HeldByOther,
    /// The owner holds the read lock and asked for the write lock, so it would wait for itself. Release the read lock first.
    #[error("a read lock cannot be upgraded: release it before acquiring the write lock")]
    UpgradeNotAllowed,
    /// Redis does not respond. The lock does not stay acquired: a lease that may have been created is released in the background, and
    /// expires with its TTL at the latest. Try again later.
    #[error("Redis cannot be reached: {0}")]
    Unreachable(#[source] redis::RedisError),
    /// Redis responds with an error: the key has another type, a permission is missing, the memory is full.
    #[error("Redis refuses: {0}")]
    Refused(#[source] redis::RedisError),
    /// The lock was acquired, but too few replicas confirmed it in time, so it was released again (see
    /// [`Config::replicas`](crate::Config::replicas)). Try again later.
    #[error("only {confirmed} of {required} replicas confirmed the lock")]
    NotReplicated {
        /// How many replicas must confirm.
        required: usize,
        /// How many replicas confirmed.
        confirmed: usize,
    },
    /// [`Locks::close`](crate::Locks::close) was called.
    #[error("the lock client is closed")]
    Closed,
    /// A name, a TTL or a setting is invalid.
    #[error("{0}")]
    InvalidArgument(String),
}

impl Error {
    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NotAcquired { .. } | Self::Unreachable(_) | Self::NotReplicated { .. })
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::InvalidArgument(message.into())
    }
}

/// The result of a lock operation.
pub type Result<T> = std::result::Result<T, Error>;

impl From<CommandError> for Error {
    fn from(error: CommandError) -> Self {
        match error {
            CommandError::NotSent(error) | CommandError::Unknown(error) => Self::Unreachable(error),
            CommandError::Refused(error) => Self::Refused(error),
        }
    }
}

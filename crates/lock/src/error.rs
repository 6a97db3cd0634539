//! What can go wrong, and what to do about it.

use std::time::Duration;

use stampede_redis::CommandError;

/// Why there is no lock, or none any more.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Somebody else holds it. Try again later, or wait with [`Lock::lock_within`](crate::Lock::lock_within).
    #[error("somebody else holds the lock")]
    NotAcquired {
        /// What is left of the other's lease. It may be renewed, and it may be released earlier.
        remaining: Option<Duration>,
    },
    /// The lease ended before it was renewed or released. Stop: somebody else may have had the lock since.
    #[error("the lock is lost: its lease ended")]
    Lost,
    /// The lease ended, and somebody else holds the lock now. Theirs was left alone. Stop.
    #[error("the lock is lost: it belongs to somebody else now")]
    WrongOwner,
    /// The owner holds the read lock, and would wait for itself. Release it first.
    #[error("who reads cannot write: release the read lock first")]
    Upgrade,
    /// Redis does not answer. Nothing stays locked by this: what may have been acquired is released in the background, and ends with
    /// its lease at the latest. Try again later.
    #[error("Redis cannot be reached: {0}")]
    Unreachable(#[source] redis::RedisError),
    /// Redis answers, but not what a lock needs: the key is used for something else, a permission is missing, the memory is full.
    #[error("Redis refuses: {0}")]
    Refused(#[source] redis::RedisError),
    /// It was acquired, but too few replicas have confirmed it in time, so it was released again (see
    /// [`Config::replicas`](crate::Config::replicas)). Try again later.
    #[error("only {confirmed} of {wanted} replicas know of the lock")]
    NotReplicated {
        /// How many should have.
        wanted: usize,
        /// How many have.
        confirmed: usize,
    },
    /// [`Locks::close`](crate::Locks::close) was called.
    #[error("the locks are closed")]
    Closed,
    /// A setting makes no sense.
    #[error("{0}")]
    Setting(String),
}

impl Error {
    /// Might the same call succeed later?
    pub fn may_retry(&self) -> bool {
        matches!(self, Self::NotAcquired { .. } | Self::Unreachable(_) | Self::NotReplicated { .. })
    }

    pub(crate) fn setting(what: impl Into<String>) -> Self {
        Self::Setting(what.into())
    }
}

/// The outcome of something about a lock.
pub type Result<T> = std::result::Result<T, Error>;

impl From<CommandError> for Error {
    fn from(failure: CommandError) -> Self {
        match failure {
            CommandError::NotSent(error) | CommandError::Unknown(error) => Self::Unreachable(error),
            CommandError::Refused(error) => Self::Refused(error),
        }
    }
}

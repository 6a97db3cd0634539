//! Errors, classified by whether the command may have been executed.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// There was no connection, or the server was not ready: the command was not executed.
    #[error("the command was not sent: {0}")]
    NotSent(#[source] RedisError),
    /// There was no usable reply: the command may have been executed, or may still be.
    #[error("the outcome of the command is unknown: {0}")]
    Unknown(#[source] RedisError),
    /// Redis replied with an error: the command was not executed.
    #[error("the command was refused: {0}")]
    Refused(#[source] RedisError),
}

/// Why [`Client::eval_sha`](crate::Client::eval_sha) has no result.
#[derive(Debug, thiserror::Error)]
pub enum EvalShaError {
    /// The server does not have the script (`NOSCRIPT`), so nothing was executed. Loaded scripts are neither persisted nor replicated:
    /// the server has been restarted, replaced or flushed since the script was loaded.
    #[error("the server does not have the script")]
    NoScript,
    /// Any other failure.
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// What an error says about the command.
pub(crate) enum ErrorClass {
    /// Refused; sending the command again gets the same error.
    Permanent,
    /// Not executed: the server is not ready, not the master, or not the node of this slot. Another connection may succeed.
    Transient,
    /// There was no usable reply.
    Unknown,
}

impl ErrorClass {
    pub(crate) fn of(error: &RedisError) -> Self {
        use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
        match error.kind() {
            ErrorKind::Server(Ask | BusyLoading | ClusterDown | MasterDown | Moved | ReadOnly | TryAgain) => {
                Self::Transient
            }
            ErrorKind::Extension if matches!(error.code(), Some("BUSY" | "NOREPLICAS")) => Self::Transient,
            ErrorKind::Server(_) | ErrorKind::Extension => Self::Permanent,
            ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => Self::Permanent,
            ErrorKind::ClusterConnectionNotFound => Self::Transient,
            _ if error.is_connection_refusal() => Self::Transient,
            _ => Self::Unknown,
        }
    }

    pub(crate) fn with(self, error: RedisError) -> CommandError {
        match self {
            Self::Permanent => CommandError::Refused(error),
            Self::Transient => CommandError::NotSent(error),
            Self::Unknown => CommandError::Unknown(error),
        }
    }
}

impl From<RedisError> for CommandError {
    fn from(error: RedisError) -> Self {
        ErrorClass::of(&error).with(error)
    }
}

impl CommandError {
    pub(crate) fn into_inner(self) -> RedisError {
        match self {
            Self::NotSent(error) | Self::Unknown(error) | Self::Refused(error) => error,
        }
    }

    /// Whether Redis answers but refuses writes: its memory or its disk is full, its replicas are away, or it is a replica itself; or the
    /// rights of the user do not suffice.
    pub fn is_write_refusal(&self) -> bool {
        match self {
            Self::Refused(error) | Self::NotSent(error) => {
                matches!(error.code(), Some("OOM" | "MISCONF" | "NOREPLICAS" | "READONLY" | "NOPERM"))
            }
            Self::Unknown(_) => false,
        }
    }

    pub(crate) fn is_no_script(&self) -> bool {
        matches!(self, Self::Refused(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
    }
}

/// Turns an error reply into an `Err`.
pub(crate) fn check_reply(value: Value) -> Result<Value, CommandError> {
    value.extract_error().map_err(CommandError::from)
}

/// Whether the connection is unusable after this error. Error replies of the server arrive over a working connection.
pub(crate) fn is_connection_broken(error: &RedisError) -> bool {
    matches!(ErrorClass::of(error), ErrorClass::Unknown)
}

/// The error of an operation that timed out.
pub fn timeout_error() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

//! Why a request failed, with the stable code that the client sees.

use std::time::Duration;

use stampede_core::ids::LeaseEnded;
use stampede_core::ports::{GateError, LedgerError};
use stampede_core::{Code, Invalid, Refusal};

use crate::batcher::Full;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The gate or the ledger refused.
    #[error("refused: {}", .0.code().as_str())]
    Refused(Refusal),
    /// Refused with this code.
    #[error("refused: {}", .0.as_str())]
    Plain(Code),
    /// Not possible in the current state; the text says why.
    #[error("{0}")]
    Illegal(String),
    #[error("{} members are invalid", .0.len())]
    Invalid(Vec<Invalid>),
    #[error("too many requests; wait {wait:?}")]
    Limited { wait: Duration },
    /// A bound is reached. Nothing was done.
    #[error("a bound is reached")]
    Busy,
    /// Buying is not possible now; the text says why.
    #[error("{0}")]
    Unready(String),
    /// Not known in time. Repeating the request tells.
    #[error("the outcome is not known yet")]
    OutcomeUnknown,
    /// The database rejects the order's data; the text is its error message.
    #[error("the order cannot be recorded: {0}")]
    NotRecordable(String),
    #[error("the ledger failed")]
    Ledger(#[from] LedgerError),
    #[error("the gate failed")]
    Gate(#[from] GateError),
    /// The sender of login codes failed.
    #[error("the code could not be sent")]
    Sender(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    pub const fn code(&self) -> Code {
        match self {
            Self::Refused(refusal) => refusal.code(),
            Self::Plain(code) => *code,
            Self::Illegal(_) => Code::IllegalStep,
            Self::Invalid(_) => Code::InvalidRequest,
            Self::Limited { .. } => Code::TooManyRequests,
            Self::Busy | Self::Gate(GateError::Busy) => Code::Busy,
            Self::NotRecordable(_) => Code::NotRecordable,
            Self::OutcomeUnknown
            | Self::Ledger(LedgerError::Unknown(_))
            | Self::Gate(GateError::Unanswered | GateError::Damaged) => Code::OutcomeUnknown,
            Self::Ledger(LedgerError::Conflict(_) | LedgerError::Unavailable(_))
            | Self::Gate(GateError::Lost | GateError::NotOpen | GateError::NotSent)
            | Self::Unready(_)
            | Self::Sender(_) => Code::Unavailable,
            Self::Ledger(LedgerError::Poison(_)) => Code::Internal,
        }
    }
}

impl From<LeaseEnded> for Error {
    fn from(_: LeaseEnded) -> Self {
        Self::Busy
    }
}

impl<T> From<Full<T>> for Error {
    fn from(_: Full<T>) -> Self {
        Self::Busy
    }
}

/// The error's message, followed by those of its causes that it does not contain.
pub(crate) fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = inner.source();
    }
    text
}

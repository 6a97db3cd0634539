//! Errors, classified by whether the message may be in the queue.

/// Why no message can be published. The texts name neither hosts nor users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnreadyReason {
    /// There is no connection.
    #[error("it cannot be reached")]
    Unreachable,
    /// It does not accept the user, or does not allow what is needed.
    #[error("it refuses access")]
    Refused,
    /// Its memory or disk is full.
    #[error("it has blocked publishers, because its memory or disk is full")]
    Blocked,
    /// It has returned a message, and what is missing is not declared again yet.
    #[error("it returns messages, because a queue or a binding is missing")]
    Returning,
    /// It has taken no message for a while and refused some, for example because a policy limits the length of its queues.
    #[error("it refuses messages, for example because its queues are full")]
    Rejecting,
    /// An operator has to change the settings, or to delete what is there.
    #[error("a queue or an exchange exists and was declared otherwise")]
    DeclaredOtherwise,
}

/// Why a call of a queue failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// There is no connection, so nothing was sent.
    #[error("the queue cannot be reached: {0}")]
    NotSent(String),
    /// A bound is reached, or the broker has blocked publishers because its memory or disk is full. Nothing was sent.
    #[error("the queue is busy: {0}")]
    Busy(&'static str),
    /// The broker returned the message because it belongs to no queue. It is in none.
    #[error("the broker returned the message: no queue takes it")]
    Unroutable,
    /// The message was sent and not confirmed: it may be in the queue. Publishing it again is safe, because recording is idempotent.
    #[error("the broker did not confirm the message: {0}")]
    Unconfirmed(String),
    /// The batch has no orders, or too many for one message. Nothing was sent.
    #[error("a message cannot contain {0} orders")]
    InvalidSize(usize),
    /// The connection of a consumer was lost. What it has not acknowledged is delivered again.
    #[error("the connection to the queue was lost: {0}")]
    Disconnected(String),
}

impl QueueError {
    /// Whether the message may be in the queue although publishing it failed.
    pub const fn may_be_queued(&self) -> bool {
        match self {
            Self::Unconfirmed(_) => true,
            Self::NotSent(_) | Self::Busy(_) | Self::Unroutable | Self::InvalidSize(_) | Self::Disconnected(_) => false,
        }
    }
}

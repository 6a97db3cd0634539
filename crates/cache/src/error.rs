//! What can go wrong.

use std::sync::Arc;

/// Why there is no value. `E` is the error of the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error<E> {
    /// The source failed. Everybody who waited for this load gets the same error; nothing is remembered of it.
    #[error("the source failed: {0}")]
    Source(Arc<E>),
    /// It took longer than [`Builder::wait_at_most`](crate::Builder::wait_at_most). The load goes on, for those who come later.
    #[error("the value did not come in time")]
    TooSlow,
    /// The load panicked.
    #[error("the load did not end well")]
    Broken,
}

impl<E> Clone for Error<E> {
    fn clone(&self) -> Self {
        match self {
            Self::Source(error) => Self::Source(error.clone()),
            Self::TooSlow => Self::TooSlow,
            Self::Broken => Self::Broken,
        }
    }
}

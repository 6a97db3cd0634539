//! Errors of a cache.

use std::sync::Arc;

/// Why a value could not be returned. `E` is the error of the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error<E> {
    /// The source failed. All callers that waited for this load get the same error. Errors are not cached.
    #[error("the source failed: {0}")]
    Source(Arc<E>),
    /// The value was not available within [`Builder::wait_timeout`](crate::Builder::wait_timeout). The load continues, and later callers
    /// can get its value.
    #[error("timed out waiting for the value")]
    Timeout,
    /// The load panicked.
    #[error("the load panicked")]
    Panicked,
}

impl<E> Clone for Error<E> {
    fn clone(&self) -> Self {
        match self {
            Self::Source(error) => Self::Source(error.clone()),
            Self::Timeout => Self::Timeout,
            Self::Panicked => Self::Panicked,
        }
    }
}

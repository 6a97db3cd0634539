//! An acquired lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::error::{Error, Result};
use super::lease::{Lease, ReleaseOutcome};
use super::locks::{Shared, new_backoff};
use stampede_redis::CommandError;

/// An acquired lock. Release it with [`release`](Self::release); dropping it releases it in the background.
#[must_use = "dropping the guard releases the lock"]
pub struct Guard {
    shared: Arc<Shared>,
    /// `None` once it is released.
    lease: Option<Arc<Lease>>,
    fencing_token: Option<u64>,
}

impl Guard {
    pub(crate) fn new(shared: Arc<Shared>, lease: Arc<Lease>, fencing_token: Option<u64>) -> Self {
        Self { shared, lease: Some(lease), fencing_token }
    }

    /// The fencing token, higher for every new holder of the lock. Send it with every write, and let the resource refuse a token lower
    /// than the highest one it has seen: then writes of a holder that has lost the lock without noticing are refused.
    ///
    /// The simple lock has none. Re-entering a lock returns the token of the first entry, and so does reading while holding the write
    /// lock; otherwise every reader gets its own.
    pub fn fencing_token(&self) -> Option<u64> {
        self.fencing_token
    }

    /// Whether the lock is held now, as far as this process can tell. It may be lost a moment later.
    pub fn is_valid(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.is_valid())
    }

    /// How long the lock remains valid without another renewal.
    pub fn valid_for(&self) -> Duration {
        let lease = self.lease.as_ref().filter(|lease| lease.is_valid());
        lease.map_or(Duration::ZERO, |lease| lease.valid_until().saturating_duration_since(Instant::now()))
    }

    /// Completes as soon as the lock is no longer valid: Redis does not have it any more, or its lease has expired without a renewal.
    /// Also completes when the guard is released or dropped. Run it beside the work:
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = stampede_testkit::redis::start()?;
    /// # let url = stampede_testkit::redis::url(server.port());
    /// # use stampede_lock::{Config, Locks};
    /// # let lock = Locks::connect(url, Config::default()).await?.simple("work")?;
    /// # async fn work() {}
    /// let guard = lock.lock().await?;
    /// let done = tokio::select! {
    ///     () = work() => guard.release().await,
    ///     () = guard.lost() => Err(stampede_lock::Error::Lost),
    /// };
    /// # done?;
    /// # Ok(()) }
    /// ```
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let lease = self.lease.clone();
        async move {
            if let Some(lease) = lease {
                lease.lost().await;
            }
        }
    }

    /// Releases the lock. A request without a reply is repeated until the response timeout, and has effect once.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::HeldByOther`] if the lock was lost before: the last work may not have been exclusive.
    /// [`Error::Unreachable`] if Redis does not respond: the release continues in the background, and the lease expires at the latest.
    pub async fn release(mut self) -> Result<()> {
        let Some(lease) = self.lease.clone() else { return Ok(()) };
        self.shared.watchdog.unwatch(&lease);
        let was_valid = lease.is_valid();
        lease.end();
        let deadline = Instant::now() + self.shared.config.response_timeout;
        let mut maybe_released = false;
        let mut backoff = new_backoff();
        loop {
            match lease.lock.release(&self.shared.client, &lease.id).await {
                Ok(outcome) => {
                    if !lease.is_unresolved() {
                        self.lease = None;
                    }
                    return match outcome {
                        ReleaseOutcome::Released => Ok(()),
                        // Released by an earlier request whose reply was lost. If the lease had expired before, the lock may have been
                        // lost as well, so that is reported.
                        _ if maybe_released && was_valid => Ok(()),
                        ReleaseOutcome::NotHeld => Err(Error::Lost),
                        ReleaseOutcome::HeldByOther => Err(Error::HeldByOther),
                    };
                }
                Err(CommandError::Refused(error)) => return Err(Error::Refused(error)),
                // Dropping the guard continues in the background.
                Err(error) if Instant::now() + backoff.current() >= deadline => return Err(error.into()),
                Err(error) => maybe_released |= matches!(error, CommandError::Unknown(_)),
            }
            backoff.sleep().await;
        }
    }

    /// Whether Redis may have the lease; otherwise there is nothing to release.
    pub(crate) fn may_exist(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.may_exist())
    }

    /// Releases the lock in a separate task, which continues if the caller is cancelled.
    pub(crate) fn release_detached(self) -> JoinHandle<Result<()>> {
        let shared = self.shared.clone();
        shared.spawn_release(self.release())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.shared.watchdog.unwatch(&lease);
            lease.end();
            if lease.may_exist() {
                let unresolved = lease.is_unresolved();
                self.shared.clone().release_in_background(lease.lock.clone(), lease.id.clone(), lease.ttl, unresolved);
            }
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("fencing_token", &self.fencing_token)
            .field("valid", &self.is_valid())
            .finish_non_exhaustive()
    }
}

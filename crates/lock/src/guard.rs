//! A lock in hand.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::client::Shared;
use crate::error::{Error, Result};
use crate::hold::{Gone, Hold};
use stampede_redis::CommandError;

/// After a release that did not reach Redis; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// A lock in hand. Give it back with [`release`](Self::release); dropped, it is released in the background.
#[must_use = "dropped, the lock is released"]
pub struct Guard {
    shared: Arc<Shared>,
    /// `None` once it is given back.
    hold: Option<Arc<Hold>>,
    fence: Option<u64>,
}

impl Guard {
    pub(crate) fn new(shared: Arc<Shared>, hold: Arc<Hold>, fence: Option<u64>) -> Self {
        Self { shared, hold: Some(hold), fence }
    }

    /// The fencing token: higher for every new holder of the lock. Send it with every write, and let the resource refuse a lower one
    /// than it has seen: then it does not matter whether a holder knows that it has lost the lock.
    ///
    /// The simple lock has none. Entering again gives the same token as the first time, and so does reading while one writes; readers
    /// get one each.
    pub fn fence(&self) -> Option<u64> {
        self.fence
    }

    /// Is the lock surely held at this moment, as far as can be told from here? A moment later it may not be.
    pub fn is_sure(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.is_sure())
    }

    /// How long the lock is surely held if it is not renewed.
    pub fn sure_for(&self) -> Duration {
        let hold = self.hold.as_ref().filter(|hold| hold.is_sure());
        hold.map_or(Duration::ZERO, |hold| hold.sure_until().saturating_duration_since(Instant::now()))
    }

    /// Ends as soon as the lock is not surely held any more: Redis has forgotten it, or its lease has ended without a renewal. Also
    /// ends when the guard is released or dropped. Run it beside the work:
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
        let hold = self.hold.clone();
        async move {
            if let Some(hold) = hold {
                hold.lost().await;
            }
        }
    }

    /// Gives the lock back. What is lost on the way is repeated, for as long as an answer may take, and counts once.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::WrongOwner`] if the lock was gone before: what was done last was perhaps not done alone.
    /// [`Error::Unreachable`] if Redis does not answer: it goes on in the background, and the lease ends it at the latest.
    pub async fn release(mut self) -> Result<()> {
        let Some(hold) = self.hold.clone() else { return Ok(()) };
        self.shared.watchdog.forget(&hold);
        hold.end();
        let until = Instant::now() + self.shared.config.answer_within;
        let mut perhaps_done = false;
        let mut pause = FIRST_PAUSE;
        loop {
            match hold.lock.release(&self.shared.link, &hold.id).await {
                Ok(gone) => {
                    if !hold.is_doubtful() {
                        self.hold = None;
                    }
                    return match gone {
                        Gone::Released => Ok(()),
                        // Gone by an earlier try whose answer was lost.
                        _ if perhaps_done => Ok(()),
                        Gone::Nobody => Err(Error::Lost),
                        Gone::Other => Err(Error::WrongOwner),
                    };
                }
                Err(CommandError::Refused(error)) => return Err(Error::Refused(error)),
                // Dropping it goes on with it.
                Err(failure) if Instant::now() + pause >= until => return Err(failure.into()),
                Err(failure) => perhaps_done |= matches!(failure, CommandError::Unknown(_)),
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// May Redis know of it?
    pub(crate) fn is_known(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.is_known())
    }

    /// Gives the lock back in a task of its own, which goes on if the caller goes away.
    pub(crate) fn release_detached(self) -> JoinHandle<Result<()>> {
        let shared = self.shared.clone();
        shared.spawn(self.release())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.shared.watchdog.forget(&hold);
            hold.end();
            if hold.is_known() {
                let doubtful = hold.is_doubtful();
                self.shared.clone().abandon(hold.lock.clone(), hold.id.clone(), hold.lease, doubtful);
            }
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("fence", &self.fence).field("sure", &self.is_sure()).finish_non_exhaustive()
    }
}

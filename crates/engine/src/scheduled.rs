//! Scheduled work that one node at a time does: under a lock in Redis, whose fencing token the ledger checks. Work that several nodes may do
//! at once goes on without the lock while Redis cannot be asked.

use std::time::{Duration, Instant};

use stampede_core::ports::{Fence, ScheduledWork};
use stampede_lock::{Error, Guard, Lock, Locks, Owner};

const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How long a node may have the lock for cancelling orders that were not paid in time. If the work takes longer, another node joins.
const EXPIRY_TTL: Duration = Duration::from_secs(3);

/// When a node may do one kind of work.
#[derive(Debug)]
pub(crate) struct Schedule {
    work: ScheduledWork,
    /// `None` in tiers without Redis: the work is done without asking. It is harmless if two processes do it.
    lock: Option<Lock>,
}

/// The permission to work now.
#[derive(Debug)]
pub(crate) struct WorkPermit {
    work: ScheduledWork,
    guard: Option<Guard>,
}

impl Schedule {
    /// # Errors
    /// If the lock cannot be created.
    pub(crate) fn new(work: ScheduledWork, locks: Option<&Locks>) -> Result<Self, Error> {
        let lock = locks.map(|locks| locks.reentrant(work.as_str(), &Owner::new())).transpose()?;
        let lock = match work {
            // It is due within a second, and a node that was killed must not hold it up for longer.
            ScheduledWork::ExpireOrders => lock.map(|lock| lock.with_ttl(EXPIRY_TTL)).transpose()?,
            _ => lock,
        };
        Ok(Self { work, lock })
    }

    /// The permit of this node; `None` if another node has it, or if the work needs the lock and Redis cannot be asked.
    pub(crate) async fn begin(&self) -> Option<WorkPermit> {
        let work = self.work;
        let Some(lock) = &self.lock else { return Some(WorkPermit { work, guard: None }) };
        match lock.try_lock().await {
            Ok(guard) => Some(WorkPermit { work, guard: Some(guard) }),
            Err(Error::NotAcquired { .. }) => None,
            Err(error) if work.is_safe_at_once() => {
                tracing::warn!(work = work.as_str(), %error, "scheduled work is done without its lock");
                Some(WorkPermit { work, guard: None })
            }
            Err(error) => {
                tracing::warn!(work = work.as_str(), %error, "scheduled work waits for its lock");
                None
            }
        }
    }

    /// Waits for the permit.
    pub(crate) async fn begin_within(&self, timeout: Duration) -> Option<WorkPermit> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.begin().await {
                None if Instant::now() < deadline => tokio::time::sleep(RETRY_PAUSE).await,
                permit => return permit,
            }
        }
    }
}

impl WorkPermit {
    pub(crate) fn fence(&self) -> Option<Fence> {
        let token = self.guard.as_ref()?.fencing_token()?;
        Some(Fence { work: self.work, token })
    }

    pub(crate) async fn end(self) {
        if let Some(guard) = self.guard
            && let Err(error) = guard.release().await
        {
            tracing::debug!(work = self.work.as_str(), %error, "the lock of scheduled work was lost");
        }
    }

    /// Says that another node has taken over.
    pub(crate) fn warn_superseded(&self) {
        tracing::warn!(work = self.work.as_str(), "scheduled work was refused: another node has taken over");
    }
}

#[cfg(test)]
mod tests;

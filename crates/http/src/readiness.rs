//! Whether the ledger responds. It is checked at most once a second, whatever the number of callers.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stampede_core::Code;
use stampede_engine::Error;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long the result of a check is used.
const FRESH_FOR: Duration = Duration::from_secs(1);

/// The result of a check.
#[derive(Debug, Clone)]
struct Check {
    at: Instant,
    result: Result<(), Unready>,
}

/// Why the server is not ready.
#[derive(Debug, Clone)]
pub(crate) struct Unready {
    pub(crate) code: Code,
    pub(crate) detail: String,
}

impl From<Error> for Unready {
    fn from(error: Error) -> Self {
        Self { code: error.code(), detail: error.to_string() }
    }
}

#[derive(Debug)]
pub(crate) struct Readiness {
    last: watch::Sender<Option<Check>>,
    /// The task of the last check.
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Default for Readiness {
    fn default() -> Self {
        Self { last: watch::Sender::new(None), task: Mutex::default() }
    }
}

fn is_fresh(check: &Option<Check>) -> bool {
    check.as_ref().is_some_and(|check| check.at.elapsed() < FRESH_FOR)
}

impl Readiness {
    /// The result of a check that is at most [`FRESH_FOR`] old. `ping` checks the ledger.
    pub(crate) async fn check<P>(&self, ping: impl FnOnce() -> P) -> Result<(), Unready>
    where
        P: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.start(ping);
        let mut last = self.last.subscribe();
        // Waiting fails only if the sender is dropped, and `self` owns it.
        let check = last.wait_for(is_fresh).await.ok().and_then(|check| check.clone());
        check.map_or(Ok(()), |check| check.result)
    }

    /// Starts a check, unless the last one is fresh or still running. It runs in its own task, so that a caller that disconnects does not
    /// make the next caller start another one.
    fn start<P>(&self, ping: impl FnOnce() -> P)
    where
        P: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let mut task = self.task.lock();
        if is_fresh(&self.last.borrow()) || task.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (ping, last) = (ping(), self.last.clone());
        *task = Some(tokio::spawn(async move {
            let result = ping.await.map_err(Unready::from);
            last.send_replace(Some(Check { at: Instant::now(), result }));
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn ledger_is_checked_once_a_second_whatever_the_number_of_callers() {
        let (readiness, pings) = (Readiness::default(), Arc::new(AtomicU32::new(0)));
        let ping = || {
            let pings = pings.clone();
            async move {
                pings.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                Err(Error::Busy)
            }
        };
        let started = Instant::now();
        // A caller that disconnects before the check ends.
        assert!(readiness.check(ping).now_or_never().is_none());
        while pings.load(Ordering::SeqCst) < 2 {
            assert_eq!(readiness.check(ping).await.unwrap_err().code, Code::Busy);
            assert!(started.elapsed() < 60 * FRESH_FOR, "never checked again");
            tokio::task::yield_now().await;
        }
        assert!(started.elapsed() >= FRESH_FOR, "checked again after {:?}", started.elapsed());
    }
}

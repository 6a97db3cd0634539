//! Whether the ledger responds and the gate can be used. It is checked at most once a second, whatever the number of callers.

use std::time::{Duration, Instant};

use stampede_core::Code;
use stampede_engine::{Error, Ready};
use tokio::sync::watch;

/// How long the result of a check is used.
const FRESH_FOR: Duration = Duration::from_secs(1);

/// The result of a check.
#[derive(Debug, Clone)]
struct Check {
    at: Instant,
    result: Result<Ready, Unready>,
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

#[derive(Debug, Default)]
struct State {
    last: Option<Check>,
    is_running: bool,
}

impl State {
    /// The last check, if it is not older than `oldest`.
    fn check_since(&self, oldest: Option<Instant>) -> Option<&Check> {
        self.last.as_ref().filter(|check| oldest.is_none_or(|oldest| check.at >= oldest))
    }
}

#[derive(Debug)]
pub(crate) struct Readiness {
    state: watch::Sender<State>,
}

impl Default for Readiness {
    fn default() -> Self {
        Self { state: watch::Sender::new(State::default()) }
    }
}

impl Readiness {
    /// The result of a check that is at most [`FRESH_FOR`] old. `ping` checks ledger and gate.
    pub(crate) async fn check<P>(&self, ping: impl FnOnce() -> P) -> Result<Ready, Unready>
    where
        P: Future<Output = Result<Ready, Error>> + Send + 'static,
    {
        // Fixed for the whole call: a check that is fresh now must not become too old while this caller waits for its turn to run.
        let oldest = Instant::now().checked_sub(FRESH_FOR);
        self.start(oldest, ping);
        let mut states = self.state.subscribe();
        // Waiting fails only if the sender is dropped, and `self` owns it.
        let state = states.wait_for(|state| state.check_since(oldest).is_some()).await.ok();
        state.and_then(|state| state.last.clone()).map_or(Ok(Ready::Fully), |check| check.result)
    }

    /// Starts a check, unless the last one is recent or one is running. It runs in its own task, so that a caller that disconnects does
    /// not make the next caller start another one.
    fn start<P>(&self, oldest: Option<Instant>, ping: impl FnOnce() -> P)
    where
        P: Future<Output = Result<Ready, Error>> + Send + 'static,
    {
        let must_start = self.state.send_if_modified(|state| {
            let must_start = !state.is_running && state.check_since(oldest).is_none();
            state.is_running |= must_start;
            must_start
        });
        if !must_start {
            return;
        }
        let (ping, states) = (tokio::spawn(ping()), self.state.clone());
        tokio::spawn(async move {
            let result = match ping.await {
                Ok(result) => result.map_err(Unready::from),
                Err(error) => Err(Unready { code: Code::Internal, detail: error.to_string() }),
            };
            let check = Check { at: Instant::now(), result };
            states.send_modify(|state| *state = State { last: Some(check), is_running: false });
        });
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

//! Whether the ledger answers: it is asked at most once a second, however many ask us.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use stampede_core::Code;
use stampede_engine::Error;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long an answer is used.
const FRESH_FOR: Duration = Duration::from_secs(1);

/// What the ledger said, and when; or why it did not.
#[derive(Debug, Clone)]
struct Answer {
    at: Instant,
    said: Result<(), Unready>,
}

/// The code for the caller, and what went wrong.
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
    answers: watch::Sender<Option<Answer>>,
    /// Asks the ledger, or has done so.
    asking: Mutex<Option<JoinHandle<()>>>,
}

impl Default for Readiness {
    fn default() -> Self {
        Self { answers: watch::Sender::new(None), asking: Mutex::default() }
    }
}

fn is_fresh(answer: &Option<Answer>) -> bool {
    answer.as_ref().is_some_and(|answer| answer.at.elapsed() < FRESH_FOR)
}

impl Readiness {
    /// What the ledger says, at most [`FRESH_FOR`] old. `ask` asks it.
    pub(crate) async fn of<A>(&self, ask: impl FnOnce() -> A) -> Result<(), Unready>
    where
        A: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.ask(ask);
        let mut answers = self.answers.subscribe();
        // The sender lives as long as we do.
        let answer = answers.wait_for(is_fresh).await.ok().and_then(|answer| answer.clone());
        answer.map_or(Ok(()), |answer| answer.said)
    }

    /// Asks the ledger, unless its answer is fresh or under way. In a task of its own: a caller that goes away must not make the
    /// next one ask again.
    fn ask<A>(&self, ask: impl FnOnce() -> A)
    where
        A: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if is_fresh(&self.answers.borrow()) || asking.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (asked, answers) = (ask(), self.answers.clone());
        *asking = Some(tokio::spawn(async move {
            let said = asked.await.map_err(Unready::from);
            answers.send_replace(Some(Answer { at: Instant::now(), said }));
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
    async fn the_ledger_is_asked_once_a_second_however_many_ask() {
        let (readiness, asked) = (Readiness::default(), Arc::new(AtomicU32::new(0)));
        let ask = || {
            let asked = asked.clone();
            async move {
                asked.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                Err(Error::Busy)
            }
        };
        let started = Instant::now();
        // A caller that goes away before the answer.
        assert!(readiness.of(ask).now_or_never().is_none());
        while asked.load(Ordering::SeqCst) < 2 {
            assert_eq!(readiness.of(ask).await.unwrap_err().code, Code::Busy);
            assert!(started.elapsed() < 60 * FRESH_FOR, "never asked again");
            tokio::task::yield_now().await;
        }
        assert!(started.elapsed() >= FRESH_FOR, "asked again after {:?}", started.elapsed());
    }
}

//! Notices that the ledger does not answer, so that requests that need it are refused at once instead of each waiting for a timeout.
//!
//! Without a queue every request to buy needs it; with a queue, only those of users who have an order.
//!
//! A call for a buyer that fails, or takes long, makes this process ask the ledger. The breaker opens if the ledger does not answer that: a sale
//! whose row is locked, or whose orders are rejected, holds up no other. While it is open, no buyer is the probe; the process asks again until
//! there is an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use metrics::{counter, gauge};
use stampede_core::ports::{Ledger, LedgerError};
use stampede_redis::jitter;
use tokio::sync::Notify;

use crate::error::{Error, describe};

/// A call that takes longer makes this process ask the ledger.
const SLOW_AFTER: Duration = Duration::from_secs(1);
/// How long the ledger may take to answer that.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The shortest pause between two questions.
const PROBE_PAUSE: Duration = Duration::from_millis(300);

/// Never open unless [`LedgerBreaker::run`] is running.
#[derive(Debug, Default)]
pub(crate) struct LedgerBreaker {
    is_open: AtomicBool,
    suspected: Notify,
}

impl LedgerBreaker {
    /// An error while the ledger does not answer.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_open.load(Ordering::Relaxed) {
            return Err(Error::Unready("the database cannot be used".to_owned()));
        }
        Ok(())
    }

    /// Waits for a call of the ledger, and notices if it fails or takes long.
    pub(crate) async fn watch<T>(&self, call: impl Future<Output = Result<T, LedgerError>>) -> Result<T, LedgerError> {
        tokio::pin!(call);
        let done = match tokio::time::timeout(SLOW_AFTER, &mut call).await {
            Ok(done) => done,
            Err(_) => {
                self.suspected.notify_one();
                call.await
            }
        };
        if matches!(&done, Err(LedgerError::Conflict(_) | LedgerError::Unavailable(_) | LedgerError::Unknown(_))) {
            self.suspected.notify_one();
        }
        done
    }

    /// Opens and closes the breaker. Never returns.
    pub(crate) async fn run(self: Arc<Self>, ledger: Arc<dyn Ledger>) {
        let (open, opened) = (gauge!("stampede_ledger_breaker_open"), counter!("stampede_ledger_breaker_opened_total"));
        // Shown from the start.
        open.set(0.0);
        opened.increment(0);
        loop {
            self.suspected.notified().await;
            let mut opened_at = None;
            while let Err(error) = probe(ledger.as_ref()).await {
                if opened_at.is_none() {
                    opened_at = Some(Instant::now());
                    self.is_open.store(true, Ordering::Relaxed);
                    open.set(1.0);
                    opened.increment(1);
                    tracing::error!(
                        error,
                        "the database does not answer; requests that need it are refused until it does"
                    );
                }
                tokio::time::sleep(jitter(PROBE_PAUSE)).await;
            }
            if let Some(opened_at) = opened_at {
                self.is_open.store(false, Ordering::Relaxed);
                open.set(0.0);
                tracing::info!(after_ms = opened_at.elapsed().as_millis(), "the database answers again");
            }
            // Calls may go on failing although it answers.
            tokio::time::sleep(jitter(PROBE_PAUSE)).await;
        }
    }
}

async fn probe(ledger: &dyn Ledger) -> Result<(), String> {
    match tokio::time::timeout(PROBE_TIMEOUT, ledger.ping()).await {
        Ok(answer) => answer.map_err(|error| describe(&error)),
        Err(_) => Err("no answer in time".to_owned()),
    }
}

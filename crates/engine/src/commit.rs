//! Behind the batcher of a sale: takes a batch of admitted orders into the ledger, and does not let go before it is known
//! what became of each.
//!
//! A timeout is not a no: an unanswered or failed call is made again with the same ids, with growing pauses, for as long as it
//! takes. Nothing is released on doubt. Meanwhile the queue fills to its bound and new buyers hear 503; when the ledger is
//! back, everything that was admitted is settled. A batch that the ledger refuses for good is halved until the one bad
//! order is alone; that one goes to quarantine and keeps its mark.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use metrics::{Counter, Histogram, counter, histogram};
use stampede_core::ports::{Admitted, Ledger, LedgerError, Recorded};
use stampede_core::{Epoch, SaleId, failpoint};
use stampede_gate::MemoryGate;
use tokio::sync::OwnedMutexGuard;

use crate::batcher::Backend;

/// An order on its way into the ledger.
#[derive(Debug, Clone, Copy)]
pub struct Pending {
    pub epoch: Epoch,
    pub admitted: Admitted,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    Ledger(Recorded),
    /// The ledger cannot hold it; a person must look.
    Quarantined,
}

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A sale that keeps being refused is read anew at most this often.
const RELOAD_EVERY: Duration = Duration::from_secs(1);

/// The committing end of one sale.
#[derive(Debug)]
pub struct Commit {
    sale: SaleId,
    ledger: Arc<dyn Ledger>,
    gate: Arc<MemoryGate>,
    /// Held while orders of the sale are recorded, or the sale is read anew: never both.
    recording: Arc<tokio::sync::Mutex<()>>,
    reloaded: Mutex<Option<Instant>>,
    batch_size: Histogram,
    batch_seconds: Histogram,
    retries: Counter,
}

impl Commit {
    pub fn new(sale: SaleId, ledger: Arc<dyn Ledger>, gate: Arc<MemoryGate>) -> Self {
        Self {
            sale,
            ledger,
            gate,
            recording: Arc::default(),
            reloaded: Mutex::new(None),
            batch_size: histogram!("stampede_commit_batch_size"),
            batch_seconds: histogram!("stampede_commit_seconds"),
            retries: counter!("stampede_commit_retries_total"),
        }
    }

    /// Records orders of one epoch, however long it takes.
    fn record<'a>(&'a self, epoch: Epoch, batch: &'a [Admitted]) -> BoxFuture<'a, Vec<Settled>> {
        let recording = async move {
            let mut pause = FIRST_PAUSE;
            loop {
                // A panic below us says as little about what happened as a lost connection does.
                let call = AssertUnwindSafe(self.ledger.record(self.sale, epoch, batch)).catch_unwind().await;
                let error = match call {
                    Ok(Ok(recorded)) => return recorded.into_iter().map(Settled::Ledger).collect(),
                    Ok(Err(LedgerError::Poison(error))) => return self.isolate(epoch, batch, &describe(&*error)).await,
                    Ok(Err(error)) => describe(&error),
                    Err(_) => "the ledger panicked".to_owned(),
                };
                self.retries.increment(1);
                tracing::warn!(sale = %self.sale, orders = batch.len(), error, "cannot record yet; trying again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        recording.boxed()
    }

    /// One bad order must not take others with it.
    async fn isolate(&self, epoch: Epoch, batch: &[Admitted], error: &str) -> Vec<Settled> {
        if let [admitted] = batch {
            return vec![self.quarantine(*admitted, error).await];
        }
        let (first, second) = batch.split_at(batch.len() / 2);
        let mut settled = self.record(epoch, first).await;
        settled.extend(self.record(epoch, second).await);
        settled
    }

    async fn quarantine(&self, admitted: Admitted, error: &str) -> Settled {
        tracing::error!(sale = %self.sale, order = %admitted.order, error, "an order cannot be recorded: quarantined");
        let mut pause = FIRST_PAUSE;
        while let Err(error) = self.ledger.quarantine(self.sale, admitted, error).await {
            tracing::error!(order = %admitted.order, error = describe(&error), "cannot write the quarantine; trying again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Settled::Quarantined
    }

    /// Brings the gate in line with what the ledger said. Only now, after the rows are committed, is anything released.
    fn correct_gate(&self, batch: &[Pending], settled: &[Settled]) -> bool {
        let pairs = || batch.iter().map(|pending| pending.admitted).zip(settled);
        let live = pairs().filter(|(_, settled)| {
            matches!(settled, Settled::Ledger(Recorded::Recorded | Recorded::Already) | Settled::Quarantined)
        });
        self.gate.settle(self.sale, live.map(|(admitted, _)| (admitted.user, admitted.order)));
        let mut surprised = false;
        for (Admitted { user, order, .. }, settled) in pairs() {
            let keep = match settled {
                Settled::Ledger(Recorded::Refused { keep, .. }) => *keep,
                Settled::Ledger(Recorded::Dead) => None,
                Settled::Ledger(Recorded::IdCollision) => {
                    tracing::error!(sale = %self.sale, %order, "two orders got the same id; a person should look");
                    None
                }
                Settled::Ledger(Recorded::Recorded | Recorded::Already) | Settled::Quarantined => continue,
            };
            self.gate.release(self.sale, user, order, keep);
            surprised |= matches!(settled, Settled::Ledger(Recorded::Refused { .. }));
        }
        surprised
    }

    /// Reads the sale anew, at most so often.
    pub async fn refresh(&self) {
        let _held = self.recording.lock().await;
        self.reload().await;
    }

    /// The ledger knew better than the gate: another process sells here too. Nothing of the sale is being recorded meanwhile, as
    /// the gate asks for.
    async fn reload(&self) {
        let due = {
            let mut reloaded = self.reloaded.lock().unwrap_or_else(PoisonError::into_inner);
            let due = reloaded.is_none_or(|at| at.elapsed() >= RELOAD_EVERY);
            if due {
                *reloaded = Some(Instant::now());
            }
            due
        };
        let Some(generation) = self.gate.generation(self.sale).filter(|_| due) else { return };
        match self.ledger.load(self.sale).await {
            Ok(Some(loaded)) => {
                let taken = self.gate.reload(loaded, generation);
                tracing::info!(sale = %self.sale, taken, "the ledger knew better than the gate: sale read anew");
            }
            Ok(None) => tracing::error!(sale = %self.sale, "the gate has a sale that the ledger does not know"),
            Err(error) => tracing::warn!(sale = %self.sale, error = describe(&error), "cannot read the sale anew"),
        }
    }
}

impl Backend<Pending> for Commit {
    type Answer = Settled;

    async fn turn(&self) -> Option<OwnedMutexGuard<()>> {
        Some(self.recording.clone().lock_owned().await)
    }

    /// In its turn alone: nothing else of the sale is recorded or read anew meanwhile.
    async fn call(&self, batch: &[Pending]) -> Vec<Settled> {
        let started = Instant::now();
        if failpoint::planted("answer-early") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut settled = Vec::with_capacity(batch.len());
        for run in batch.chunk_by(|a, b| a.epoch == b.epoch) {
            let orders: Vec<Admitted> = run.iter().map(|pending| pending.admitted).collect();
            settled.extend(self.record(run[0].epoch, &orders).await);
        }
        #[expect(clippy::cast_precision_loss, reason = "a batch is far smaller than 2^52")]
        self.batch_size.record(batch.len() as f64);
        self.batch_seconds.record(started.elapsed());
        if self.correct_gate(batch, &settled) {
            self.reload().await;
        }
        settled
    }
}

/// An error with all its causes.
pub(crate) fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

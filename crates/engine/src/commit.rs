//! Behind the batcher of a sale: takes a batch of admitted orders into the ledger (see `recording`), and brings the gate in line with
//! what the ledger said.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::{Histogram, histogram};
use stampede_core::ports::{Admitted, Ledger, RecordOutcome};
use stampede_core::{Epoch, SaleId, failpoint};
use stampede_gate::MemoryGate;
use tokio::sync::OwnedMutexGuard;

use crate::batcher::Backend;
use crate::recording::Recording;

/// An order on its way into the ledger.
#[derive(Debug, Clone, Copy)]
pub struct Pending {
    pub epoch: Epoch,
    pub admitted: Admitted,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitOutcome {
    Known(RecordOutcome),
    /// It could not be recorded so far. It keeps its mark and is tried again beside the queue.
    Undecided,
}

/// A sale that keeps being refused is read anew at most this often.
const RELOAD_EVERY: Duration = Duration::from_secs(1);

/// The committing end of one sale.
#[derive(Debug)]
pub struct Committer {
    sale: SaleId,
    ledger: Arc<dyn Ledger>,
    gate: Arc<MemoryGate>,
    recording: Recording,
    /// Held while orders of the sale are recorded, or the sale is read anew: never both.
    busy: Arc<tokio::sync::Mutex<()>>,
    reloaded: Mutex<Option<Instant>>,
    batch_size: Histogram,
    batch_seconds: Histogram,
}

impl Committer {
    pub(crate) fn new(sale: SaleId, ledger: Arc<dyn Ledger>, gate: Arc<MemoryGate>, recording: Recording) -> Self {
        Self {
            sale,
            ledger,
            gate,
            recording,
            busy: Arc::default(),
            reloaded: Mutex::new(None),
            batch_size: histogram!("stampede_commit_batch_size"),
            batch_seconds: histogram!("stampede_commit_seconds"),
        }
    }

    /// Tries orders again that could not be recorded, from time to time; never returns.
    pub(crate) async fn retry_suspects(&self) {
        loop {
            self.recording.suspects_due().await;
            self.try_suspects().await;
        }
    }

    async fn try_suspects(&self) {
        let _held = self.busy.lock().await;
        let (pending, outcomes): (Vec<_>, Vec<_>) = self.recording.try_suspects().await.into_iter().unzip();
        let outcomes: Vec<_> = outcomes.into_iter().map(CommitOutcome::Known).collect();
        if self.correct_gate(&pending, &outcomes) {
            self.reload().await;
        }
    }

    /// The last try for what could not be recorded, when nothing more comes.
    pub(crate) async fn close(&self) {
        self.try_suspects().await;
        self.recording.report_undecided();
    }

    /// Brings the gate in line with what the ledger said. Only now, after the rows are committed, is anything released.
    fn correct_gate(&self, batch: &[Pending], outcomes: &[CommitOutcome]) -> bool {
        let known = || {
            batch.iter().zip(outcomes).filter_map(|(pending, outcome)| match outcome {
                CommitOutcome::Known(recorded) => Some((pending.admitted, *recorded)),
                CommitOutcome::Undecided => None,
            })
        };
        let holds = |recorded| {
            matches!(recorded, RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded | RecordOutcome::Quarantined)
        };
        let live = known().filter(|(_, recorded)| holds(*recorded));
        self.gate.settle(self.sale, live.map(|(admitted, _)| (admitted.user, admitted.order)));
        let mut surprised = false;
        for (Admitted { user, order, .. }, recorded) in known() {
            let existing = match recorded {
                RecordOutcome::Rejected { existing, .. } => existing,
                RecordOutcome::Dead => None,
                RecordOutcome::IdCollision => {
                    tracing::error!(sale = %self.sale, %order, "two orders got the same id; a person should look");
                    None
                }
                RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded | RecordOutcome::Quarantined => continue,
            };
            self.gate.release(self.sale, user, order, existing);
            surprised |= matches!(recorded, RecordOutcome::Rejected { .. });
        }
        surprised
    }

    /// CatalogueCache the sale anew, at most so often.
    pub async fn refresh(&self) {
        let _held = self.busy.lock().await;
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

impl Backend<Pending> for Committer {
    type Answer = CommitOutcome;

    async fn turn(&self) -> Option<OwnedMutexGuard<()>> {
        Some(self.busy.clone().lock_owned().await)
    }

    /// In its turn alone: nothing else of the sale is recorded or read anew meanwhile.
    async fn call(&self, batch: &[Pending]) -> Vec<CommitOutcome> {
        let started = Instant::now();
        if failpoint::planted("answer-early") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut outcomes = Vec::with_capacity(batch.len());
        for run in batch.chunk_by(|a, b| a.epoch == b.epoch) {
            let orders: Vec<Admitted> = run.iter().map(|pending| pending.admitted).collect();
            outcomes.extend(self.recording.record(run[0].epoch, &orders).await);
        }
        #[expect(clippy::cast_precision_loss, reason = "a batch is far smaller than 2^52")]
        self.batch_size.record(batch.len() as f64);
        self.batch_seconds.record(started.elapsed());
        if self.correct_gate(batch, &outcomes) {
            self.reload().await;
        }
        outcomes
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

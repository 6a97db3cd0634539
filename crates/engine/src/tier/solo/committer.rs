//! Commits the orders of one sale: records a batch in the ledger (see [`crate::recording`]), then brings the gate in line with
//! the ledger's answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stampede_core::ports::gate::Release;
use stampede_core::ports::{Admitted, RecordOutcome, SaleLedger};
use stampede_core::{SaleId, failpoint};
use stampede_gate::MemoryGate;
use tokio::sync::OwnedMutexGuard;

use crate::batcher::Backend;
use crate::error::describe;
use crate::recording::{CommitOutcome, Pending, Recording};

/// A sale whose orders the ledger refuses is reloaded at most this often.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Committer {
    sale: SaleId,
    ledger: Arc<dyn SaleLedger>,
    gate: Arc<MemoryGate>,
    recording: Recording,
    /// Held while orders of the sale are recorded, or the sale is reloaded: the two must not overlap.
    exclusive: Arc<tokio::sync::Mutex<()>>,
    reloaded: Mutex<Option<Instant>>,
}

impl Committer {
    pub(super) fn new(sale: SaleId, ledger: Arc<dyn SaleLedger>, gate: Arc<MemoryGate>, recording: Recording) -> Self {
        Self { sale, ledger, gate, recording, exclusive: Arc::default(), reloaded: Mutex::new(None) }
    }

    /// Retries orders that could not be recorded, at intervals. Never returns.
    pub(super) async fn retry_suspects(&self) {
        loop {
            self.recording.suspects_due().await;
            self.try_suspects().await;
        }
    }

    async fn try_suspects(&self) {
        let _guard = self.exclusive.lock().await;
        let (pending, outcomes): (Vec<_>, Vec<_>) = self.recording.try_suspects().await.into_iter().unzip();
        let outcomes: Vec<_> = outcomes.into_iter().map(CommitOutcome::Decided).collect();
        if self.correct_gate(&pending, &outcomes) {
            self.reload().await;
        }
    }

    /// Tries what could not be recorded a last time. No order may be submitted after this.
    pub(super) async fn close(&self) {
        self.try_suspects().await;
        self.recording.report_undecided();
    }

    /// Brings the gate in line with the ledger's answers. A mark is released only now, after the rows are committed. Returns
    /// whether the ledger refused an order, which means that the gate is out of date.
    fn correct_gate(&self, batch: &[Pending], outcomes: &[CommitOutcome]) -> bool {
        let known = || {
            batch.iter().zip(outcomes).filter_map(|(pending, outcome)| match outcome {
                CommitOutcome::Decided(outcome) => Some((pending.admitted, *outcome)),
                CommitOutcome::Undecided => None,
            })
        };
        let holds = |outcome| {
            matches!(outcome, RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded | RecordOutcome::Quarantined)
        };
        let live = known().filter(|(_, outcome)| holds(*outcome));
        self.gate.settle(self.sale, live.map(|(admitted, _)| (admitted.user, admitted.order)));
        let mut is_out_of_date = false;
        for (Admitted { user, order, .. }, outcome) in known() {
            let existing = match outcome {
                RecordOutcome::Rejected { existing, .. } => existing,
                RecordOutcome::Dead => None,
                RecordOutcome::IdCollision => {
                    tracing::error!(sale = %self.sale, %order, "two orders have the same id; investigate");
                    None
                }
                RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded | RecordOutcome::Quarantined => continue,
            };
            self.gate.release(self.sale, &Release { user, order, existing, ended: false });
            is_out_of_date |= matches!(outcome, RecordOutcome::Rejected { .. });
        }
        is_out_of_date
    }

    /// Reloads the sale from the ledger, as soon as [`RELOAD_INTERVAL`] allows it. What the ledger had at the call is in the gate
    /// afterwards, unless the ledger cannot be read or a release overtakes the reload.
    pub(super) async fn refresh(&self) {
        loop {
            tokio::time::sleep(self.until_reload()).await;
            let _guard = self.exclusive.lock().await;
            // Another reload may have begun before the lock was acquired.
            if self.until_reload().is_zero() {
                return self.reload().await;
            }
        }
    }

    fn until_reload(&self) -> Duration {
        let reloaded = *self.reloaded.lock();
        reloaded.map_or(Duration::ZERO, |at| RELOAD_INTERVAL.saturating_sub(at.elapsed()))
    }

    /// Does nothing within [`RELOAD_INTERVAL`] of the last reload. The caller holds `exclusive`, because no order of the sale may be
    /// recorded between the read and the change of the gate.
    async fn reload(&self) {
        if !self.until_reload().is_zero() {
            return;
        }
        *self.reloaded.lock() = Some(Instant::now());
        let Some(releases) = self.gate.releases(self.sale) else { return };
        match self.ledger.load(self.sale).await {
            Ok(Some(loaded)) => {
                let applied = self.gate.reload(loaded, releases);
                tracing::info!(sale = %self.sale, applied, "the gate was out of date: sale reloaded from the ledger");
            }
            Ok(None) => tracing::error!(sale = %self.sale, "the gate has a sale that the ledger does not have"),
            Err(error) => tracing::warn!(sale = %self.sale, error = describe(&error), "cannot reload the sale"),
        }
    }
}

impl Backend<Pending> for Committer {
    type Answer = CommitOutcome;

    async fn acquire(&self) -> Option<OwnedMutexGuard<()>> {
        Some(self.exclusive.clone().lock_owned().await)
    }

    /// Called with `exclusive` held: see [`Backend::acquire`].
    async fn call(&self, batch: &[Pending]) -> Vec<CommitOutcome> {
        if failpoint::planted("answer-early") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let outcomes = self.recording.record(batch).await;
        if self.correct_gate(batch, &outcomes) {
            self.reload().await;
        }
        outcomes
    }
}

impl std::fmt::Debug for Committer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Committer").field("sale", &self.sale).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

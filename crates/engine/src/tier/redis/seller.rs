//! Sells one sale: admits requests in the gate, records the orders in the ledger, and settles their entry in the outbox. A batch makes
//! one call of the gate and one of the ledger.
//!
//! Whatever fails after the admission is repaired from the outbox: an entry that is not settled is recorded again, here or by another
//! node (see [`super::outbox`]).

use std::sync::Arc;
use std::time::Instant;

use metrics::{Counter, Histogram, counter, histogram};
use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Admitted, Decision, Gate as _, GateError, Ledger, LedgerError, RecordOutcome};
use stampede_core::{Admission, Clock, Epoch, OrderId, Refusal, SaleId, SalePhase, failpoint};
use stampede_gate::RedisGate;
use stampede_gate::redis::{Entry, EntryId};
use tokio::sync::Mutex;
use tokio_util::task::TaskTracker;

use super::recovery::LostSales;
use crate::batcher::Backend;
use crate::error::describe;
use crate::recording::{CommitOutcome, Pending, Recording};
use crate::retention::is_past_retention;

#[derive(Debug, Clone, Copy)]
pub(in crate::tier) enum Job {
    Admit(AdmitRequest),
    /// An order that has a mark and no row.
    RollForward(Pending),
}

#[derive(Debug, Clone, Copy)]
pub(in crate::tier) enum Answer {
    Admitted {
        decision: Decision,
        outcome: CommitOutcome,
    },
    /// Admitted, and safe in the queue.
    Accepted,
    AlreadyHas {
        order: OrderId,
        decision: Decision,
        asked_at: Instant,
    },
    Refused(Refusal),
    RolledForward(CommitOutcome),
}

pub(in crate::tier) struct Seller {
    sale: SaleId,
    gate: Arc<RedisGate>,
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    recording: Recording,
    losses: Arc<LostSales>,
    /// Whether nodes wait for the orders that are recorded.
    announces: bool,
    /// Held while orders of the sale are recorded: one call of the ledger at a time.
    exclusive: Mutex<()>,
    /// Calls that settle entries, after their buyers have been answered.
    settling: TaskTracker,
    admit_seconds: Histogram,
    /// Entries that this process has put into outboxes, and the orders in them.
    entries: Counter,
    entered_orders: Counter,
}

impl Seller {
    pub(in crate::tier) fn new(
        sale: SaleId,
        gate: Arc<RedisGate>,
        ledger: Arc<dyn Ledger>,
        clock: Arc<dyn Clock>,
        recording: Recording,
        losses: Arc<LostSales>,
        announces: bool,
    ) -> Self {
        Self {
            sale,
            gate,
            ledger,
            clock,
            recording,
            losses,
            announces,
            exclusive: Mutex::default(),
            settling: TaskTracker::new(),
            admit_seconds: histogram!("stampede_gate_admit_seconds"),
            entries: counter!("stampede_outbox_entries_total"),
            entered_orders: counter!("stampede_outbox_orders_total"),
        }
    }

    /// Decides on requests. The new orders are in the outbox under the returned entry.
    pub(in crate::tier) async fn admit(
        &self,
        requests: &[AdmitRequest],
    ) -> Result<(Vec<Decision>, Option<EntryId>), GateError> {
        if requests.is_empty() {
            return Ok((Vec::new(), None));
        }
        if !self.gate.is_answering() {
            // The requests were queued before that was known.
            return Err(GateError::NotSent);
        }
        if self.gate.opened_as(self.sale).is_none() {
            self.adopt_if_open().await;
        }
        let (opened_as, started) = (self.gate.opened_as(self.sale), Instant::now());
        let admitted = self.gate.admit_batch(self.sale, requests).await;
        self.admit_seconds.record(started.elapsed());
        if admitted.as_ref().is_err_and(|error| error.is_loss())
            && let Some((incarnation, epoch)) = opened_as
        {
            self.losses.report(self.sale, incarnation, epoch);
        }
        let admitted = admitted?.ok_or(GateError::NotOpen)?;
        if admitted.1.is_some() {
            let is_admitted = |decision: &&Decision| matches!(decision.admission, Admission::Admitted(_));
            self.entries.increment(1);
            self.entered_orders.increment(admitted.0.iter().filter(is_admitted).count() as u64);
            failpoint::hit("buy.admitted");
        }
        Ok(admitted)
    }

    /// Sends requests to the gate if another node has opened the sale, and this one has not heard of it yet.
    async fn adopt_if_open(&self) {
        match self.ledger.sale(self.sale).await {
            Ok(Some(sale)) if sale.phase == SalePhase::Open => self.gate.adopt(&sale),
            Ok(_) => {}
            Err(error) => tracing::debug!(sale = %self.sale, error = describe(&error), "cannot read a new sale"),
        }
    }

    /// Records orders, one outcome for each. The marks of those that the ledger has refused stay.
    pub(super) async fn record(&self, pending: &[Pending]) -> Vec<CommitOutcome> {
        if pending.is_empty() {
            return Vec::new();
        }
        let _guard = self.exclusive.lock().await;
        self.recording.record(pending).await
    }

    /// Releases the marks of orders that the ledger has refused. Without an error no mark is left that should not be.
    async fn release_dead(&self, pending: &[Pending], outcomes: &[CommitOutcome]) -> Result<(), GateError> {
        let mut releases = Vec::new();
        for (Pending { admitted: Admitted { user, order, .. }, .. }, outcome) in pending.iter().zip(outcomes) {
            let CommitOutcome::Decided(outcome) = outcome else { continue };
            let existing = match outcome {
                RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded | RecordOutcome::Quarantined => continue,
                RecordOutcome::Rejected { existing, .. } => *existing,
                RecordOutcome::Dead => None,
                RecordOutcome::IdCollision => {
                    tracing::error!(sale = %self.sale, %order, "two orders have the same id; investigate");
                    None
                }
            };
            // If the order was live, a pending release in the ledger says so as well.
            releases.push(Release { user: *user, order: *order, existing, ended: false });
        }
        if !releases.is_empty()
            && let Err(error) = self.gate.release(self.sale, &releases).await
            && !(error == GateError::NotOpen && self.has_left_the_gate().await)
        {
            tracing::warn!(sale = %self.sale, marks = releases.len(), %error, "cannot release marks yet; the queue keeps them");
            return Err(error);
        }
        Ok(())
    }

    /// Whether the sale was over so long ago that the gate has no marks of it.
    async fn has_left_the_gate(&self) -> bool {
        match self.ledger.sale(self.sale).await {
            Ok(sale) => sale.is_some_and(|sale| is_past_retention(&sale, self.clock.now())),
            Err(error) => {
                tracing::debug!(sale = %self.sale, error = describe(&error), "cannot read when a sale was over");
                false
            }
        }
    }

    /// Removes an entry whose orders the ledger has. Nothing waits for it.
    pub(in crate::tier) fn settle(self: &Arc<Self>, entry: EntryId) {
        let seller = self.clone();
        self.settling.spawn(async move { seller.settle_now(&[entry]).await });
    }

    pub(in crate::tier) async fn settle_now(&self, entries: &[EntryId]) {
        if entries.is_empty() {
            return;
        }
        failpoint::hit("outbox.settle");
        if let Err(error) = self.gate.settle_entries(self.sale, entries, self.announces).await {
            tracing::debug!(sale = %self.sale, %error, "cannot settle an entry yet; it is recorded again later");
        }
    }

    /// Stores entries that cannot be read as dead letters, and removes them from the outbox. Their orders hold marks, from which they are
    /// recorded when gate and ledger are compared. After an error, some are still only in the outbox.
    pub(in crate::tier) async fn remove_unreadable(&self, entries: &[Entry]) -> Result<(), GateError> {
        let (mut stored, mut result) = (Vec::new(), Ok(()));
        for entry in entries.iter().filter(|entry| entry.unreadable.is_some()) {
            match self.gate.store_dead(self.sale, entry).await {
                Ok(()) => stored.push(entry.id),
                Err(error) => {
                    tracing::warn!(sale = %self.sale, %error, "cannot store a dead letter yet");
                    result = Err(error);
                }
            }
        }
        if !stored.is_empty() {
            counter!("stampede_queue_dead_letters_total").increment(stored.len() as u64);
            self.settle_now(&stored).await;
        }
        result
    }

    /// Records the orders of entries of the outbox, in as few transactions as `max_batch` allows, and settles the entries. One that
    /// cannot be settled yet stays in the outbox. Returns whether every order has a row or is in quarantine, and no mark is left that should
    /// not be.
    pub(in crate::tier) async fn record_entries(&self, entries: &[Entry], max_batch: usize) -> bool {
        let mut is_done = true;
        // Logged. What could not be stored stays in the outbox.
        let _ = self.remove_unreadable(entries).await;
        for entries in batches(entries, max_batch) {
            let pending_of = |entry: &Entry| {
                let epoch = entry.id.epoch;
                entry.orders.iter().map(move |&admitted| Pending { epoch, admitted }).collect::<Vec<_>>()
            };
            let pending: Vec<Pending> = entries.iter().flat_map(pending_of).collect();
            let outcomes = self.record(&pending).await;
            if self.release_dead(&pending, &outcomes).await.is_err() {
                is_done = false;
                continue;
            }
            is_done &= all_decided(&outcomes);
            let mut rest = outcomes.as_slice();
            let mut decided = Vec::with_capacity(entries.len());
            for entry in entries {
                let (of_entry, others) = rest.split_at(entry.orders.len().min(rest.len()));
                rest = others;
                if all_decided(of_entry) && entry.unreadable.is_none() {
                    decided.push(entry.id);
                }
            }
            self.settle_now(&decided).await;
        }
        is_done
    }

    /// Records orders that a queue has delivered, and releases the marks of those that the ledger refuses. Returns for each whether this
    /// is done. `before_rebuild`: what cannot be recorded is quarantined, unless every order of its batch has failed, and marks are left to
    /// the rebuild.
    pub(in crate::tier) async fn record_delivered(&self, pending: &[Pending], before_rebuild: bool) -> Vec<bool> {
        let mut outcomes = self.record(pending).await;
        if before_rebuild {
            let undecided =
                outcomes.iter_mut().zip(pending).filter(|(outcome, _)| **outcome == CommitOutcome::Undecided);
            for (outcome, pending) in undecided {
                if self.recording.may_be_outage(pending.admitted.order) {
                    continue;
                }
                match self.recording.quarantine(*pending).await {
                    Ok(recorded) => *outcome = CommitOutcome::Decided(recorded),
                    Err(error) => {
                        tracing::warn!(sale = %self.sale, error = describe(&error), "cannot write the quarantine yet");
                    }
                }
            }
        }
        if let Err(error) = self.gate.announce_recorded(self.sale).await {
            tracing::debug!(sale = %self.sale, %error, "nodes notice by themselves that orders were recorded");
        }
        // Marks that the gate has lost need no release: a rebuild loads only those of live orders.
        let is_released = match self.release_dead(pending, &outcomes).await {
            Ok(()) | Err(GateError::Lost | GateError::Damaged) => true,
            Err(_) => before_rebuild,
        };
        let is_done = |outcome: &CommitOutcome| match outcome {
            CommitOutcome::Decided(
                RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded | RecordOutcome::Quarantined,
            ) => true,
            CommitOutcome::Decided(_) => is_released,
            CommitOutcome::Undecided => false,
        };
        outcomes.iter().map(is_done).collect()
    }

    /// Records orders, and releases the marks of those that the ledger refuses. Returns whether all of this is done.
    pub(super) async fn record_and_release(&self, pending: &[Pending]) -> bool {
        let outcomes = self.record(pending).await;
        self.release_dead(pending, &outcomes).await.is_ok() && all_decided(&outcomes)
    }

    /// Records orders of one epoch, without a change of the gate. What cannot be recorded is quarantined: under the next epoch it would
    /// be rejected. If every order of a batch fails, the cause is probably not in the orders: they are returned instead.
    pub(super) async fn record_before_rebuild(
        &self,
        epoch: Epoch,
        orders: impl Iterator<Item = Admitted>,
    ) -> Result<Vec<Pending>, LedgerError> {
        let pending: Vec<_> = orders.map(|admitted| Pending { epoch, admitted }).collect();
        let outcomes = self.record(&pending).await;
        let mut failed = Vec::new();
        for (pending, _) in pending.iter().zip(outcomes).filter(|(_, outcome)| *outcome == CommitOutcome::Undecided) {
            if self.recording.may_be_outage(pending.admitted.order) {
                failed.push(*pending);
            } else {
                self.recording.quarantine(*pending).await?;
            }
        }
        Ok(failed)
    }

    /// Quarantines what [`Self::record_before_rebuild`] has returned, if the ledger has recorded another order of the sale since this time.
    /// Returns whether none is left.
    pub(super) async fn quarantine_failed(&self, failed: &[Pending], since: Instant) -> Result<bool, LedgerError> {
        if !failed.is_empty() && !self.recording.has_recorded_since(since) {
            return Ok(false);
        }
        for pending in failed {
            self.recording.quarantine(*pending).await?;
        }
        Ok(true)
    }

    /// Retries orders that could not be recorded, at intervals. Never returns.
    pub(super) async fn retry_suspects(&self) {
        loop {
            self.recording.suspects_due().await;
            self.try_suspects().await;
        }
    }

    async fn try_suspects(&self) {
        let (pending, outcomes): (Vec<_>, Vec<_>) = {
            let _guard = self.exclusive.lock().await;
            self.recording.try_suspects().await.into_iter().unzip()
        };
        let outcomes: Vec<_> = outcomes.into_iter().map(CommitOutcome::Decided).collect();
        // Logged. What is in the outbox or the queue is recorded and released again.
        let _ = self.release_dead(&pending, &outcomes).await;
    }

    /// Tries what could not be recorded a last time, and settles what can be. No request may be submitted after this.
    pub(super) async fn close(&self) {
        self.try_suspects().await;
        self.recording.report_undecided();
        self.settling.close();
        self.settling.wait().await;
    }
}

/// Whether every order has a row or is in quarantine.
fn all_decided(outcomes: &[CommitOutcome]) -> bool {
    !outcomes.contains(&CommitOutcome::Undecided)
}

/// Divides entries into groups of at most `max_orders` orders, or of one entry.
fn batches(entries: &[Entry], max_orders: usize) -> impl Iterator<Item = &[Entry]> {
    let mut rest = entries;
    std::iter::from_fn(move || {
        let mut orders = 0;
        let fits = |entry: &&Entry| {
            orders += entry.orders.len();
            orders <= max_orders
        };
        let count = rest.iter().take_while(fits).count().max(1).min(rest.len());
        let (batch, others) = rest.split_at(count);
        rest = others;
        (!batch.is_empty()).then_some(batch)
    })
}

/// For `Arc<Seller>`, because entries are settled by tasks of their own.
impl Backend<Job> for SellerHandle {
    type Answer = Result<Answer, GateError>;

    async fn call(&self, batch: &[Job]) -> Vec<Result<Answer, GateError>> {
        let Self(seller) = self;
        let request = |job: &Job| match job {
            Job::Admit(request) => Some(*request),
            Job::RollForward(_) => None,
        };
        let requests: Vec<AdmitRequest> = batch.iter().filter_map(request).collect();
        let asked_at = Instant::now();
        let (decisions, entry, failed) = match seller.admit(&requests).await {
            Ok((decisions, entry)) => (decisions, entry, None),
            Err(error) => (Vec::new(), None, Some(error)),
        };
        let mut pending = Vec::with_capacity(batch.len());
        let mut decided = decisions.iter();
        for job in batch {
            match job {
                Job::RollForward(held) => pending.push(*held),
                Job::Admit(AdmitRequest { user, .. }) => {
                    if let Some(Decision { admission: Admission::Admitted(order), epoch, seq, at, .. }) = decided.next()
                    {
                        let admitted = Admitted { order: *order, user: *user, seq: *seq, at: *at };
                        pending.push(Pending { epoch: *epoch, admitted });
                    }
                }
            }
        }
        let outcomes = seller.record(&pending).await;
        let is_released = seller.release_dead(&pending, &outcomes).await.is_ok();
        if let Some(entry) = entry.filter(|_| is_released && all_decided(&outcomes)) {
            seller.settle(entry);
        }

        let (mut decisions, mut outcomes) = (decisions.into_iter(), outcomes.into_iter());
        let mut next_outcome = || outcomes.next().unwrap_or(CommitOutcome::Undecided);
        let answer = |job: &Job| match job {
            Job::RollForward(_) => Ok(Answer::RolledForward(next_outcome())),
            Job::Admit(_) => {
                let Some(decision) = decisions.next() else { return Err(failed.unwrap_or(GateError::Unanswered)) };
                match decision.admission {
                    Admission::Admitted(_) => Ok(Answer::Admitted { decision, outcome: next_outcome() }),
                    Admission::AlreadyHas(order) => Ok(Answer::AlreadyHas { order, decision, asked_at }),
                    Admission::Refused(refusal) => Ok(Answer::Refused(refusal)),
                    Admission::Busy => Err(GateError::Busy),
                }
            }
        };
        batch.iter().map(answer).collect()
    }
}

/// A seller as the backend of a batcher.
pub(super) struct SellerHandle(pub(super) Arc<Seller>);

impl std::fmt::Debug for Seller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seller").field("sale", &self.sale).finish_non_exhaustive()
    }
}

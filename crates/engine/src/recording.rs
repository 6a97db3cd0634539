//! Records admitted orders of one sale in the ledger until the outcome of each is known.
//!
//! - After an outage the batch is retried with the same ids and growing pauses for as long as it takes. A timeout does not mean
//!   that the transaction failed, so no mark is released because of one.
//! - A batch that the database rejects because of its data is halved until the orders that fail alone are found. These become
//!   *suspects*: they keep their marks and are retried beside the queue, so that the other orders move on.
//! - A suspect goes into quarantine after [`TRIES`] tries over at least `quarantine_after`, so that a short disturbance quarantines
//!   nothing. If every order of a batch fails alone, the cause is probably not in the orders: such suspects wait, in addition, until
//!   the ledger has recorded another order of the sale.
//! - The number of suspects is bounded. At the bound a batch that fails is retried as a whole, as after an outage, and the queue
//!   fills.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use metrics::{Counter, Histogram, counter, histogram};
use parking_lot::{Mutex, MutexGuard};
use stampede_core::ports::{Admitted, LedgerError, OrderLedger, QuarantinedOrder, RecordOutcome};
use stampede_core::{Clock, Epoch, OrderId, SaleId};
use stampede_redis::jitter;
use tokio::sync::Notify;

use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;
use crate::tier::Context;

/// How often a suspect is tried before it goes into quarantine.
pub(crate) const TRIES: u32 = 8;
/// The most suspects of one sale.
const MAX_SUSPECTS: usize = 1000;
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// An order on its way into the ledger.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) epoch: Epoch,
    pub(crate) admitted: Admitted,
}

/// What became of an order that was submitted to the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommitOutcome {
    Decided(RecordOutcome),
    /// It could not be recorded so far. It keeps its mark and is retried beside the queue.
    Undecided,
}

/// An order that failed alone, because of its data according to the database.
#[derive(Debug, Clone)]
struct Suspect {
    pending: Pending,
    error: String,
    since: Instant,
    tries: u32,
    /// Every order of its batch failed, so only an order that was recorded since shows that the ledger works.
    whole_batch: bool,
}

/// Records the orders of one sale.
pub(crate) struct Recording {
    sale: SaleId,
    ledger: Arc<dyn OrderLedger>,
    clock: Arc<dyn Clock>,
    alerts: Arc<Alerts>,
    quarantine_after: Duration,
    suspects: Mutex<HashMap<OrderId, Suspect>>,
    suspect_added: Notify,
    /// When the ledger last recorded an order of this sale.
    last_recorded: Mutex<Option<Instant>>,
    retries: Counter,
    quarantined: Counter,
    batch_size: Histogram,
    batch_seconds: Histogram,
}

/// The database rejected the data.
struct DataError(String);

impl Recording {
    pub(crate) fn new(sale: SaleId, context: &Context, quarantine_after: Duration) -> Self {
        let Context { ledger, clock, alerts, .. } = context;
        Self {
            sale,
            ledger: ledger.clone(),
            clock: clock.clone(),
            alerts: alerts.clone(),
            quarantine_after,
            suspects: Mutex::default(),
            suspect_added: Notify::new(),
            last_recorded: Mutex::new(None),
            retries: counter!("stampede_commit_retries_total"),
            quarantined: counter!("stampede_quarantined_total"),
            batch_size: histogram!("stampede_commit_batch_size"),
            batch_seconds: histogram!("stampede_commit_seconds"),
        }
    }

    /// Records orders: one outcome for each, in their order.
    pub(crate) async fn record(&self, batch: &[Pending]) -> Vec<CommitOutcome> {
        let started = Instant::now();
        let mut outcomes = Vec::with_capacity(batch.len());
        for of_one_epoch in batch.chunk_by(|a, b| a.epoch == b.epoch) {
            let orders: Vec<Admitted> = of_one_epoch.iter().map(|pending| pending.admitted).collect();
            outcomes.extend(self.record_epoch(of_one_epoch[0].epoch, &orders).await);
        }
        #[expect(clippy::cast_precision_loss, reason = "a batch is far smaller than 2^52")]
        self.batch_size.record(batch.len() as f64);
        self.batch_seconds.record(started.elapsed());
        outcomes
    }

    /// Records orders of one epoch.
    async fn record_epoch(&self, epoch: Epoch, batch: &[Admitted]) -> Vec<CommitOutcome> {
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.attempt(epoch, batch).await {
                Ok(recorded) => return recorded.into_iter().map(CommitOutcome::Decided).collect(),
                Err(error) => error,
            };
            let found = self.isolate(epoch, batch, error).await;
            let whole_batch = batch.len() > 1 && found.iter().all(Result::is_err);
            if let Some(outcomes) = self.suspect(epoch, batch, found, whole_batch) {
                return outcomes;
            }
            tracing::error!(sale = %self.sale, orders = batch.len(), "too many orders cannot be recorded; trying again");
            self.wait(&mut pause).await;
        }
    }

    /// One call of the ledger, repeated through outages.
    async fn attempt(&self, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<RecordOutcome>, DataError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.call(epoch, batch).await {
                Ok(recorded) => return Ok(recorded),
                Err(LedgerError::Poison(error)) => return Err(DataError(describe(&*error))),
                Err(error) => describe(&error),
            };
            tracing::warn!(sale = %self.sale, orders = batch.len(), error, "cannot record yet; trying again");
            self.wait(&mut pause).await;
        }
    }

    async fn call(&self, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<RecordOutcome>, LedgerError> {
        // After a panic, as after a lost connection, it is not known whether the transaction committed.
        let call = AssertUnwindSafe(self.ledger.record(self.sale, epoch, batch)).catch_unwind().await;
        let recorded = call.unwrap_or_else(|_| Err(LedgerError::Unknown("the ledger panicked".into())))?;
        if recorded.contains(&RecordOutcome::Inserted) {
            *self.last_recorded.lock() = Some(Instant::now());
        }
        Ok(recorded)
    }

    async fn wait(&self, pause: &mut Duration) {
        self.retries.increment(1);
        // Nodes that wait for the same database do not try at the same moment.
        tokio::time::sleep(jitter(*pause)).await;
        *pause = (*pause * 2).min(LONGEST_PAUSE);
    }

    /// Halves a batch that failed until the orders that fail alone are found.
    fn isolate<'a>(
        &'a self,
        epoch: Epoch,
        batch: &'a [Admitted],
        error: DataError,
    ) -> BoxFuture<'a, Vec<Result<RecordOutcome, DataError>>> {
        let isolating = async move {
            if batch.len() < 2 {
                return vec![Err(error)];
            }
            let (first, second) = batch.split_at(batch.len() / 2);
            let mut found = Vec::with_capacity(batch.len());
            for half in [first, second] {
                match self.attempt(epoch, half).await {
                    Ok(recorded) => found.extend(recorded.into_iter().map(Ok)),
                    Err(error) => found.extend(self.isolate(epoch, half, error).await),
                }
            }
            found
        };
        isolating.boxed()
    }

    /// Adds the orders that failed to the suspects. `None` if that would exceed the bound; then nothing was done.
    fn suspect(
        &self,
        epoch: Epoch,
        batch: &[Admitted],
        found: Vec<Result<RecordOutcome, DataError>>,
        whole_batch: bool,
    ) -> Option<Vec<CommitOutcome>> {
        let mut suspects = self.suspects();
        let new =
            batch.iter().zip(&found).filter(|(order, found)| found.is_err() && !suspects.contains_key(&order.order));
        if suspects.len() + new.count() > MAX_SUSPECTS {
            return None;
        }
        let outcome = |(admitted, found): (&Admitted, Result<RecordOutcome, DataError>)| match found {
            Ok(recorded) => CommitOutcome::Decided(recorded),
            Err(DataError(error)) => {
                tracing::warn!(sale = %self.sale, order = %admitted.order, error, "an order cannot be recorded; it is tried again");
                let pending = Pending { epoch, admitted: *admitted };
                let (since, tries) = (Instant::now(), 1);
                suspects.entry(admitted.order).or_insert(Suspect { pending, error, since, tries, whole_batch });
                CommitOutcome::Undecided
            }
        };
        let outcomes = batch.iter().zip(found).map(outcome).collect();
        drop(suspects);
        self.suspect_added.notify_one();
        Some(outcomes)
    }

    fn suspects(&self) -> MutexGuard<'_, HashMap<OrderId, Suspect>> {
        self.suspects.lock()
    }

    /// Waits until the suspects are due for another try.
    pub(crate) async fn suspects_due(&self) {
        while self.suspects().is_empty() {
            self.suspect_added.notified().await;
        }
        tokio::time::sleep(self.quarantine_after / (TRIES - 1)).await;
    }

    /// Tries every suspect once more, alone. Returns those whose outcome is known now. No other order of the sale may be recorded
    /// meanwhile.
    pub(crate) async fn try_suspects(&self) -> Vec<(Pending, RecordOutcome)> {
        let suspects: Vec<Suspect> = self.suspects().values().cloned().collect();
        let mut known = Vec::new();
        for suspect in suspects {
            let Pending { epoch, admitted } = suspect.pending;
            let outcome = match self.call(epoch, &[admitted]).await {
                Ok(recorded) => recorded.first().copied(),
                Err(LedgerError::Poison(error)) => self.count_try(suspect, describe(&*error)).await,
                // An outage does not count as a try; the rest waits for the next round.
                Err(error) => {
                    tracing::warn!(sale = %self.sale, error = describe(&error), "cannot try orders again yet");
                    break;
                }
            };
            if let Some(recorded) = outcome {
                self.suspects().remove(&admitted.order);
                known.push((Pending { epoch, admitted }, recorded));
            }
        }
        known
    }

    /// Counts a try that failed. After enough of them the order goes into quarantine, and its outcome is known.
    async fn count_try(&self, suspect: Suspect, error: String) -> Option<RecordOutcome> {
        let Suspect { pending: Pending { epoch, admitted }, since, whole_batch, .. } = suspect;
        let tries = suspect.tries + 1;
        if let Some(suspect) = self.suspects().get_mut(&admitted.order) {
            suspect.tries = tries;
            suspect.error.clone_from(&error);
        }
        let last_recorded = *self.last_recorded.lock();
        let ledger_works = !whole_batch || last_recorded.is_some_and(|at| at > since);
        if tries < TRIES || since.elapsed() < self.quarantine_after || !ledger_works {
            return None;
        }
        match self.put_in_quarantine(Pending { epoch, admitted }, error).await {
            Ok(recorded) => Some(recorded),
            Err(error) => {
                tracing::error!(order = %admitted.order, error = describe(&error), "cannot write the quarantine; trying again");
                None
            }
        }
    }

    /// Puts a suspect into quarantine without further tries.
    pub(crate) async fn quarantine(&self, pending: Pending) -> Result<RecordOutcome, LedgerError> {
        let order = pending.admitted.order;
        let error = self.suspects().get(&order).map(|suspect| suspect.error.clone()).unwrap_or_default();
        let recorded = self.put_in_quarantine(pending, error).await?;
        self.suspects().remove(&order);
        Ok(recorded)
    }

    async fn put_in_quarantine(&self, pending: Pending, error: String) -> Result<RecordOutcome, LedgerError> {
        let (Pending { epoch, admitted }, quarantined_at) = (pending, self.clock.now());
        let order = QuarantinedOrder { sale: self.sale, epoch, admitted, error, quarantined_at };
        let recorded = self.ledger.quarantine(&order).await?;
        tracing::error!(sale = %self.sale, order = %admitted.order, error = order.error, "an order cannot be recorded: quarantined");
        if recorded == RecordOutcome::Quarantined {
            self.quarantined.increment(1);
            let (about, message) =
                (format!("sale {}", self.sale), format!("an order is in quarantine: {}", order.error));
            self.alerts.raise(AlertKind::Quarantined, about, message).await;
        }
        Ok(recorded)
    }

    /// Logs the orders that are undecided at shutdown. None of them was confirmed to its buyer.
    pub(crate) fn report_undecided(&self) {
        for suspect in self.suspects().values() {
            tracing::error!(sale = %self.sale, order = %suspect.pending.admitted.order, error = suspect.error, "an order could not be recorded before shutdown");
        }
    }
}

//! Records admitted orders of one sale in the ledger until the outcome of each is known.
//!
//! - After an outage the batch is retried with the same ids and growing pauses for as long as it takes. A timeout does not mean
//!   that the transaction failed, so no mark is released because of one.
//! - A batch that the database rejects because of its data is halved until the orders that fail alone are found. These become
//!   *suspects*: they keep their marks and are retried beside the queue, so that the other orders move on.
//! - A suspect goes into quarantine after [`TRIES`] tries over at least `quarantine_after`, so that a short disturbance quarantines
//!   nothing. If every order of a batch fails alone, the cause is probably not in the orders: such suspects wait, in addition, until
//!   the ledger has recorded another order of the sale. As long as it does not, they are reported as an outage.
//! - The number of suspects is bounded. At the bound a batch that fails is retried as a whole, as after an outage, and the queue
//!   fills.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use parking_lot::{Mutex, MutexGuard};
use stampede_core::ports::{Admitted, LedgerError, OrderLedger, QuarantinedOrder, RecordOutcome};
use stampede_core::{Clock, Epoch, OrderId, SaleId};
use stampede_redis::jitter;
use tokio::sync::Notify;

use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;
use crate::ledger_breaker::LedgerBreaker;
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

impl Suspect {
    /// Whether the ledger is known to work, by when it last recorded an order of the sale.
    fn ledger_works(&self, last_recorded: Option<Instant>) -> bool {
        !self.whole_batch || last_recorded.is_some_and(|at| at > self.since)
    }

    /// Whether it was tried often and long enough to go into quarantine.
    fn is_due(&self, quarantine_after: Duration) -> bool {
        self.tries >= TRIES && self.since.elapsed() >= quarantine_after
    }
}

/// Records the orders of one sale.
pub(crate) struct Recording {
    sale: SaleId,
    ledger: Arc<dyn OrderLedger>,
    clock: Arc<dyn Clock>,
    alerts: Arc<Alerts>,
    breaker: Arc<LedgerBreaker>,
    quarantine_after: Duration,
    suspects: Mutex<HashMap<OrderId, Suspect>>,
    suspect_added: Notify,
    /// When the ledger last recorded an order of this sale.
    last_recorded: Mutex<Option<Instant>>,
    retries: Counter,
    suspect_count: Gauge,
    quarantined: Counter,
    batch_size: Histogram,
    batch_seconds: Histogram,
}

/// The database rejected the data.
struct DataError(String);

impl Recording {
    pub(crate) fn new(sale: SaleId, context: &Context, quarantine_after: Duration) -> Self {
        let Context { ledger, clock, alerts, ledger_breaker, .. } = context;
        Self {
            sale,
            ledger: ledger.clone(),
            clock: clock.clone(),
            alerts: alerts.clone(),
            breaker: ledger_breaker.clone(),
            quarantine_after,
            suspects: Mutex::default(),
            suspect_added: Notify::new(),
            last_recorded: Mutex::new(None),
            retries: counter!("stampede_commit_retries_total"),
            suspect_count: gauge!("stampede_commit_suspects"),
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
        let recording = self.breaker.watch(self.ledger.record(self.sale, epoch, batch));
        let call = AssertUnwindSafe(recording).catch_unwind().await;
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
                suspects.entry(admitted.order).or_insert_with(|| {
                    self.suspect_count.increment(1.0);
                    Suspect { pending, error, since: Instant::now(), tries: 1, whole_batch }
                });
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

    fn remove_suspect(&self, order: OrderId) {
        if self.suspects().remove(&order).is_some() {
            self.suspect_count.decrement(1.0);
        }
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
                    return known;
                }
            };
            if let Some(recorded) = outcome {
                self.remove_suspect(admitted.order);
                known.push((Pending { epoch, admitted }, recorded));
            }
        }
        self.report_stuck().await;
        known
    }

    /// Reports the suspects that are not in quarantine only because the ledger is not known to work: without a person who removes the
    /// cause they may be tried for ever, and take their stock.
    async fn report_stuck(&self) {
        let last_recorded = *self.last_recorded.lock();
        let (orders, error) = {
            let suspects = self.suspects();
            let is_stuck =
                |suspect: &&Suspect| suspect.is_due(self.quarantine_after) && !suspect.ledger_works(last_recorded);
            let mut stuck = suspects.values().filter(is_stuck);
            let Some(first) = stuck.next() else { return };
            (1 + stuck.count(), first.error.clone())
        };
        self.retries.increment(orders as u64);
        tracing::warn!(sale = %self.sale, orders, error, "the database rejects every order of a batch; trying again");
        let message = format!(
            "the database rejects every order of a batch, so the cause is probably not in the orders; {orders} wait and take their \
             stock: {error}"
        );
        self.alerts.raise(AlertKind::NotRecorded, format!("sale {}", self.sale), message).await;
    }

    /// Counts a try that failed. After enough of them the order goes into quarantine, and its outcome is known.
    async fn count_try(&self, mut suspect: Suspect, error: String) -> Option<RecordOutcome> {
        let order = suspect.pending.admitted.order;
        suspect.tries += 1;
        suspect.error = error;
        if let Some(known) = self.suspects().get_mut(&order) {
            known.clone_from(&suspect);
        }
        let last_recorded = *self.last_recorded.lock();
        if !suspect.is_due(self.quarantine_after) || !suspect.ledger_works(last_recorded) {
            return None;
        }
        match self.put_in_quarantine(suspect.pending, suspect.error).await {
            Ok(recorded) => Some(recorded),
            Err(error) => {
                tracing::error!(%order, error = describe(&error), "cannot write the quarantine; trying again");
                None
            }
        }
    }

    /// Whether the cause is probably not in this suspect: every order of its batch has failed, and the ledger has recorded no other order of
    /// the sale since.
    pub(crate) fn may_be_outage(&self, order: OrderId) -> bool {
        let last_recorded = *self.last_recorded.lock();
        self.suspects().get(&order).is_some_and(|suspect| !suspect.ledger_works(last_recorded))
    }

    /// Whether the ledger has recorded an order of the sale since this time.
    pub(crate) fn has_recorded_since(&self, time: Instant) -> bool {
        self.last_recorded.lock().is_some_and(|at| at > time)
    }

    /// Puts a suspect into quarantine without further tries.
    pub(crate) async fn quarantine(&self, pending: Pending) -> Result<RecordOutcome, LedgerError> {
        let order = pending.admitted.order;
        let error = self.suspects().get(&order).map(|suspect| suspect.error.clone()).unwrap_or_default();
        let recorded = self.put_in_quarantine(pending, error).await?;
        self.remove_suspect(order);
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

impl Drop for Recording {
    fn drop(&mut self) {
        #[expect(clippy::cast_precision_loss, reason = "a sale has far fewer than 2^52 suspects")]
        self.suspect_count.decrement(self.suspects.get_mut().len() as f64);
    }
}

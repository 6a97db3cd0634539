//! The tier `solo`: the gate is in this process, and a buyer is answered after the ledger has committed the order.
//!
//! - [`committer`]: commits the orders of one sale in batches, and brings the gate in line with the ledger's answers
//! - [`watch`]: notices what other processes did to the same ledger, and closes sales that are over

mod committer;
#[cfg(feature = "failpoints")]
mod planted;
mod watch;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Admitted, Decision, Gate, LedgerError, RecordOutcome};
use stampede_core::{Admission, Epoch, OrderId, Refusal, Sale, SaleId, Timestamp, UserId, failpoint};
use stampede_gate::MemoryGate;
use stampede_queue::{DeadLetter, DeadLetterId};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

use self::committer::Committer;
use super::per_sale::PerSale;
use super::{AdmitOutcome, Context, OrderWait, RollForwardOutcome, Tier, time_of_mark};
use crate::batcher::{Abandoned, Batcher, Options, Ticket};
use crate::error::Error;
use crate::reconcile::ReconcileReport;
use crate::recording::{CommitOutcome, Pending, Recording};
use crate::retention::is_past_retention;
use crate::shared_sessions::SharedSessions;

#[derive(Debug, Clone, Copy)]
pub struct SoloConfig {
    /// Whether other processes may sell from the same ledger.
    pub shared_ledger: bool,
    /// The most orders in one transaction.
    pub max_batch: usize,
    /// The most orders of one sale that wait for the ledger.
    pub queue_per_sale: usize,
    /// The most orders of all sales that wait for the ledger.
    pub queue_total: usize,
    /// The earliest time after which an order that cannot be recorded goes into quarantine.
    pub quarantine_after: Duration,
    /// Start after a tier with a queue, in which nothing waits.
    pub abandon_queue: bool,
}

#[derive(Debug)]
pub(crate) struct Solo {
    config: SoloConfig,
    context: Context,
    gate: Arc<MemoryGate>,
    /// One permit per order that may wait for the ledger.
    permits: Arc<Semaphore>,
    committers: PerSale<SaleCommitter>,
    workers: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// The queue of one sale, and the tasks that commit what is in it.
#[derive(Debug)]
struct SaleCommitter {
    committer: Arc<Committer>,
    batcher: Batcher<Pending, CommitOutcome>,
    /// Retries orders that could not be recorded.
    retrying: AbortOnDropHandle<()>,
}

impl SaleCommitter {
    /// Returns when every admitted order has an outcome, or was tried once more.
    async fn close(self) {
        let Self { committer, batcher, retrying } = self;
        batcher.close().await;
        drop(retrying);
        committer.close().await;
    }
}

impl Solo {
    pub(crate) async fn start(config: SoloConfig, context: Context) -> Result<Arc<Self>, LedgerError> {
        let ledger = context.ledger.clone();
        let has_others = config.shared_ledger && ledger.has_other_workers(&context.holder).await?;
        if has_others {
            // This process may sell only after the others know of it.
            tokio::time::sleep(watch::NOTICED_WITHIN).await;
        }
        context.has_others.store(has_others, Ordering::Relaxed);

        let gate = Arc::new(MemoryGate::new());
        for sale in ledger.sales(None).await? {
            // Loaded with its orders in one snapshot, which `sales` does not give.
            if !is_past_retention(&sale, context.clock.now())
                && let Some(loaded) = ledger.load(sale.id).await?
            {
                gate.open(loaded);
            }
            context.sale_index.put(sale);
        }

        let solo = Arc::new(Self {
            permits: Arc::new(Semaphore::new(config.queue_total)),
            committers: PerSale::default(),
            workers: Mutex::default(),
            config,
            context,
            gate,
        });
        let watch = tokio::spawn(watch::run(Arc::downgrade(&solo)));
        solo.workers.lock().push(AbortOnDropHandle::new(watch));
        #[cfg(feature = "failpoints")]
        if failpoint::planted("reconcile-count") {
            let planted = tokio::spawn(planted::run(ledger, solo.gate.clone()));
            solo.workers.lock().push(AbortOnDropHandle::new(planted));
        }
        Ok(solo)
    }

    /// Puts an admitted order into the queue of its sale.
    fn submit(&self, sale: SaleId, epoch: Epoch, admitted: Admitted) -> Result<Ticket<CommitOutcome>, Error> {
        let pending = Pending { epoch, admitted };
        self.with_committer(sale, |committer| committer.batcher.submit(pending))?.map_err(Error::from)
    }

    /// Calls `act` with the sale's committer. [`Error::Busy`] once closed.
    fn with_committer<T>(&self, sale: SaleId, act: impl FnOnce(&SaleCommitter) -> T) -> Result<T, Error> {
        self.committers.with(sale, || self.new_committer(sale), act)
    }

    fn new_committer(&self, sale: SaleId) -> SaleCommitter {
        let SoloConfig { max_batch, queue_per_sale: queue, quarantine_after, .. } = self.config;
        let recording = Recording::new(sale, &self.context, quarantine_after);
        let committer = Arc::new(Committer::new(sale, self.context.ledger.clone(), self.gate.clone(), recording));
        let retrying = committer.clone();
        let retrying = AbortOnDropHandle::new(tokio::spawn(async move { retrying.retry_suspects().await }));
        let options = Options { max_batch, queue, in_flight: 2, abandoned: Abandoned::Keep };
        let batcher = Batcher::new(committer.clone(), options, self.permits.clone());
        SaleCommitter { committer, batcher, retrying }
    }

    /// Reads the sale again from the ledger.
    async fn refresh(&self, sale: SaleId) {
        // Once closed, nothing is sold and nothing needs to be refreshed.
        let Ok(committer) = self.with_committer(sale, |committer| committer.committer.clone()) else { return };
        committer.refresh().await;
    }

    /// Closes the committer of a sale that is long over.
    async fn retire(&self, sale: SaleId) {
        if let Some(committer) = self.committers.remove(sale) {
            committer.close().await;
        }
    }
}

#[async_trait]
impl Tier for Solo {
    async fn admit(&self, sale: SaleId, request: AdmitRequest) -> Result<AdmitOutcome, Error> {
        let now = self.context.clock.now();
        let Some(decision) = self.gate.admit(sale, request.user, request.order, now) else {
            return Ok(AdmitOutcome::Refused(Refusal::NoSuchSale));
        };
        match decision.admission {
            Admission::Refused(refusal) => Ok(AdmitOutcome::Refused(refusal)),
            Admission::Busy => Err(Error::Busy),
            Admission::AlreadyHas(order) => Ok(AdmitOutcome::AlreadyHas { order, decision, asked_at: Instant::now() }),
            Admission::Admitted(order) => {
                failpoint::hit("buy.admitted");
                // There is no await between setting the mark and submitting the order, so a caller that goes away cannot leave
                // a mark without an order.
                let Decision { epoch, seq, at, .. } = decision;
                let admitted = Admitted { order, user: request.user, seq, at };
                let outcome = self.submit(sale, epoch, admitted).inspect_err(|_| {
                    self.gate.release(sale, &Release { user: request.user, order, existing: None, ended: false });
                })?;
                if failpoint::planted("answer-early") {
                    let outcome = CommitOutcome::Decided(RecordOutcome::Inserted);
                    return Ok(AdmitOutcome::Admitted { decision, outcome });
                }
                let outcome = outcome.await.map_err(|_| Error::OutcomeUnknown)?;
                Ok(AdmitOutcome::Admitted { decision, outcome })
            }
        }
    }

    async fn roll_forward(
        &self,
        sale: SaleId,
        held: AdmitRequest,
        decision: Decision,
        _asked_at: Instant,
    ) -> Result<RollForwardOutcome, Error> {
        // The decision is that of this request. The time and the sequence number of the admission are not known.
        let at = time_of_mark(self.context.sale_index.get(sale).as_deref(), decision.at);
        let admitted = Admitted { order: held.order, user: held.user, seq: 0, at };
        let outcome = self.submit(sale, decision.epoch, admitted)?.await.map_err(|_| Error::OutcomeUnknown)?;
        Ok(RollForwardOutcome::Submitted(outcome))
    }

    async fn pending_order(&self, _sale: SaleId, _user: UserId) -> Result<Option<OrderId>, Error> {
        Ok(None)
    }

    fn wait_for_order(&self, _sale: SaleId, _order: OrderId) -> Result<Option<OrderWait>, Error> {
        Ok(None)
    }

    fn has_sales_of(&self, _created_at: Timestamp) -> bool {
        false
    }

    async fn discover(&self, sale: SaleId) -> Result<Option<Sale>, LedgerError> {
        let Some(loaded) = self.context.ledger.load(sale).await? else { return Ok(None) };
        let sale = loaded.sale.clone();
        if !is_past_retention(&sale, self.context.clock.now()) {
            self.gate.open(loaded);
        }
        self.context.sale_index.put(sale.clone());
        Ok(Some(sale))
    }

    async fn open_created(&self, sale: SaleId) -> Result<Option<Sale>, Error> {
        Ok(self.discover(sale).await?)
    }

    async fn reconcile(self: Arc<Self>, _dry_run: bool) -> Result<ReconcileReport, Error> {
        Err(Error::Illegal("in the tier solo the gate is compared with the database every second".to_owned()))
    }

    async fn queue_depth(&self) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    async fn dead_letters(&self, _limit: usize) -> Result<Vec<DeadLetter>, Error> {
        Err(Error::Illegal("the tier solo has no queue".to_owned()))
    }

    async fn remove_dead_letter(&self, _id: DeadLetterId, _retry: bool) -> Result<bool, Error> {
        Err(Error::Illegal("the tier solo has no queue".to_owned()))
    }

    async fn rebuild(self: Arc<Self>) -> Result<usize, Error> {
        Err(Error::Illegal("in the tier solo the gate is in memory: a restart rebuilds it".to_owned()))
    }

    fn shared_sessions(&self) -> Option<Arc<SharedSessions>> {
        None
    }

    fn gate(&self) -> &dyn Gate {
        &*self.gate
    }

    async fn gate_time(&self) -> Result<Timestamp, Error> {
        Ok(self.context.clock.now())
    }

    fn local_refusal(&self, _sale: SaleId, _user: UserId) -> Option<Refusal> {
        None
    }

    fn remaining(&self, sale: SaleId) -> Option<u32> {
        self.gate.snapshot(sale).map(|snapshot| snapshot.remaining())
    }

    fn is_authoritative(&self) -> bool {
        !self.context.has_others.load(Ordering::Relaxed)
    }

    fn can_admit(&self) -> Result<(), Error> {
        Ok(())
    }

    fn ready(&self) -> Result<(), Error> {
        Ok(())
    }

    fn accepts_without_ledger(&self) -> bool {
        false
    }

    fn waiting(&self) -> usize {
        self.config.queue_total - self.permits.available_permits()
    }

    async fn close(&self) {
        for committer in self.committers.close() {
            committer.close().await;
        }
        self.workers.lock().clear();
    }
}

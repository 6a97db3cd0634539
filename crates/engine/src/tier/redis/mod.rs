//! Many nodes, one gate in Redis: the tier `shared`, and with other parts in some places (`queued`, `shielded`) the tiers built on it.
//! How orders get to the ledger is the tier's `Delivery`.
//!
//! - [`config`]: the settings; [`services`]: what the engine uses in Redis beside the gate
//! - [`seller`]: sells one sale: admits requests in the gate, records the orders in the ledger, settles their outbox entry
//! - [`outbox`]: records and settles entries that a node has left in the outbox
//! - [`recovery`]: follows the gate's incarnation in the ledger, and rebuilds the gate when Redis has lost it
//! - [`rebuild`]: rebuilds the gate from the ledger and what has survived in Redis
//! - [`reconcile`]: compares gate and ledger, and repairs what differs
//! - [`subscription`]: receives what other nodes have changed
//! - [`requirements`]: what Redis must be like; [`closed`]: how long nothing could be sold; [`dead_letters`]: what could not be read

mod closed;
mod config;
mod dead_letters;
mod outbox;
mod rebuild;
mod reconcile;
mod recovery;
mod requirements;
mod seller;
mod services;
mod subscription;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use metrics::counter;
use parking_lot::Mutex;
use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Admitted, Decision, Gate, GateError, GateRecord, Ledger, LedgerError, ScheduledWork};
use stampede_core::{OrderId, Refusal, Sale, SaleId, SalePhase, Timestamp, UserId};
use stampede_gate::RedisGate;
use stampede_queue::{DeadLetter, DeadLetterId};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::closed::ClosedTimer;
pub use self::config::{ReconcileConfig, RedisTierConfig};
use self::recovery::{Changes, LostSales, NotReady};
pub(super) use self::requirements::MAX_CLOCK_DIFFERENCE;
use self::seller::SellerHandle;
pub(super) use self::seller::{Answer, Job, Seller};
pub(super) use self::services::connect;
pub(crate) use self::services::gate_record;
use self::subscription::Subscription;
use super::per_sale::PerSale;
use super::queued::admitter::Admitter;
use super::queued::broker::Broker;
use super::queued::consumer::{self, Consumer};
use super::queued::outcomes::Outcomes;
use super::queued::{self, rabbitmq_consumer};
use super::shielded::{Shield, ShieldConfig};
use super::{AdmitOutcome, AnswerAfter, Context, Delivery, OrderWait, QueueConfig, RollForwardOutcome, Tier};
use crate::batcher::{Abandoned, Batcher, Options};
use crate::engine::StartError;
use crate::error::Error;
use crate::reconcile::ReconcileReport;
use crate::recording::{Pending, Recording};
use crate::reduction;
use crate::retention::is_past_retention;
use crate::scheduled::Schedule;
use crate::shared_sessions::SharedSessions;

/// The most entries in a sale's outbox: entries are settled right after the commit, so a full one means that the ledger is stuck.
const OUTBOX_BOUND: u32 = 1000;
/// The most requests in one call of the gate. Redis executes one script at a time, so a call must be short.
const MAX_ADMITTED_AT_ONCE: usize = 512;
/// An id is made at most this long before its sale is committed, differences between clocks included. Where they differ by more, a new
/// sale is not found for about a second.
const MAX_CREATION_MS: i64 = 60_000;
/// No clock is this far ahead of the others.
const MAX_ID_AHEAD: Duration = Duration::from_secs(24 * 3600);
/// How long the start waits for Redis and a rebuild. After that the node starts unready and goes on trying.
const START_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct RedisTier {
    pub(super) config: RedisTierConfig,
    delivery: Delivery,
    context: Context,
    pub(super) gate: Arc<RedisGate>,
    /// One permit per request that may wait for the gate or the ledger.
    permits: Arc<Semaphore>,
    queues: PerSale<SaleQueue>,
    sessions: Arc<SharedSessions>,
    pub(super) losses: Arc<LostSales>,
    changes: Arc<Changes>,
    /// Those who wait for orders in the queue.
    outcomes: Arc<Outcomes>,
    /// Records what is in the outboxes, if this process does that.
    consumer: Option<Arc<Consumer>>,
    /// The queue in RabbitMQ.
    pub(super) broker: Option<Arc<Broker>>,
    /// Records what RabbitMQ delivers, if this process does that. Stopped by the token.
    broker_consumer: Mutex<Option<(CancellationToken, JoinHandle<()>)>>,
    shield: Option<Arc<Shield>>,
    closed: ClosedTimer,
    /// When all sales were last read from the ledger.
    sales_read_at_ms: AtomicI64,
    /// Why the gate cannot be used.
    not_ready: Mutex<Option<NotReady>>,
    /// Redis must be set up differently: nothing is sold.
    is_unsuitable: AtomicBool,
    workers: Mutex<Vec<AbortOnDropHandle<()>>>,
}

/// The queue of one sale, and the tasks that serve it.
#[derive(Debug)]
struct SaleQueue {
    seller: Arc<Seller>,
    batcher: Batcher<Job, Result<Answer, GateError>>,
    /// Retries orders that could not be recorded.
    retrying: AbortOnDropHandle<()>,
}

impl SaleQueue {
    /// Returns when every request has an answer.
    async fn close(self) {
        let Self { seller, batcher, retrying } = self;
        batcher.close().await;
        drop(retrying);
        seller.close().await;
    }
}

impl RedisTier {
    pub(super) async fn start(
        config: RedisTierConfig,
        delivery: Delivery,
        shield: Option<ShieldConfig>,
        context: Context,
    ) -> Result<Arc<Self>, StartError> {
        // First: another queue than before replaces the incarnation.
        queued::claim(&*context.ledger, &context.holder, &delivery).await?;
        let record = gate_record(&*context.ledger).await?;
        let outbox_bound = delivery.queue().map_or(OUTBOX_BOUND, |queue| queue.max_batches);
        let gate = RedisGate::new(config.redis.clone(), &record, outbox_bound);
        let gate = Arc::new(gate);
        let sessions = Arc::new(SharedSessions::new(config.redis.clone(), gate.clone(), &record.ledger_id));
        context.has_others.store(true, Ordering::Relaxed);
        for sale in context.ledger.sales(None).await? {
            context.sale_index.put(sale);
        }
        // Shown from the start.
        counter!("stampede_gate_rebuilds_total").increment(0);
        let consumer = match &delivery {
            Delivery::Stream(queue, _) if queue.consume => Some(Consumer::new(context.holder.clone())),
            Delivery::Stream(..) | Delivery::RabbitMq(..) | Delivery::Commit => None,
        };
        let broker = match &delivery {
            Delivery::RabbitMq(_, config) => {
                let started = Broker::start(config.as_ref().clone(), &record.ledger_id).await;
                Some(started.map_err(|error| StartError::Queue(error.to_string()))?)
            }
            Delivery::Stream(..) | Delivery::Commit => None,
        };
        let tier = Arc::new(Self {
            outcomes: Arc::default(),
            consumer,
            broker,
            broker_consumer: Mutex::default(),
            shield: shield.map(|config| Shield::new(config, gate.clone())),
            delivery,
            permits: Arc::new(Semaphore::new(config.queue_total)),
            queues: PerSale::default(),
            losses: Arc::default(),
            changes: Arc::default(),
            closed: ClosedTimer::default(),
            sales_read_at_ms: AtomicI64::new(i64::MIN),
            not_ready: Mutex::new(Some(NotReady::Starting)),
            is_unsuitable: AtomicBool::new(false),
            workers: Mutex::default(),
            gate,
            sessions,
            config,
            context,
        });
        let subscription = Subscription {
            client: tier.config.redis.clone(),
            sales: tier.gate.channel(),
            changes: tier.changes.clone(),
            outcomes: tier.outcomes.clone(),
            shield: tier.shield.clone(),
            sessions: tier.sessions.clone(),
            cached_sessions: tier.context.sessions.clone(),
            clock: tier.context.clock.clone(),
        };
        let subscription = subscription.run();
        tier.workers.lock().push(AbortOnDropHandle::new(tokio::spawn(subscription)));
        if let Some(broker) = &tier.broker {
            tier.spawn(broker.clone().keep_connecting());
            if tier.consumes() {
                // Before the gate is rebuilt, which waits for what is in the queue.
                let stop = CancellationToken::new();
                let consuming = rabbitmq_consumer::run(Arc::downgrade(&tier), broker.clone(), stop.clone());
                *tier.broker_consumer.lock() = Some((stop, tokio::spawn(consuming)));
            }
        }
        // A task of its own: a rebuild that takes longer than the start waits is not interrupted.
        let (started, outcome) = oneshot::channel();
        let recovery = tokio::spawn(recovery::run(Arc::downgrade(&tier), started));
        tier.workers.lock().push(AbortOnDropHandle::new(recovery));
        match tokio::time::timeout(START_TIMEOUT, outcome).await {
            Ok(Ok(Err(NotReady::Unsuitable(reason)))) => return Err(StartError::Redis(reason)),
            Ok(Ok(Err(reason))) => {
                tracing::warn!(%reason, cause = reason.cause(), "starting without the gate; trying again");
            }
            Ok(Ok(Ok(()))) => {}
            Ok(Err(_)) | Err(_) => tracing::warn!("starting without the gate: it is still being rebuilt"),
        }
        let schedule = Schedule::new(ScheduledWork::Reconcile, tier.context.locks.as_ref())
            .map_err(|error| StartError::Redis(error.to_string()))?;
        let reconcile = reconcile::run(Arc::downgrade(&tier), schedule, tier.config.reconcile.interval);
        tier.workers.lock().push(AbortOnDropHandle::new(tokio::spawn(reconcile)));
        match &tier.delivery {
            Delivery::Commit | Delivery::RabbitMq(..) => tier.spawn(outbox::run(Arc::downgrade(&tier))),
            Delivery::Stream(_, stream) => {
                if let Some(consumer) = &tier.consumer {
                    tier.spawn(consumer::run(Arc::downgrade(&tier), consumer.clone(), stream.clone()));
                }
            }
        }
        if tier.delivery.queue().is_some() {
            tier.spawn(tier.outcomes.clone().run(tier.context.ledger.clone()));
        }
        Ok(tier)
    }

    /// Runs a task until the tier is closed.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.workers.lock().push(AbortOnDropHandle::new(tokio::spawn(work)));
    }

    pub(super) fn ledger(&self) -> &dyn Ledger {
        self.context.ledger.as_ref()
    }

    /// Whether this process records what is in the queue.
    pub(super) fn consumes(&self) -> bool {
        self.delivery.queue().is_some_and(|queue| queue.consume)
    }

    /// What records the orders of a sale. [`Error::Busy`] once closed.
    pub(super) fn seller(&self, sale: SaleId) -> Result<Arc<Seller>, Error> {
        self.with_queue(sale, |queue| queue.seller.clone())
    }

    /// Calls `act` with the sale's queue. [`Error::Busy`] once closed.
    fn with_queue<T>(&self, sale: SaleId, act: impl FnOnce(&SaleQueue) -> T) -> Result<T, Error> {
        self.queues.with(sale, || self.new_queue(sale), act)
    }

    fn new_queue(&self, sale: SaleId) -> SaleQueue {
        let RedisTierConfig { max_batch, queue_per_sale: queue, quarantine_after, .. } = self.config;
        let recording = Recording::new(sale, &self.context, quarantine_after);
        // With RabbitMQ an entry is settled when it is published.
        let announces = matches!(self.delivery, Delivery::Stream(..));
        let (gate, ledger, losses) = (self.gate.clone(), self.context.ledger.clone(), self.losses.clone());
        let seller = Arc::new(Seller::new(sale, gate, ledger, recording, losses, announces));
        let retrying = seller.clone();
        let retrying = AbortOnDropHandle::new(tokio::spawn(async move { retrying.retry_suspects().await }));
        let max_batch = max_batch.min(MAX_ADMITTED_AT_ONCE);
        // A request whose caller has gone has had no effect yet, so it is dropped. One batch at a time: with two, every other batch has a
        // single order, because it begins as soon as the first buyer of the last batch is back.
        let options = Options { max_batch, queue, in_flight: 1, abandoned: Abandoned::Drop };
        let permits = self.permits.clone();
        let batcher = match self.delivery.queue() {
            None => Batcher::new(SellerHandle(seller.clone()), options, permits),
            Some(queue) => {
                let (shield, broker) = (self.shield.clone(), self.broker.clone());
                let admitter = Admitter::new(sale, seller.clone(), queue.accept_within, shield, broker);
                Batcher::new(admitter, options, permits)
            }
        };
        SaleQueue { seller, batcher, retrying }
    }

    async fn submit(&self, sale: SaleId, job: Job) -> Result<Answer, Error> {
        let ticket = self.with_queue(sale, |queue| queue.batcher.submit(job))??;
        Ok(ticket.await.map_err(|_| Error::OutcomeUnknown)??)
    }

    /// Uses this incarnation of the gate. If it is another one, Redis may have been replaced by an older copy, so that no session that was
    /// read there counts.
    fn set_incarnation(&self, record: &GateRecord) {
        if self.gate.incarnation() != record.incarnation {
            self.gate.set_incarnation(record);
            self.sessions.forget(|| self.context.sessions.retain(|_| false));
        }
    }

    /// Reads a sale from the ledger again. Requests for it go to the gate if it is open there.
    async fn refresh(&self, id: SaleId) -> Result<Option<Sale>, LedgerError> {
        let Some(sale) = self.context.ledger.sale(id).await? else { return Ok(None) };
        self.adopt(&sale);
        self.context.sale_index.put(sale.clone());
        Ok(Some(sale))
    }

    /// Completes a reduction of the sale's stock, if there is one. `cap` is the cap of the gate under the version of `sale`.
    async fn complete_reduction(&self, sale: &Sale, cap: Option<u32>) -> Result<(), LedgerError> {
        if sale.cap < sale.total {
            let Context { ledger, clock, sale_index, .. } = &self.context;
            sale_index.put(reduction::complete(ledger.as_ref(), sale.clone(), cap, clock.now()).await?);
            self.announce(sale.id).await;
        }
        Ok(())
    }

    fn adopt(&self, sale: &Sale) {
        if sale.phase == SalePhase::Open && !is_past_retention(sale, self.context.clock.now()) {
            self.gate.adopt(sale);
        }
    }
}

#[async_trait]
impl Tier for RedisTier {
    async fn admit(&self, sale: SaleId, request: AdmitRequest) -> Result<AdmitOutcome, Error> {
        self.can_admit()?;
        if self.gate.opened_as(sale).is_none() {
            // Only sales that the ledger calls open are sent to the gate.
            let now = self.context.clock.now();
            match self.context.sale_index.get(sale).filter(|sale| !is_past_retention(sale, now)) {
                // Another node may have opened it a moment ago: the seller asks the ledger, once for all requests that wait.
                Some(sale) if recovery::is_new(&sale) => {}
                Some(_) => return Err(GateError::NotOpen.into()),
                None => return Ok(AdmitOutcome::Refused(Refusal::NoSuchSale)),
            }
        }
        // The wait begins before the order is in the queue, so that its outcome is not missed.
        let wait = match self.delivery.queue() {
            Some(QueueConfig { answer_after: AnswerAfter::Ledger, .. }) => {
                Some(self.outcomes.wait_for_new(sale, request.order)?)
            }
            Some(_) | None => None,
        };
        Ok(match self.submit(sale, Job::Admit(request)).await? {
            Answer::Admitted { decision, outcome } => AdmitOutcome::Admitted { decision, outcome },
            Answer::Accepted => match wait {
                Some(wait) => AdmitOutcome::Recorded(wait.recorded().await.ok_or(Error::OutcomeUnknown)?),
                None => AdmitOutcome::Accepted,
            },
            Answer::AlreadyHas { order, decision, asked_at } => AdmitOutcome::AlreadyHas { order, decision, asked_at },
            Answer::Refused(refusal) => AdmitOutcome::Refused(refusal),
            Answer::RolledForward(_) => return Err(Error::OutcomeUnknown),
        })
    }

    async fn roll_forward(
        &self,
        sale: SaleId,
        held: AdmitRequest,
        decision: Decision,
        asked_at: Instant,
    ) -> Result<RollForwardOutcome, Error> {
        let admitted = Admitted { order: held.order, user: held.user, seq: decision.seq, at: decision.at };
        let pending = Pending { epoch: decision.epoch, admitted };
        if let Some(queue) = self.delivery.queue() {
            // In Redis a mark is as good as an entry of the queue: a rebuild records both. RabbitMQ outlives Redis, so there the order must be
            // confirmed by the broker.
            if self.broker.is_some() {
                self.submit(sale, Job::RollForward(pending)).await?;
            }
            // Later than this, the gate may have been rebuilt.
            return match queue.answer_after {
                AnswerAfter::Ledger => {
                    let order = self.outcomes.wait_for(sale, held.order)?.recorded().await;
                    order.map(RollForwardOutcome::Recorded).ok_or(Error::OutcomeUnknown)
                }
                AnswerAfter::Queue if asked_at.elapsed() < queue.accept_within => Ok(RollForwardOutcome::Accepted),
                AnswerAfter::Queue => Err(Error::OutcomeUnknown),
            };
        }
        match self.submit(sale, Job::RollForward(pending)).await? {
            Answer::RolledForward(outcome) => Ok(RollForwardOutcome::Submitted(outcome)),
            Answer::Admitted { .. } | Answer::Accepted | Answer::AlreadyHas { .. } | Answer::Refused(_) => {
                Err(Error::OutcomeUnknown)
            }
        }
    }

    async fn pending_order(&self, sale: SaleId, user: UserId) -> Result<Option<OrderId>, Error> {
        let is_over = |sale: &Sale| is_past_retention(sale, self.context.clock.now());
        match self.delivery.queue() {
            None => Ok(None),
            // A sale that is long over has left the gate, with nothing in the queue.
            Some(_) if self.context.sale_index.get(sale).is_none_or(|sale| is_over(&sale)) => Ok(None),
            Some(_) => Ok(self.gate.mark(sale, user).await?),
        }
    }

    fn wait_for_order(&self, sale: SaleId, order: OrderId) -> Result<Option<OrderWait>, Error> {
        match self.delivery.queue() {
            Some(_) => self.outcomes.wait_for(sale, order).map(Some),
            None => Ok(None),
        }
    }

    async fn discover(&self, sale: SaleId) -> Result<Option<Sale>, LedgerError> {
        self.refresh(sale).await
    }

    fn has_sales_of(&self, created_at: Timestamp) -> bool {
        let read_at_ms = self.sales_read_at_ms.load(Ordering::Relaxed);
        created_at.ms() < read_at_ms.saturating_sub(MAX_CREATION_MS)
            || created_at > self.context.clock.now().plus(MAX_ID_AHEAD)
    }

    async fn open_created(&self, id: SaleId) -> Result<Option<Sale>, Error> {
        let incarnation = self.gate.incarnation();
        let Some(loaded) = self.context.ledger.load(id).await? else { return Ok(None) };
        let mut sale = loaded.sale.clone();
        if !is_past_retention(&sale, self.context.clock.now()) {
            self.gate.open(loaded).await?;
            if !self.context.ledger.finish_load(id, sale.epoch, incarnation).await? {
                return Err(GateError::NotOpen.into());
            }
            sale.phase = SalePhase::Open;
            self.announce(id).await;
        }
        Ok(Some(sale))
    }

    async fn reconcile(self: Arc<Self>, dry_run: bool) -> Result<ReconcileReport, Error> {
        self.ready()?;
        reconcile::once(&self, dry_run).await
    }

    async fn queue_depth(&self) -> Result<Option<u64>, Error> {
        let Some(broker) = &self.broker else { return Ok(None) };
        broker.waiting().await.map(Some).map_err(|_| Error::Unready("RabbitMQ cannot be used".to_owned()))
    }

    async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, Error> {
        dead_letters::list(self, limit).await
    }

    async fn remove_dead_letter(&self, id: DeadLetterId, retry: bool) -> Result<bool, Error> {
        dead_letters::remove(self, id, retry).await
    }

    async fn rebuild(self: Arc<Self>) -> Result<(), Error> {
        rebuild::all(&self, "an administrator asked for it").await.map_err(|reason| Error::Unready(reason.to_string()))
    }

    fn shared_sessions(&self) -> Option<Arc<SharedSessions>> {
        Some(self.sessions.clone())
    }

    fn gate(&self) -> &dyn Gate {
        &*self.gate
    }

    fn local_refusal(&self, sale: SaleId, user: UserId) -> Option<Refusal> {
        self.shield.as_ref()?.refusal(sale, user)
    }

    fn remaining(&self, sale: SaleId) -> Option<u32> {
        self.gate.remaining(sale)
    }

    fn is_authoritative(&self) -> bool {
        true
    }

    fn can_admit(&self) -> Result<(), Error> {
        if !self.gate.is_answering() {
            return Err(GateError::NotSent.into());
        }
        if self.is_unsuitable.load(Ordering::Relaxed) {
            // Its clock decides when sales begin and end, and a mark that was evicted is a wrong answer.
            self.ready()?;
        }
        Ok(())
    }

    fn ready(&self) -> Result<(), Error> {
        if let Some(reason) = &*self.not_ready.lock() {
            return Err(Error::Unready(reason.to_string()));
        }
        match self.broker.as_ref().and_then(|broker| broker.unready_reason()) {
            None => Ok(()),
            // The reason has been logged.
            Some(_) => Err(Error::Unready("RabbitMQ cannot be used".to_owned())),
        }
    }

    fn waiting(&self) -> usize {
        self.config.queue_total - self.permits.available_permits()
    }

    async fn close(&self) {
        self.workers.lock().clear();
        if let Some(consumer) = &self.consumer {
            consumer.close().await;
        }
        let broker_consumer = self.broker_consumer.lock().take();
        if let Some((stop, consuming)) = broker_consumer {
            stop.cancel();
            // An error is a panic, which has been logged.
            let _ = consuming.await;
        }
        for queue in self.queues.close() {
            queue.close().await;
        }
        if let Some(broker) = &self.broker {
            broker.close().await;
        }
    }
}

impl RedisTier {
    /// Tells the other nodes that the sale has changed in the ledger. They notice by themselves within a second.
    async fn announce(&self, sale: SaleId) {
        if let Err(error) = self.gate.announce(sale).await {
            tracing::debug!(%sale, %error, "cannot tell the other nodes of a change");
        }
    }
}

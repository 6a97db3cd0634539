//! Many nodes, one gate in Redis: the tier `shared`, and with other parts in some places (`queued`, `shielded`) the tiers built on it.
//! How orders get to the ledger is the tier's `Delivery`.
//!
//! - [`config`]: the settings; [`services`]: what the engine uses in Redis beside the gate; [`start`]: the start
//! - [`buy`]: decides on one request; [`sale_queue`]: the queue of a sale, in which requests wait
//! - [`seller`]: sells one sale: admits requests in the gate, records the orders in the ledger, settles their outbox entry
//! - [`outbox`]: records and settles entries that a node has left in the outbox
//! - [`sales`]: brings sales of the ledger into the gate
//! - [`recovery`]: follows the gate's incarnation in the ledger, and rebuilds the gate when Redis has lost it
//! - [`rebuild`]: rebuilds the gate from the ledger and what has survived in Redis
//! - [`retirement`]: removes sales that are long over from Redis
//! - [`reconcile`]: compares gate and ledger, and repairs what differs
//! - [`subscription`]: receives what other nodes have changed
//! - [`requirements`]: what Redis must be like; [`closed`]: how long nothing could be sold; [`dead_letters`]: what could not be read

mod busy_sales;
mod buy;
mod closed;
mod config;
mod dead_letters;
mod outbox;
mod rebuild;
mod reconcile;
mod recovery;
mod requirements;
mod retirement;
mod sale_queue;
mod sales;
mod seller;
mod services;
mod start;
mod subscription;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use parking_lot::Mutex;
use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Decision, Gate, GateError, GateRecord, Ledger, LedgerError};
use stampede_core::{OrderId, Refusal, Sale, SaleId, Timestamp, UserId};
use stampede_gate::RedisGate;
use stampede_queue::{DeadLetter, DeadLetterId};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub(super) use self::busy_sales::BusySales;
use self::closed::ClosedTimer;
pub use self::config::{ReconcileConfig, RedisTierConfig};
use self::recovery::{Changes, LostSales, NotReady, Opened};
pub(super) use self::requirements::MAX_CLOCK_DIFFERENCE;
use self::sale_queue::SaleQueue;
pub(super) use self::seller::{Answer, Job, Seller};
pub(super) use self::services::connect;
pub(crate) use self::services::gate_record;
use super::per_sale::PerSale;
use super::queued::broker::Broker;
use super::queued::consumer::Consumer;
use super::queued::outcomes::Outcomes;
use super::shielded::Shield;
use super::{AdmitOutcome, AnswerAfter, Context, Delivery, OrderWait, RollForwardOutcome, Tier};
use crate::alerts::Alerts;
use crate::error::Error;
use crate::reconcile::ReconcileReport;
use crate::reduction::Reductions;
use crate::retention::is_past_retention;
use crate::shared_sessions::SharedSessions;

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
    reductions: Reductions,
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
    /// Redis still has the gate, although the ledger could not be asked.
    has_gate: AtomicBool,
    workers: Mutex<Vec<AbortOnDropHandle<()>>>,
}

impl RedisTier {
    /// Uses this incarnation of the gate. If it is another one, Redis may have been replaced by an older copy, so that no session that was
    /// read there counts.
    fn set_incarnation(&self, record: &GateRecord) {
        if self.gate.incarnation() != record.incarnation {
            self.gate.set_incarnation(record);
            self.sessions.forget(|| self.context.sessions.retain(|_| false));
        }
    }

    /// `Ended` if the sale is over for so long that it has left the gate, and the ledger has said not long ago that the user has no order.
    fn refusal_after_retention(&self, sale: SaleId, user: UserId) -> Option<Refusal> {
        let Context { sale_index, clock, without_order, .. } = &self.context;
        let is_over = sale_index.get(sale).is_some_and(|sale| is_past_retention(&sale, clock.now()));
        (is_over && without_order.contains(sale, user)).then_some(Refusal::Ended)
    }

    /// Runs a task until the tier is closed.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.workers.lock().push(AbortOnDropHandle::new(tokio::spawn(work)));
    }

    pub(super) fn ledger(&self) -> &dyn Ledger {
        self.context.ledger.as_ref()
    }

    pub(super) fn alerts(&self) -> &Alerts {
        &self.context.alerts
    }

    /// How many messages wait in RabbitMQ, or in the ledger because they cannot be recorded; `None` if there is no such queue. The error
    /// says why it is not known.
    async fn queued_messages(&self) -> Result<Option<u64>, String> {
        let Some(broker) = &self.broker else { return Ok(None) };
        let waiting = broker.waiting().await.map_err(|_| "RabbitMQ cannot be used".to_owned())?;
        let parked = self.ledger().parked_sales().await.map_err(|_| "the database cannot be used".to_owned())?;
        Ok(Some(waiting + parked.iter().map(|(_, messages)| messages).sum::<u64>()))
    }

    /// Whether this process records what is in the queue.
    pub(super) fn consumes(&self) -> bool {
        self.delivery.queue().is_some_and(|queue| queue.consume)
    }
}

#[async_trait]
impl Tier for RedisTier {
    async fn admit(&self, sale: SaleId, request: AdmitRequest) -> Result<AdmitOutcome, Error> {
        buy::admit(self, sale, request).await
    }

    async fn roll_forward(
        &self,
        sale: SaleId,
        held: AdmitRequest,
        decision: Decision,
        asked_at: Instant,
    ) -> Result<RollForwardOutcome, Error> {
        buy::roll_forward(self, sale, held, decision, asked_at).await
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
            Some(_) => self.outcomes.wait_for_new(sale, order).map(Some),
            None => Ok(None),
        }
    }

    async fn discover(&self, sale: SaleId) -> Result<Option<Sale>, LedgerError> {
        self.refresh(sale).await
    }

    fn has_sales_of(&self, created_at: Timestamp) -> bool {
        sales::has_sales_of(self, created_at)
    }

    async fn open_created(&self, id: SaleId) -> Result<Option<Sale>, Error> {
        sales::open_created(self, id).await
    }

    async fn reconcile(self: Arc<Self>, dry_run: bool) -> Result<ReconcileReport, Error> {
        self.ready()?;
        reconcile::once(&self, dry_run).await
    }

    async fn queue_depth(&self) -> Result<Option<u64>, Error> {
        self.queued_messages().await.map_err(Error::Unready)
    }

    async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, Error> {
        dead_letters::list(self, limit).await
    }

    async fn remove_dead_letter(&self, id: DeadLetterId, retry: bool) -> Result<bool, Error> {
        dead_letters::remove(self, id, retry).await
    }

    async fn rebuild(self: Arc<Self>) -> Result<usize, Error> {
        match rebuild::all(&self, "an administrator asked for it").await {
            Ok(Opened::All) => Ok(0),
            Ok(Opened::AllBut(closed)) => Ok(closed),
            Err(reason) => Err(Error::Unready(reason.to_string())),
        }
    }

    fn shared_sessions(&self) -> Option<Arc<SharedSessions>> {
        Some(self.sessions.clone())
    }

    fn gate(&self) -> &dyn Gate {
        &*self.gate
    }

    async fn gate_time(&self) -> Result<Timestamp, Error> {
        // Redis is used only while its clock is close to this one; the clock of this node may be far off.
        Ok(self.context.ledger.now().await?)
    }

    fn local_refusal(&self, sale: SaleId, user: UserId) -> Option<Refusal> {
        let shield = self.shield.as_ref()?;
        let refusal = shield.refusal(sale, user).or_else(|| self.refusal_after_retention(sale, user));
        if refusal.is_some() {
            shield.count_refusal();
        }
        refusal
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
        // With a queue, orders are accepted while the ledger is away.
        if matches!(self.delivery, Delivery::Commit) {
            self.context.ledger_breaker.check()?;
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
            // The cause has been logged.
            Some(reason) => Err(Error::Unready(format!("RabbitMQ cannot be used: {reason}"))),
        }
    }

    fn accepts_without_ledger(&self) -> bool {
        let has_gate = match &*self.not_ready.lock() {
            None => true,
            Some(NotReady::Ledger(_)) => self.has_gate.load(Ordering::Relaxed),
            Some(_) => false,
        };
        let is_answered_first = self.delivery.queue().is_some_and(|queue| queue.answer_after == AnswerAfter::Queue);
        let can_publish = self.broker.as_ref().is_none_or(|broker| broker.unready_reason().is_none());
        is_answered_first && has_gate && self.gate.is_answering() && can_publish
    }

    fn waiting(&self) -> usize {
        self.config.queue_total - self.permits.available_permits()
    }

    async fn close(&self) {
        self.workers.lock().clear();
        self.reductions.stop();
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

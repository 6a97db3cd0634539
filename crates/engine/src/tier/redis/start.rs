//! Starts the tier: connects it to its servers, rebuilds the gate if need be, and starts the workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use metrics::counter;
use parking_lot::Mutex;
use stampede_core::ports::ScheduledWork;
use stampede_gate::RedisGate;
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::super::per_sale::PerSale;
use super::super::queued::broker::Broker;
use super::super::queued::consumer::{self, Consumer};
use super::super::queued::{self, parked, rabbitmq_consumer};
use super::super::shielded::{Shield, ShieldConfig};
use super::super::{Context, Delivery};
use super::closed::ClosedTimer;
use super::recovery::NotReady;
use super::subscription::Subscription;
use super::{RedisTier, RedisTierConfig, gate_record, outbox, reconcile, recovery, retirement};
use crate::engine::StartError;
use crate::reduction::Reductions;
use crate::scheduled::Schedule;
use crate::shared_sessions::SharedSessions;

/// The most entries in a sale's outbox: entries are settled right after the commit, so a full one means that the ledger is stuck.
const OUTBOX_BOUND: u32 = 1000;
/// How long the start waits for Redis and a rebuild. After that the node starts unready and goes on trying.
const START_TIMEOUT: Duration = Duration::from_secs(10);

impl RedisTier {
    pub(in crate::tier) async fn start(
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
            reductions: Reductions::default(),
            closed: ClosedTimer::default(),
            sales_read_at_ms: AtomicI64::new(i64::MIN),
            not_ready: Mutex::new(Some(NotReady::Starting)),
            is_unsuitable: AtomicBool::new(false),
            has_gate: AtomicBool::new(false),
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
            tier.spawn(broker.clone().watch(tier.context.alerts.clone()));
            if tier.consumes() {
                tier.spawn(parked::run(Arc::downgrade(&tier)));
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
            Ok(Ok(Err(NotReady::Unsuitable { reason, .. }))) => return Err(StartError::Redis(reason)),
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
        tier.spawn(retirement::run(Arc::downgrade(&tier)));
        tier.spawn(tier.context.ledger_breaker.clone().run(tier.context.ledger.clone()));
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
}

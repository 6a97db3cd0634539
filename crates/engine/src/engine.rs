//! Starts a tier, holds its parts, and gives every admitted order an outcome at shutdown.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt as _;
use stampede_core::ids::{InvalidId, Lease, Snowflake};
use stampede_core::ports::{ClaimOutcome, LedgerError, ScheduledWork, Stores};
use stampede_core::{Clock, Code, OrderId, SaleId, UserId};
use stampede_limit::Counters;
use stampede_lock::{KeyedMutex, Locks};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::alerts::{AlertConfig, Alerts};
use crate::auth::{Auth, AuthConfig};
use crate::catalogue_cache::{CacheConfig, CatalogueCache};
use crate::error::{Error, describe};
use crate::events::EventConfig;
use crate::ids::{IdConfig, Ids};
use crate::ledger_breaker::LedgerBreaker;
use crate::login::Sender;
use crate::order_changes::OrderChanges;
use crate::payments::PaymentConfig;
use crate::sale_index::SaleIndex;
use crate::scheduled::Schedule;
use crate::tier::{self, Context, Services, Tier, TierConfig};
use crate::without_order::WithoutOrder;
use crate::workers;

#[derive(Debug, Clone)]
pub struct Config {
    /// How long a buyer waits for an answer before the response is `outcome_unknown`.
    pub answer_timeout: Duration,
    /// How long orders of new sales may be unpaid; 0 without a limit.
    pub payment_deadline_ms: u32,
    /// Whether buyers of new sales whose order has ended may buy again.
    pub buy_again: bool,
    pub payments: PaymentConfig,
    /// `None`: events are not delivered, and the ledger must not write them.
    pub events: Option<EventConfig>,
    pub tier: TierConfig,
    pub ids: IdConfig,
    pub auth: AuthConfig,
    pub cache: CacheConfig,
    pub alerts: AlertConfig,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot start: the ledger failed")]
    Ledger(#[from] LedgerError),
    #[error(
        "cannot start the tier {tier}: a node of the tier {other} runs on this database, or was killed less than a minute ago"
    )]
    OtherTier { tier: &'static str, other: String },
    #[error(
        "cannot start without events.webhook_url: a process with it runs on this database, or was killed less than a minute ago, and \
         what this one does would have no events; all processes must have the same setting"
    )]
    EventsOff,
    #[error(
        "cannot start with events.webhook_url: a process without it runs on this database, or was killed less than a minute ago, and \
         what that one does has no events; all processes must have the same setting"
    )]
    EventsOn,
    #[error(
        "cannot start the tier {tier}: orders may wait in the queue of the tier {last}, which it does not read. Start a node of the tier shared on \
         the same Redis until it is ready: it records them. Or, if no order waits, set queue.abandon = true"
    )]
    AfterQueue { tier: &'static str, last: String },
    #[error("cannot start: {0}")]
    Redis(String),
    #[error("cannot start: {0}")]
    Queue(String),
    #[error(
        "cannot start with ids = \"snowflake\": this database has ids from the counter in Redis, which later snowflakes could repeat; \
         set ids = \"redis\""
    )]
    IdKind,
    #[error("cannot start: the session key in the ledger has {0} bytes, not 32")]
    Key(usize),
}

/// What a process can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// Everything.
    Fully,
    /// Accept orders, which wait in the queue: the ledger cannot be used.
    WithoutLedger,
}

/// How quickly the ledger must answer if orders can be accepted without it.
const LEDGER_TIMEOUT: Duration = Duration::from_secs(1);

/// A tier, ready to sell.
#[derive(Debug)]
pub struct Engine {
    pub(crate) answer_timeout: Duration,
    pub(crate) payment_deadline_ms: u32,
    pub(crate) buy_again: bool,
    pub(crate) payments: PaymentConfig,
    pub(crate) alerts: Arc<Alerts>,
    pub(crate) ledger_breaker: Arc<LedgerBreaker>,
    pub(crate) stores: Stores,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) tier: Arc<dyn Tier>,
    /// Lets one attempt of a buyer at a sale through at a time.
    pub(crate) buyers: KeyedMutex<(UserId, SaleId)>,
    pub(crate) sale_index: Arc<SaleIndex>,
    pub(crate) without_order: Arc<WithoutOrder>,
    pub(crate) catalogue_cache: CatalogueCache,
    pub(crate) auth: Auth,
    limit_counters: Counters,
    /// Notified when a pending release was added to the ledger.
    pub(crate) release_added: Arc<Notify>,
    pub(crate) order_changes: Arc<OrderChanges>,
    pub(crate) ids: Ids,
    holder: String,
    /// Whether other processes may write to the same ledger.
    pub(crate) has_others: Arc<AtomicBool>,
    workers: Mutex<JoinSet<()>>,
    locks: Option<Locks>,
}

impl Engine {
    /// Leases a worker number, starts the tier, which rebuilds its gate from the ledger, and starts the workers.
    pub async fn start(
        config: Config,
        stores: Stores,
        clock: Arc<dyn Clock>,
        sender: Option<Arc<dyn Sender>>,
    ) -> Result<Arc<Self>, StartError> {
        let holder = format!("{:032x}", rand::rng().random::<u128>());
        let ledger = stores.ledger.clone();
        let lease = workers::lease::first(ledger.as_ref(), &holder).await?;
        // On the heap, because it is large and happens once.
        let started = Box::pin(Self::start_with(config, stores, clock, sender, holder.clone(), lease)).await;
        if started.is_err() {
            // Otherwise this process would count as running until the lease ends. The reason of the failure matters more.
            let _ = ledger.return_worker(&holder, lease.worker, lease.from).await;
        }
        started
    }

    async fn start_with(
        config: Config,
        stores: Stores,
        clock: Arc<dyn Clock>,
        sender: Option<Arc<dyn Sender>>,
        holder: String,
        lease: Lease,
    ) -> Result<Arc<Self>, StartError> {
        let (ledger, tier) = (stores.ledger.clone(), config.tier.name());
        match ledger.claim_tier(&holder, tier, config.tier.not_after()).await? {
            ClaimOutcome::Claimed => {}
            ClaimOutcome::OtherTier(other) => return Err(StartError::OtherTier { tier, other }),
            ClaimOutcome::OtherEvents if config.events.is_some() => return Err(StartError::EventsOn),
            ClaimOutcome::OtherEvents => return Err(StartError::EventsOff),
            ClaimOutcome::After(last) => return Err(StartError::AfterQueue { tier, last }),
        }
        if !ledger.claim_id_kind(config.ids.kind()).await? {
            return Err(StartError::IdKind);
        }
        let worker = Arc::new(Snowflake::new(clock.clone(), lease));

        let key = stores.accounts.secret("session_key", &rand::rng().random::<[u8; 32]>()).await?;
        let key: [u8; 32] = key.try_into().map_err(|key: Vec<u8>| StartError::Key(key.len()))?;
        let Services { limit_counters, cache_sharing, locks } =
            tier::connect_services(&config.tier, &config.cache, ledger.as_ref()).await?;
        let (mut auth, used_sessions) =
            Auth::new(config.auth, stores.accounts.clone(), clock.clone(), key, sender, &limit_counters);

        let alerts = Arc::new(Alerts::new(config.alerts, ledger.clone()));
        let ledger_breaker = Arc::<LedgerBreaker>::default();
        let without_order = Arc::new(WithoutOrder::new());
        let (sale_index, has_others) = (Arc::new(SaleIndex::default()), Arc::new(AtomicBool::new(false)));
        let context = Context {
            ledger: ledger.clone(),
            clock: clock.clone(),
            holder: holder.clone(),
            sale_index: sale_index.clone(),
            sessions: auth.sessions(),
            has_others: has_others.clone(),
            alerts: alerts.clone(),
            locks: locks.clone(),
            ledger_breaker: ledger_breaker.clone(),
            without_order: without_order.clone(),
        };
        let tier = tier::start(config.tier, context).await?;
        auth.shared = tier.shared_sessions();

        let release_added = Arc::new(Notify::new());
        let mut workers = JoinSet::new();
        workers.spawn(workers::lease::run(ledger.clone(), worker.clone(), holder.clone()));
        let ids = Ids::start(config.ids, ledger.as_ref(), worker, &mut workers).await?;
        workers.spawn(workers::pending_releases::run(
            ledger.clone(),
            tier.clone(),
            sale_index.clone(),
            clock.clone(),
            release_added.clone(),
            alerts.clone(),
        ));
        workers.spawn(workers::sessions::run(
            stores.accounts.clone(),
            clock.clone(),
            auth.sessions(),
            auth.shared.clone(),
            used_sessions,
        ));
        let schedule = |work| Schedule::new(work, locks.as_ref()).map_err(|error| StartError::Redis(error.to_string()));
        let (index, expired) = (schedule(ScheduledWork::IndexOrders)?, schedule(ScheduledWork::DeleteExpired)?);
        let order_changes = Arc::new(OrderChanges::default());
        workers.spawn(order_changes.clone().run(ledger.clone()));
        let deadlines = workers::payment_deadlines::PaymentDeadlines {
            ledger: ledger.clone(),
            clock: clock.clone(),
            schedule: schedule(ScheduledWork::ExpireOrders)?,
            release_added: release_added.clone(),
            alerts: alerts.clone(),
        };
        workers.spawn(deadlines.run());
        let refunds = workers::refunds::Refunds {
            ledger: ledger.clone(),
            clock: clock.clone(),
            config: config.payments.clone(),
            alerts: alerts.clone(),
        };
        workers.spawn(refunds.run());
        workers.spawn(workers::quarantined::run(ledger.clone(), alerts.clone()));
        if let Some(events) = config.events {
            let delivery = workers::event_delivery::EventWorker {
                ledger: ledger.clone(),
                clock: clock.clone(),
                config: events,
                alerts: alerts.clone(),
                schedule: schedule(ScheduledWork::DeliverEvents)?,
            };
            workers.spawn(delivery.run());
        }
        workers.spawn(workers::index::run(ledger, clock.clone(), index));
        workers.spawn(workers::expired::run(stores.accounts.clone(), stores.ledger.clone(), clock.clone(), expired));
        let catalogue_cache = CatalogueCache::new(&stores, config.cache, &cache_sharing);
        workers.spawn(catalogue_cache.clone().warm(clock.now()));

        Ok(Arc::new(Self {
            answer_timeout: config.answer_timeout,
            payment_deadline_ms: config.payment_deadline_ms,
            buy_again: config.buy_again,
            payments: config.payments,
            alerts,
            ledger_breaker,
            without_order,
            catalogue_cache,
            locks,
            buyers: KeyedMutex::new(),
            workers: Mutex::new(workers),
            stores,
            clock,
            tier,
            sale_index,
            auth,
            limit_counters,
            release_added,
            order_changes,
            ids,
            holder,
            has_others,
        }))
    }

    pub fn clock(&self) -> &dyn Clock {
        self.clock.as_ref()
    }

    /// Where the tier's rate limits are counted.
    pub const fn limit_counters(&self) -> &Counters {
        &self.limit_counters
    }

    /// For each limit of login codes, how many it has let through without counting them, because its memory was full.
    pub fn code_limits_let_through(&self) -> [(&'static str, u64); 6] {
        self.auth.budgets.let_through()
    }

    /// How many login codes were counted by this node alone, because Redis did not answer.
    pub fn code_limit_fallbacks(&self) -> u64 {
        self.auth.budgets.fallbacks()
    }

    /// How many requests to buy wait for the gate or the ledger.
    pub fn waiting(&self) -> usize {
        self.tier.waiting()
    }

    /// Checks that the ledger answers, that the gate can be used, and that ids can be made. With a queue, orders may be accepted without
    /// the ledger.
    pub async fn ready(&self) -> Result<Ready, Error> {
        let usable = async {
            let ping = self.stores.ledger.ping();
            if self.tier.accepts_without_ledger() {
                let no_answer = |_| LedgerError::Unavailable("it does not answer".into());
                tokio::time::timeout(LEDGER_TIMEOUT, ping).await.map_err(no_answer)??;
            } else {
                ping.await?;
            }
            self.tier.ready()
        };
        let ready = match usable.await {
            Ok(()) => Ready::Fully,
            Err(error) if !self.tier.accepts_without_ledger() => return Err(error),
            // Only the ledger is missing.
            Err(_) => Ready::WithoutLedger,
        };
        self.ids.ready()?;
        Ok(ready)
    }

    /// The id of anything but an order.
    pub(crate) fn next_id<T>(&self, of: impl FnOnce(i64) -> Result<T, InvalidId>) -> Result<T, Error> {
        of(self.ids.next()?).map_err(|_| Error::Plain(Code::Internal))
    }

    pub(crate) fn next_order_id(&self) -> Result<OrderId, Error> {
        OrderId::new(self.ids.next_order()?).map_err(|_| Error::Plain(Code::Internal))
    }

    /// Waits until every admitted order has an outcome, and returns the worker number. To be called when no request is under
    /// way. `false` if that took longer than `timeout`; the next start then finishes what is left.
    pub async fn shut_down(&self, timeout: Duration) -> bool {
        let closing = async {
            self.tier.close().await;
            self.workers.lock().abort_all();
            self.catalogue_cache.drain().await;
            if let Some(locks) = &self.locks
                && let Err(error) = locks.close().await
            {
                tracing::debug!(%error, "locks of scheduled work were not released; they expire");
            }
            let Ids { worker, .. } = &self.ids;
            let returned = self.stores.ledger.return_worker(&self.holder, worker.worker(), worker.unused_from()).await;
            self.stores.ledger.close().await;
            returned
        };
        match tokio::time::timeout(timeout, closing).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::warn!(error = describe(&error), "could not return the worker number");
                true
            }
            Err(_) => false,
        }
    }
}

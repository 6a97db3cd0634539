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
use crate::ids::{IdConfig, Ids};
use crate::login::Sender;
use crate::sale_index::SaleIndex;
use crate::scheduled::Schedule;
use crate::tier::{self, Context, Services, Tier, TierConfig};
use crate::workers;

#[derive(Debug, Clone)]
pub struct Config {
    /// How long a buyer waits for an answer before the response is `outcome_unknown`.
    pub answer_timeout: Duration,
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

/// A tier, ready to sell.
#[derive(Debug)]
pub struct Engine {
    pub(crate) answer_timeout: Duration,
    pub(crate) stores: Stores,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) tier: Arc<dyn Tier>,
    /// Lets one attempt of a buyer at a sale through at a time.
    pub(crate) buyers: KeyedMutex<(UserId, SaleId)>,
    pub(crate) sale_index: Arc<SaleIndex>,
    pub(crate) catalogue_cache: CatalogueCache,
    pub(crate) auth: Auth,
    limit_counters: Counters,
    /// Notified when a pending release was added to the ledger.
    pub(crate) release_added: Arc<Notify>,
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
        if let ClaimOutcome::OtherTier(other) = ledger.claim_tier(&holder, tier).await? {
            return Err(StartError::OtherTier { tier, other });
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

        let alerts = Arc::new(Alerts::new(config.alerts, ledger.clone(), clock.clone()));
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
            alerts,
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
        workers.spawn(workers::index::run(ledger, clock.clone(), index));
        workers.spawn(workers::expired::run(stores.accounts.clone(), clock.clone(), expired));
        let catalogue_cache = CatalogueCache::new(&stores, config.cache, &cache_sharing);
        workers.spawn(catalogue_cache.clone().warm(clock.now()));

        Ok(Arc::new(Self {
            answer_timeout: config.answer_timeout,
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

    /// How many login codes were counted by this node alone, because Redis did not answer.
    pub fn code_limit_fallbacks(&self) -> u64 {
        self.auth.budgets.fallbacks()
    }

    /// How many requests to buy wait for the gate or the ledger.
    pub fn waiting(&self) -> usize {
        self.tier.waiting()
    }

    /// Checks that the ledger answers, that the gate can be used, and that ids can be made.
    pub async fn ready(&self) -> Result<(), Error> {
        self.stores.ledger.ping().await?;
        self.tier.ready()?;
        self.ids.ready()
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

//! How an order gets from a request to the ledger. Each tier is one implementation of [`Tier`].
//!
//! - [`solo`]: the gate is in this process, and the ledger has the order before the buyer is answered
//! - [`redis`]: many nodes, one gate in Redis. With [`Delivery::Commit`] it is the tier `shared`: the ledger has the order before the
//!   buyer is answered
//! - [`queued`]: what makes it the tier `queued`: a queue has the order before the buyer is answered
//! - [`shielded`]: what makes that the tier `shielded`: each node refuses by itself what comes too late or too early

mod per_sale;
mod queued;
mod redis;
mod shielded;
mod solo;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Decision, Gate, Ledger, LedgerError};
use stampede_core::{Clock, Order, OrderId, Refusal, Sale, SaleId, Timestamp, UserId};
use stampede_limit::Counters;
use stampede_lock::Locks;
use stampede_queue::{DeadLetter, DeadLetterId};

use crate::alerts::Alerts;
use crate::auth::CachedSession;
use crate::catalogue_cache::{CacheConfig, Sharing};
use crate::engine::StartError;
use crate::error::Error;
use crate::ledger_breaker::LedgerBreaker;
use crate::reconcile::ReconcileReport;
use crate::recording::CommitOutcome;
use crate::sale_index::SaleIndex;
use crate::sessions::Sessions;
use crate::shared_sessions::SharedSessions;
use crate::without_order::WithoutOrder;

pub(crate) use self::redis::gate_record;
pub use self::redis::{ReconcileConfig, RedisTierConfig};
pub(crate) use queued::outcomes::OrderWait;
pub use queued::{AnswerAfter, QueueConfig, QueuedConfig, RabbitMqConfig, StreamConfig, Transport};
pub use shielded::ShieldConfig;
pub use solo::SoloConfig;

/// Which tier, and its settings.
#[derive(Debug, Clone)]
pub enum TierConfig {
    Solo(SoloConfig),
    Shared(RedisTierConfig),
    Queued(QueuedConfig),
}

impl TierConfig {
    /// The tier's name in settings, and in the ledger.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Solo(_) => "solo",
            Self::Shared(_) => "shared",
            Self::Queued(QueuedConfig { shield: None, .. }) => "queued",
            Self::Queued(_) => "shielded",
        }
    }

    /// The tiers after which this one must not be started. The gate in memory is loaded from the ledger, so accepted orders that are not
    /// recorded yet would be lost. A gate in Redis records what it holds when it is rebuilt.
    pub(crate) const fn not_after(&self) -> &'static [&'static str] {
        match self {
            Self::Solo(SoloConfig { abandon_queue: false, .. }) => &WITH_QUEUE,
            Self::Solo(_) | Self::Shared(_) | Self::Queued(_) => &[],
        }
    }
}

/// The tiers with a queue outside the ledger.
const WITH_QUEUE: [&str; 2] = ["queued", "shielded"];

/// How the orders of a gate in Redis get to the ledger.
#[derive(Debug, Clone)]
enum Delivery {
    /// The node that admitted them records them, before it answers the buyers.
    Commit,
    /// Consumers read them from the outbox.
    Stream(QueueConfig, StreamConfig),
    /// The node that admitted them publishes them to RabbitMQ, from which consumers get them.
    RabbitMq(QueueConfig, Box<RabbitMqConfig>),
}

impl Delivery {
    /// The queue, if there is one.
    const fn queue(&self) -> Option<&QueueConfig> {
        match self {
            Self::Commit => None,
            Self::Stream(queue, _) | Self::RabbitMq(queue, _) => Some(queue),
        }
    }
}

/// What a tier shares with the rest of the engine.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) clock: Arc<dyn Clock>,
    /// The name under which this process holds its worker number.
    pub(crate) holder: String,
    pub(crate) sale_index: Arc<SaleIndex>,
    pub(crate) sessions: Arc<Sessions<CachedSession>>,
    /// Whether other processes may write to the same ledger. Kept up to date by the tier.
    pub(crate) has_others: Arc<AtomicBool>,
    pub(crate) alerts: Arc<Alerts>,
    /// The locks of scheduled work; `None` in tiers without Redis.
    pub(crate) locks: Option<Locks>,
    pub(crate) ledger_breaker: Arc<LedgerBreaker>,
    /// Who has no order in sales that have left the gate.
    pub(crate) without_order: Arc<WithoutOrder>,
}

/// The time of an order of which only the mark is known: now, but inside of the sale's window, because it was admitted there.
fn time_of_mark(sale: Option<&Sale>, now: Timestamp) -> Timestamp {
    sale.map_or(now, |sale| now.min(sale.window.end.minus(Duration::from_millis(1))).max(sale.window.begin))
}

/// The answer of [`Tier::admit`].
#[derive(Debug)]
pub(crate) enum AdmitOutcome {
    /// The gate admitted the order, and the ledger was asked to record it.
    Admitted {
        decision: Decision,
        outcome: CommitOutcome,
    },
    /// The gate admitted the order, and it is safe in the queue.
    Accepted,
    /// The gate admitted the order, and this is its row in the ledger.
    Recorded(Order),
    /// The buyer holds a mark for this order. The gate was asked at `asked_at`.
    AlreadyHas {
        order: OrderId,
        decision: Decision,
        asked_at: Instant,
    },
    Refused(Refusal),
}

/// The answer of [`Tier::roll_forward`].
#[derive(Debug)]
pub(crate) enum RollForwardOutcome {
    /// The ledger was asked to record the order.
    Submitted(CommitOutcome),
    /// The order is safe in the queue.
    Accepted,
    /// The order's row in the ledger.
    Recorded(Order),
}

#[async_trait]
pub(crate) trait Tier: Send + Sync + fmt::Debug {
    /// Decides on one request to buy. An order that is admitted reaches the ledger even if the caller goes away.
    async fn admit(&self, sale: SaleId, request: AdmitRequest) -> Result<AdmitOutcome, Error>;

    /// Sees to it that an order is recorded that has a mark and no row, because it is on its way or its caller went away. The gate was
    /// asked for the mark at `asked_at`.
    async fn roll_forward(
        &self,
        sale: SaleId,
        held: AdmitRequest,
        decision: Decision,
        asked_at: Instant,
    ) -> Result<RollForwardOutcome, Error>;

    /// The order of this user that is on its way to the ledger, in tiers with a queue.
    async fn pending_order(&self, sale: SaleId, user: UserId) -> Result<Option<OrderId>, Error>;

    /// Waits for an order that will be on its way to the ledger, or looks at its row; `None` in tiers without a queue.
    fn wait_for_order(&self, sale: SaleId, order: OrderId) -> Result<Option<OrderWait>, Error>;

    /// Finds a sale that another process has created, puts it into the sale index, and lets requests for it through to the gate if it is
    /// open there.
    async fn discover(&self, sale: SaleId) -> Result<Option<Sale>, LedgerError>;

    /// Whether this process has every sale that was created at this time, so that the ledger need not be asked for one it does not have.
    fn has_sales_of(&self, created_at: Timestamp) -> bool;

    /// Opens a sale that this process has just created in the ledger.
    async fn open_created(&self, sale: SaleId) -> Result<Option<Sale>, Error>;

    /// Sessions that all nodes share, in tiers with Redis.
    fn shared_sessions(&self) -> Option<Arc<SharedSessions>>;

    /// The gate of all sales.
    fn gate(&self) -> &dyn Gate;

    /// Why this node may refuse the user without asking the gate; `None` if the gate must be asked.
    fn local_refusal(&self, sale: SaleId, user: UserId) -> Option<Refusal>;

    /// The time by which the gate decides, within the difference that is allowed between its clock and the ledger's.
    async fn gate_time(&self) -> Result<Timestamp, Error>;

    /// What is left of a sale, as far as this process knows; `None` if the gate has no such sale.
    fn remaining(&self, sale: SaleId) -> Option<u32>;

    /// Whether the gate knows every live order. If it does not, a buyer who is refused may have an order in the ledger.
    fn is_authoritative(&self) -> bool;

    /// An error if requests to buy would be refused because of the gate, whatever they ask for. Answers at once.
    fn can_admit(&self) -> Result<(), Error>;

    /// Whether requests to buy can be served, as far as the gate is concerned.
    fn ready(&self) -> Result<(), Error>;

    /// Whether requests to buy are served while the ledger cannot be used, as far as gate and queue are concerned.
    fn accepts_without_ledger(&self) -> bool;

    /// How many requests wait for the gate or the ledger.
    fn waiting(&self) -> usize;

    /// Compares the gate with the ledger and repairs what differs; a dry run repairs nothing.
    async fn reconcile(self: Arc<Self>, dry_run: bool) -> Result<ReconcileReport, Error>;

    /// How many messages wait in the queue; `None` in tiers whose queue, if they have one, is the outbox.
    async fn queue_depth(&self) -> Result<Option<u64>, Error>;

    /// The oldest messages of the queue that could not be read.
    async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, Error>;

    /// Removes a dead letter, after putting it into the queue again if `retry`. Returns whether there was one.
    async fn remove_dead_letter(&self, id: DeadLetterId, retry: bool) -> Result<bool, Error>;

    /// Rebuilds the gate from the ledger. Returns how many sales stay closed, because the ledger does not allow it now; they follow later.
    async fn rebuild(self: Arc<Self>) -> Result<usize, Error>;

    /// Takes no more orders, and returns when every admitted order has an outcome.
    async fn close(&self);
}

/// What the engine uses beside the gate, and all nodes of a tier share if it has Redis.
#[derive(Debug)]
pub(crate) struct Services {
    /// Where rate limits are counted.
    pub(crate) limit_counters: Counters,
    /// With whom caches are shared.
    pub(crate) cache_sharing: Sharing,
    /// The locks of scheduled work.
    pub(crate) locks: Option<Locks>,
}

pub(crate) async fn connect_services(
    config: &TierConfig,
    cache: &CacheConfig,
    ledger: &dyn Ledger,
) -> Result<Services, StartError> {
    match config {
        TierConfig::Solo(config) => Ok(Services {
            limit_counters: Counters::Local,
            cache_sharing: if config.shared_ledger { Sharing::Ledger } else { Sharing::Exclusive },
            locks: None,
        }),
        TierConfig::Shared(config) => redis::connect(config, cache, ledger).await,
        TierConfig::Queued(config) => redis::connect(&config.redis, cache, ledger).await,
    }
}

/// Rebuilds the tier's gate from the ledger and starts its workers.
pub(crate) async fn start(config: TierConfig, context: Context) -> Result<Arc<dyn Tier>, StartError> {
    match config {
        TierConfig::Solo(config) => Ok(solo::Solo::start(config, context).await?),
        TierConfig::Shared(config) => Ok(redis::RedisTier::start(config, Delivery::Commit, None, context).await?),
        TierConfig::Queued(config) => {
            let QueuedConfig { redis, queue, transport, shield } = config;
            let delivery = match transport {
                Transport::RedisStream(stream) => Delivery::Stream(queue, stream),
                Transport::RabbitMq(rabbitmq) => Delivery::RabbitMq(queue, rabbitmq),
            };
            Ok(redis::RedisTier::start(redis, delivery, shield, context).await?)
        }
    }
}

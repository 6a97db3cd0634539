//! How an order gets from a request to the ledger. Each tier is one implementation of [`Tier`].
//!
//! - [`solo`]: the gate is in this process, and the ledger has the order before the buyer is answered
//! - [`shared`]: many nodes, one gate in Redis, and the ledger has the order before the buyer is answered

mod per_sale;
mod shared;
mod solo;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use async_trait::async_trait;
use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Decision, Gate, Ledger, LedgerError};
use stampede_core::{Clock, OrderId, Refusal, Sale, SaleId};
use stampede_limit::Counters;
use stampede_lock::Locks;

use crate::alerts::Alerts;
use crate::auth::CachedSession;
use crate::catalogue_cache::{CacheConfig, Sharing};
use crate::engine::StartError;
use crate::error::Error;
use crate::reconcile::ReconcileReport;
use crate::recording::CommitOutcome;
use crate::sale_index::SaleIndex;
use crate::sessions::Sessions;
use crate::shared_sessions::SharedSessions;

pub(crate) use shared::gate_record;
pub use shared::{ReconcileConfig, SharedConfig};
pub use solo::SoloConfig;

/// Which tier, and its settings.
#[derive(Debug, Clone)]
pub enum TierConfig {
    Solo(SoloConfig),
    Shared(SharedConfig),
}

impl TierConfig {
    /// The tier's name in settings, and in the ledger.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Solo(_) => "solo",
            Self::Shared(_) => "shared",
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
}

/// The answer of [`Tier::admit`].
#[derive(Debug)]
pub(crate) enum AdmitOutcome {
    /// The gate admitted the order, and the ledger was asked to record it.
    Admitted {
        decision: Decision,
        outcome: CommitOutcome,
    },
    /// The buyer holds a mark for this order.
    AlreadyHas {
        order: OrderId,
        decision: Decision,
    },
    Refused(Refusal),
}

#[async_trait]
pub(crate) trait Tier: Send + Sync + fmt::Debug {
    /// Decides on one request to buy. An order that is admitted reaches the ledger even if the caller goes away.
    async fn admit(&self, sale: SaleId, request: AdmitRequest) -> Result<AdmitOutcome, Error>;

    /// Records an order that has a mark and no row, because it is on its way or its caller went away.
    async fn roll_forward(&self, sale: SaleId, held: AdmitRequest, decision: Decision) -> Result<CommitOutcome, Error>;

    /// Finds a sale that another process has created, puts it into the sale index, and lets requests for it through to the gate if it is
    /// open there.
    async fn discover(&self, sale: SaleId) -> Result<Option<Sale>, LedgerError>;

    /// Opens a sale that this process has just created in the ledger.
    async fn open_created(&self, sale: SaleId) -> Result<Option<Sale>, Error>;

    /// Sessions that all nodes share, in tiers with Redis.
    fn shared_sessions(&self) -> Option<Arc<SharedSessions>>;

    /// The gate of all sales.
    fn gate(&self) -> &dyn Gate;

    /// What is left of a sale, as far as this process knows; `None` if the gate has no such sale.
    fn remaining(&self, sale: SaleId) -> Option<u32>;

    /// Whether the gate knows every live order. If it does not, a buyer who is refused may have an order in the ledger.
    fn is_authoritative(&self) -> bool;

    /// Whether requests to buy can be served, as far as the gate is concerned.
    fn ready(&self) -> Result<(), Error>;

    /// How many requests wait for the gate or the ledger.
    fn waiting(&self) -> usize;

    /// Compares the gate with the ledger and repairs what differs; a dry run repairs nothing.
    async fn reconcile(self: Arc<Self>, dry_run: bool) -> Result<ReconcileReport, Error>;

    /// Rebuilds the gate from the ledger.
    async fn rebuild(self: Arc<Self>) -> Result<(), Error>;

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
        TierConfig::Shared(config) => shared::services(config, cache, ledger).await,
    }
}

/// Rebuilds the tier's gate from the ledger and starts its workers.
pub(crate) async fn start(config: TierConfig, context: Context) -> Result<Arc<dyn Tier>, StartError> {
    match config {
        TierConfig::Solo(config) => Ok(solo::Solo::start(config, context).await?),
        TierConfig::Shared(config) => Ok(shared::Shared::start(config, context).await?),
    }
}

//! Starts a tier, holds its parts, and settles everything at shutdown.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::RngExt as _;
use stampede_core::ids::{IdMaker as _, NotAnId, Snowflake};
use stampede_core::ports::LedgerError;
use stampede_core::ports::Stores;
use stampede_core::{Clock, Code, Refusal, Sale, SaleId, Timestamp, UserId, failpoint};
use stampede_gate::MemoryGate;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::auth::{Auth, AuthConfig};
use crate::catalogue_cache::CatalogueCache;
use crate::error::Error;
use crate::login::Sender;
use crate::sales::SaleIndex;
use crate::solo::{Bought, Solo, SoloConfig};
use crate::workers;

#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Other processes may sell from the same ledger.
    pub shared_ledger: bool,
    pub solo: SoloConfig,
    pub auth: AuthConfig,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot start: the ledger failed")]
    Ledger(#[from] LedgerError),
    #[error("cannot start: the session key in the ledger has {0} bytes, not 32")]
    Key(usize),
}

/// How long after its end a sale's marks stay in memory.
pub(crate) const KEPT_AFTER_END: Duration = Duration::from_secs(24 * 3600);

pub(crate) fn is_long_over(sale: &Sale, now: Timestamp) -> bool {
    sale.window.end.plus(KEPT_AFTER_END) <= now
}

/// A tier, ready to sell.
#[derive(Debug)]
pub struct Engine {
    pub(crate) stores: Stores,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) gate: Arc<MemoryGate>,
    pub(crate) sale_index: SaleIndex,
    pub(crate) catalogue_cache: CatalogueCache,
    pub(crate) auth: Auth,
    pub(crate) pending_releases: Arc<Notify>,
    pub(crate) solo: Solo,
    pub(crate) ids: Arc<Snowflake>,
    pub(crate) holder: String,
    /// Others sell from the same ledger, as far as we know.
    pub(crate) has_others: AtomicBool,
    workers: Mutex<JoinSet<()>>,
}

impl Engine {
    /// Leases a worker number, rebuilds the gate from the ledger, and starts the workers.
    pub async fn start(
        config: Config,
        stores: Stores,
        clock: Arc<dyn Clock>,
        sender: Option<Arc<dyn Sender>>,
    ) -> Result<Arc<Self>, StartError> {
        let holder = format!("{:032x}", rand::rng().random::<u128>());
        let ledger = stores.ledger.clone();
        let lease = workers::lease::first(ledger.as_ref(), &holder).await?;
        let ids = Arc::new(Snowflake::new(clock.clone(), lease));
        let has_others = config.shared_ledger && ledger.has_other_workers(&holder).await?;
        if has_others {
            // They look for others once a second. Only when they know of us may we sell something that they do not know of.
            tokio::time::sleep(workers::watch::LOOK_EVERY * 2).await;
        }
        let has_others = AtomicBool::new(has_others);

        let (gate, sale_index) = (Arc::new(MemoryGate::new()), SaleIndex::default());
        for sale in ledger.sales(None).await? {
            // Read again together with its orders, so that both are of one moment.
            if !is_long_over(&sale, clock.now())
                && let Some(loaded) = ledger.load(sale.id).await?
            {
                gate.open(loaded);
            }
            sale_index.put(sale);
        }
        // The gate was just built from live orders: it owes nothing any more.
        workers::pending_releases::settle(ledger.as_ref(), &gate).await?;

        let key = stores.accounts.secret("session_key", &rand::rng().random::<[u8; 32]>()).await?;
        let key: [u8; 32] = key.try_into().map_err(|key: Vec<u8>| StartError::Key(key.len()))?;
        let (auth, touched) = Auth::new(config.auth, stores.accounts.clone(), clock.clone(), key, sender);

        let pending_releases = Arc::new(Notify::new());
        let mut workers = JoinSet::new();
        workers.spawn(workers::lease::run(ledger.clone(), ids.clone(), holder.clone()));
        workers.spawn(workers::pending_releases::run(ledger.clone(), gate.clone(), pending_releases.clone()));
        workers.spawn(workers::sessions::run(stores.accounts.clone(), clock.clone(), auth.sessions(), touched));

        if failpoint::planted("reconcile-count") {
            workers.spawn(workers::planted::run(ledger.clone(), gate.clone()));
        }

        workers.spawn(workers::index::run(ledger.clone(), clock.clone()));

        let catalogue_cache = CatalogueCache::new(stores.catalogue.clone(), config.shared_ledger);
        let solo = Solo::new(config.solo, ledger, gate.clone(), clock.clone(), ids.clone());
        let workers = Mutex::new(workers);
        let engine = Arc::new(Self {
            stores,
            clock,
            gate,
            sale_index,
            catalogue_cache,
            auth,
            pending_releases,
            solo,
            ids,
            holder,
            has_others,
            workers,
        });
        let watch = workers::watch::run(Arc::downgrade(&engine), config.shared_ledger);
        engine.workers.lock().unwrap_or_else(PoisonError::into_inner).spawn(watch);
        Ok(engine)
    }

    /// Sales that ended after this are kept in memory with their marks.
    pub(crate) fn kept_since(&self) -> Timestamp {
        self.clock.now().minus(KEPT_AFTER_END)
    }

    /// So long over that its marks are no longer kept in memory.
    pub(crate) fn is_long_over(&self, sale: &Sale) -> bool {
        is_long_over(sale, self.clock.now())
    }

    pub fn clock(&self) -> &dyn Clock {
        self.clock.as_ref()
    }

    /// One for this user, or the one they have.
    pub async fn buy(&self, sale: SaleId, user: UserId) -> Result<Bought, Error> {
        let mut bought = self.solo.buy(sale, user).await;
        if matches!(bought, Err(Error::Refused(Refusal::NoSuchSale))) && self.any_sale(sale).is_err() {
            // Another process may have made it a moment ago.
            let looking = tokio::time::timeout(self.solo.answer_timeout(), self.made_elsewhere(sale));
            if looking.await.map_err(|_| Error::Plain(Code::Unavailable))??.is_some() {
                bought = self.solo.buy(sale, user).await;
            }
        }
        let refusal = match bought {
            // Not at the gate, but on the shelf: long over.
            Err(Error::Refused(Refusal::NoSuchSale))
                if self.any_sale(sale).is_ok_and(|view| view.state.is_some() && self.is_long_over(&view.sale)) =>
            {
                Refusal::Ended
            }
            // Alone, our gate knows of every order; with others about, one may have been made a moment ago.
            Err(Error::Refused(refusal @ (Refusal::SoldOut | Refusal::Ended | Refusal::Paused)))
                if self.has_others.load(Ordering::Relaxed) =>
            {
                refusal
            }
            bought => return bought,
        };
        // Who has an order gets it back, whatever else is true.
        let looking = tokio::time::timeout(self.solo.answer_timeout(), self.stores.ledger.live_order(sale, user));
        match looking.await.map_err(|_| Error::OutcomeUnknown)?? {
            Some(order) => Ok(Bought { order, already: true }),
            None => Err(Error::Refused(refusal)),
        }
    }

    /// How many admitted orders wait for the ledger.
    pub fn waiting(&self) -> usize {
        self.solo.waiting()
    }

    /// Can it do its work? If not, what is wrong.
    pub async fn ready(&self) -> Result<(), Error> {
        Ok(self.stores.ledger.ping().await?)
    }

    pub(crate) fn next_id<T>(&self, of: impl FnOnce(i64) -> Result<T, NotAnId>) -> Result<T, Error> {
        of(self.ids.next()?).map_err(|_| Error::Plain(Code::Internal))
    }

    /// Settles what was admitted and gives the worker number back. To be called when no request is under way any more.
    /// `false` if that took longer than `patience`; what is left then is settled by the rebuild at the next start.
    pub async fn shut_down(&self, patience: Duration) -> bool {
        let settling = async {
            self.solo.close().await;
            self.workers.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
            let returned =
                self.stores.ledger.return_worker(&self.holder, self.ids.worker(), self.ids.unused_from()).await;
            self.stores.ledger.close().await;
            returned
        };
        match tokio::time::timeout(patience, settling).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::warn!(error = crate::commit::describe(&error), "could not return the worker number");
                true
            }
            Err(_) => false,
        }
    }
}

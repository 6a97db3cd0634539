//! The caches of shops, vouchers and sales that visitors read, so that their requests do not reach the database.
//!
//! Values are in the process and, in tiers with Redis, in Redis as well, which all nodes share: a node that starts finds there what the
//! others have loaded, and a change on one node is announced to all of them. There, a filter of the ids that exist answers requests for
//! ids that do not.
//!
//! All sales are in the sale index, which is kept up to date; only those that another process has just created are read through a cache.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_cache::{Builder, Cache, CacheKey, CacheValue, Error as CacheError, Filter, FilterConfig, Remote, Stats};
use stampede_core::ports::{Catalogue, LedgerError, Stores};
use stampede_core::{Code, Sale, SaleId, Shop, ShopId, ShopType, Timestamp, Voucher};

use crate::error::{Error, describe};

/// The most concurrent queries to the database, of each kind.
const MAX_LOADS: usize = 16;
/// The most shops that are loaded at the start.
const MAX_WARM: u32 = 1000;
/// Ids in a page of the filter's source.
const PAGE: u32 = 10_000;

/// The key of the only list of types.
const ALL_TYPES: u8 = 0;

type LedgerCache<K, V> = Cache<K, V, LedgerError>;

/// The settings of the caches.
#[derive(Debug, Clone, Copy)]
pub struct CacheConfig {
    /// When a value expires.
    pub ttl: Duration,
    /// When a shop or a sale is loaded again in the background. Meanwhile the old value is used.
    pub refresh_after: Duration,
    /// How long the absence of a row is cached.
    pub empty_ttl: Duration,
    /// How long a process uses a value that another one may have changed, if the message about the change is lost.
    pub local_ttl: Duration,
    /// The fraction by which these times are randomly shortened.
    pub jitter: f64,
    /// The most values of each kind in the process.
    pub max_entries: u64,
    /// How often the filter is rebuilt.
    pub filter_rebuild_interval: Duration,
    /// How long Redis may take to answer, before the ledger is asked.
    pub redis_timeout: Duration,
}

/// Which other processes may change what is cached.
#[derive(Debug, Clone)]
pub(crate) enum Sharing {
    Exclusive,
    /// Others use the same ledger and do not announce their changes.
    Ledger,
    /// All share this Redis.
    Redis(Remote),
}

/// A cache of rows by id, with a filter of the ids that exist where all nodes share one.
#[derive(Debug, Clone)]
pub(crate) struct RowCache<K: CacheKey, V: CacheValue> {
    cache: LedgerCache<K, V>,
    filter: Option<Filter<K>>,
}

impl<K: CacheKey + fmt::Debug, V: CacheValue> RowCache<K, V> {
    fn new(settings: Builder, filter: Option<Filter<K>>) -> Self {
        let cache = match filter.clone() {
            Some(filter) => settings.build_filtered(filter),
            None => settings.build(),
        };
        Self { cache, filter }
    }

    /// The row, if it exists.
    pub(crate) async fn get<F>(
        &self,
        id: &K,
        load: impl FnOnce() -> F + Send + 'static,
    ) -> Result<Option<Arc<V>>, Error>
    where
        F: Future<Output = Result<Option<V>, LedgerError>> + Send + 'static,
    {
        Ok(self.cache.get_or_load(id, load).await?)
    }

    /// Changes a row.
    pub(crate) async fn update<T: Send + 'static>(
        &self,
        id: &K,
        change: impl Future<Output = Result<T, LedgerError>> + Send + 'static,
    ) -> Result<T, Error> {
        Ok(Box::pin(self.cache.update(id, change)).await?)
    }

    /// Creates a row. Its id is announced to the filter first, so that no node rules it out.
    pub(crate) async fn create<T: Send + 'static>(
        &self,
        id: &K,
        insert: impl Future<Output = Result<T, LedgerError>> + Send + 'static,
    ) -> Result<T, Error> {
        let Some(filter) = self.filter.clone() else { return self.update(id, insert).await };
        // On the heap, because it is large and rare.
        if Box::pin(filter.announce(id)).await.is_err() {
            tracing::warn!(?id, "nothing was created, because the new id cannot be announced in Redis");
            return Err(Error::Plain(Code::Unavailable));
        }
        let (announced_at, announced_id) = (Instant::now(), id.clone());
        let inserting = async move {
            let inserted = insert.await;
            // A filter that was built meanwhile may have read the ids before this one was inserted.
            if announced_at.elapsed() > FilterConfig::default().max_create_delay / 2
                && Box::pin(filter.announce(&announced_id)).await.is_err()
            {
                tracing::warn!(id = ?announced_id, "a new row may be hidden until the filter is rebuilt");
            }
            inserted
        };
        self.update(id, inserting).await
    }
}

#[derive(Debug, Clone)]
pub(crate) struct CatalogueCache {
    catalogue: Arc<dyn Catalogue>,
    types: LedgerCache<u8, Vec<ShopType>>,
    pub(crate) shops: RowCache<ShopId, Shop>,
    pub(crate) vouchers: RowCache<ShopId, Vec<Voucher>>,
    /// Sales that another process has created and this one does not have yet. `None` where there are no other processes.
    pub(crate) sales: Option<RowCache<SaleId, Sale>>,
}

impl CatalogueCache {
    pub(crate) fn new(stores: &Stores, config: CacheConfig, sharing: &Sharing) -> Self {
        let ttl = match sharing {
            Sharing::Exclusive | Sharing::Redis(_) => config.ttl,
            Sharing::Ledger => config.local_ttl.min(config.ttl),
        };
        let settings = |name: &str| {
            let settings = Builder::new(name)
                .expire_after(ttl)
                .expire_empty_after(config.empty_ttl.min(ttl))
                .local(config.max_entries, config.local_ttl)
                .jitter(config.jitter)
                .max_concurrent_loads(MAX_LOADS);
            match sharing {
                Sharing::Redis(remote) => settings.remote(remote.clone()),
                Sharing::Exclusive | Sharing::Ledger => settings,
            }
        };
        let refreshed = |name: &str| settings(name).refresh_after(config.refresh_after);
        let (mut shop_filter, mut sale_filter) = (None, None);
        if let Sharing::Redis(remote) = sharing {
            let filter = FilterConfig { rebuild_interval: config.filter_rebuild_interval, ..FilterConfig::default() };
            let catalogue = stores.catalogue.clone();
            shop_filter = Some(Filter::shared(remote, "shops", filter, move |after| {
                let catalogue = catalogue.clone();
                async move { catalogue.shop_ids(after, PAGE).await }
            }));
            let ledger = stores.ledger.clone();
            sale_filter = Some(Filter::shared(remote, "sales", filter, move |after| {
                let ledger = ledger.clone();
                async move { ledger.sale_ids(after, PAGE).await }
            }));
        }
        let has_others = !matches!(sharing, Sharing::Exclusive);
        Self {
            catalogue: stores.catalogue.clone(),
            types: settings("shop_types").build(),
            shops: RowCache::new(refreshed("shops"), shop_filter),
            vouchers: RowCache::new(settings("vouchers"), None),
            sales: has_others.then(|| RowCache::new(refreshed("sales"), sale_filter)),
        }
    }

    pub(crate) async fn types(&self) -> Result<Arc<Vec<ShopType>>, Error> {
        let catalogue = self.catalogue.clone();
        let types = self.types.get_or_load(&ALL_TYPES, async move || catalogue.shop_types().await.map(Some)).await?;
        Ok(types.unwrap_or_default())
    }

    pub(crate) async fn shop(&self, id: ShopId) -> Result<Arc<Shop>, Error> {
        let catalogue = self.catalogue.clone();
        let shop = self.shops.get(&id, async move || catalogue.shop(id).await).await?;
        shop.ok_or(Error::Plain(Code::NoSuchShop))
    }

    pub(crate) async fn vouchers_of(&self, shop: ShopId) -> Result<Arc<Vec<Voucher>>, Error> {
        self.shop(shop).await?;
        let catalogue = self.catalogue.clone();
        let load = async move || catalogue.vouchers_of(shop).await.map(Some);
        Ok(self.vouchers.get(&shop, load).await?.unwrap_or_default())
    }

    /// Loads what visitors will ask for first: the shops with sales that are not over, and their vouchers.
    pub(crate) async fn warm(self, now: Timestamp) {
        let warmed = async {
            self.types().await?;
            let shops = self.catalogue.shops_with_sales(now, MAX_WARM).await?;
            let catalogue = self.catalogue.clone();
            let load_shop = move |id| {
                let catalogue = catalogue.clone();
                async move { catalogue.shop(id).await }
            };
            self.shops.cache.warm(shops.iter().copied(), load_shop).await?;
            let catalogue = self.catalogue.clone();
            let load_vouchers = move |shop| {
                let catalogue = catalogue.clone();
                async move { catalogue.vouchers_of(shop).await.map(Some) }
            };
            self.vouchers.cache.warm(shops, load_vouchers).await?;
            Ok::<_, Error>(())
        };
        if let Err(error) = warmed.await {
            tracing::warn!(error = describe(&error), "not everything was loaded ahead of the first requests");
        }
    }

    /// Waits until values that are being loaded are stored in Redis.
    pub(crate) async fn drain(&self) {
        self.types.drain().await;
        self.shops.cache.drain().await;
        self.vouchers.cache.drain().await;
        if let Some(sales) = &self.sales {
            sales.cache.drain().await;
        }
    }

    /// The statistics of each cache.
    pub(crate) fn stats(&self) -> impl Iterator<Item = (&str, Stats)> {
        let Self { types, shops, vouchers, sales, .. } = self;
        let (shops, vouchers) = (&shops.cache, &vouchers.cache);
        let catalogue =
            [(types.name(), types.stats()), (shops.name(), shops.stats()), (vouchers.name(), vouchers.stats())];
        catalogue.into_iter().chain(sales.as_ref().map(|sales| (sales.cache.name(), sales.cache.stats())))
    }
}

impl From<CacheError<LedgerError>> for Error {
    fn from(error: CacheError<LedgerError>) -> Self {
        match error {
            // Several requests may share this error; each gets its own of the same kind.
            CacheError::Source(error) => match Arc::try_unwrap(error) {
                Ok(error) => Self::Ledger(error),
                Err(shared) => {
                    tracing::warn!(error = %shared, "the ledger failed for several requests");
                    Self::Plain(match &*shared {
                        LedgerError::Poison(_) => Code::Internal,
                        _ => Code::Unavailable,
                    })
                }
            },
            CacheError::Timeout => Self::Plain(Code::Unavailable),
            _ => Self::Plain(Code::Internal),
        }
    }
}

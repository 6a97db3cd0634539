//! The cache of shops, vouchers and sales that visitors read, so that their requests do not reach the database.
//!
//! All sales are in the sale index; those that another process has just created are read through this cache. Where no other
//! process writes, a change is visible at once; where others do, within [`TTL_SHARED`].

use std::sync::Arc;
use std::time::Duration;

use stampede_cache::{Builder, Cache, Error as CacheError, Stats};
use stampede_core::ports::{Catalogue, LedgerError};
use stampede_core::{Code, Sale, SaleId, Shop, ShopId, ShopType, Voucher};

use crate::error::Error;

/// The longest time until a change by another process is visible.
const TTL_SHARED: Duration = Duration::from_secs(1);
const TTL_EXCLUSIVE: Duration = Duration::from_secs(60);
/// How long the absence of a shop is cached.
const TTL_EMPTY: Duration = Duration::from_secs(5);
/// The most shops in the cache, with their vouchers.
const MAX_SHOPS: u64 = 10_000;
/// The most concurrent queries to the database, of each kind.
const MAX_LOADS: usize = 16;

/// The key of the only list of types.
const ALL_TYPES: u8 = 0;

type LedgerCache<K, V> = Cache<K, V, LedgerError>;

#[derive(Debug)]
pub(crate) struct CatalogueCache {
    catalogue: Arc<dyn Catalogue>,
    types: LedgerCache<u8, Vec<ShopType>>,
    pub(crate) shops: LedgerCache<ShopId, Shop>,
    pub(crate) vouchers: LedgerCache<ShopId, Vec<Voucher>>,
    /// Sales that another process has created and this one does not have yet. `None` where there are no other processes.
    pub(crate) sales: Option<LedgerCache<SaleId, Sale>>,
}

impl CatalogueCache {
    pub(crate) fn new(catalogue: Arc<dyn Catalogue>, is_shared: bool) -> Self {
        let time = if is_shared { TTL_SHARED } else { TTL_EXCLUSIVE };
        let settings = |name: &str| {
            Builder::new(name)
                .expire_after(time)
                .expire_empty_after(TTL_EMPTY.min(time))
                .local(MAX_SHOPS, time)
                .max_concurrent_loads(MAX_LOADS)
        };
        let (types, shops) = (settings("shop_types").build(), settings("shops").build());
        let (vouchers, sales) = (settings("vouchers").build(), is_shared.then(|| settings("sales").build()));
        Self { catalogue, types, shops, vouchers, sales }
    }

    pub(crate) async fn types(&self) -> Result<Arc<Vec<ShopType>>, Error> {
        let catalogue = self.catalogue.clone();
        let types = self.types.get_or_load(&ALL_TYPES, async move || catalogue.shop_types().await.map(Some)).await?;
        Ok(types.unwrap_or_default())
    }

    pub(crate) async fn shop(&self, id: ShopId) -> Result<Arc<Shop>, Error> {
        let catalogue = self.catalogue.clone();
        let shop = self.shops.get_or_load(&id, async move || catalogue.shop(id).await).await?;
        shop.ok_or(Error::Plain(Code::NoSuchShop))
    }

    pub(crate) async fn vouchers_of(&self, shop: ShopId) -> Result<Arc<Vec<Voucher>>, Error> {
        self.shop(shop).await?;
        let catalogue = self.catalogue.clone();
        let load = async move || catalogue.vouchers_of(shop).await.map(Some);
        Ok(self.vouchers.get_or_load(&shop, load).await?.unwrap_or_default())
    }

    /// The statistics of each cache.
    pub(crate) fn stats(&self) -> impl Iterator<Item = (&str, Stats)> {
        let Self { types, shops, vouchers, sales, .. } = self;
        let catalogue =
            [(types.name(), types.stats()), (shops.name(), shops.stats()), (vouchers.name(), vouchers.stats())];
        catalogue.into_iter().chain(sales.as_ref().map(|sales| (sales.name(), sales.stats())))
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

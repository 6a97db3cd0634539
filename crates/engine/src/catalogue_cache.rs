//! What visitors read of shops, vouchers and sales, kept so that a crowd does not reach the database.
//!
//! The sales of this process are all in memory (see [`crate::sales`]); those that another process has just
//! made are read through here.
//!
//! In `solo` it is kept in the process alone. Where no other process writes, a change is seen at once; where others do, within
//! [`AMONG_OTHERS`].

use std::sync::Arc;
use std::time::Duration;

use stampede_cache::{Builder, Cache, Error as CacheError, Stats};
use stampede_core::ports::{Catalogue, LedgerError};
use stampede_core::{Code, Sale, SaleId, Shop, ShopId, ShopType, Voucher};

use crate::error::Error;

/// How old something may be that another process has changed.
const AMONG_OTHERS: Duration = Duration::from_secs(1);
const ALONE: Duration = Duration::from_secs(60);
/// How long it is remembered that there is no such shop.
const EMPTY: Duration = Duration::from_secs(5);
/// How many shops are kept, with their vouchers.
const MOST: u64 = 10_000;
/// How many questions to the database may be under way at once, of each kind.
const AT_ONCE: usize = 16;

/// There is one list of types.
const ALL_TYPES: u8 = 0;

type Kept<K, V> = Cache<K, V, LedgerError>;

#[derive(Debug)]
pub(crate) struct CatalogueCache {
    catalogue: Arc<dyn Catalogue>,
    types: Kept<u8, Vec<ShopType>>,
    pub(crate) shops: Kept<ShopId, Shop>,
    pub(crate) vouchers: Kept<ShopId, Vec<Voucher>>,
    /// Those that another process has made, and this one has not heard of yet. `None` where there are no others.
    pub(crate) sales: Option<Kept<SaleId, Sale>>,
}

impl CatalogueCache {
    pub(crate) fn new(catalogue: Arc<dyn Catalogue>, among_others: bool) -> Self {
        let time = if among_others { AMONG_OTHERS } else { ALONE };
        let settings = |name: &str| {
            Builder::new(name)
                .expire_after(time)
                .expire_empty_after(EMPTY.min(time))
                .local(MOST, time)
                .max_concurrent_loads(AT_ONCE)
        };
        let (types, shops) = (settings("shop_types").build(), settings("shops").build());
        let (vouchers, sales) = (settings("vouchers").build(), among_others.then(|| settings("sales").build()));
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

    /// What each cache has done so far.
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
            // Several may have waited for this answer; each gets its own error of the same kind.
            CacheError::Source(error) => match Arc::try_unwrap(error) {
                Ok(error) => Self::Ledger(error),
                Err(shared) => {
                    tracing::warn!(error = %shared, "the ledger failed for several at once");
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

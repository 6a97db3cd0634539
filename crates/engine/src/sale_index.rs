//! All sales, in memory, so that requests that show sales do not reach the ledger.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use parking_lot::RwLock;
use stampede_core::{Sale, SaleId};

/// The most sales that one request goes through.
const MAX_SCAN: usize = 1000;

#[derive(Debug, Default)]
pub(crate) struct SaleIndex {
    sales: RwLock<BTreeMap<SaleId, Arc<Sale>>>,
}

impl SaleIndex {
    /// Inserts the sale, unless a newer version of it is there.
    pub(crate) fn put(&self, sale: Sale) {
        let mut sales = self.sales.write();
        let newer = sales.get(&sale.id).is_none_or(|held| held.version <= sale.version);
        if newer {
            sales.insert(sale.id, Arc::new(sale));
        }
    }

    pub(crate) fn get(&self, id: SaleId) -> Option<Arc<Sale>> {
        self.sales.read().get(&id).cloned()
    }

    /// The sales with an id below `before`, newest first, at most [`MAX_SCAN`].
    pub(crate) fn newest(&self, before: Option<SaleId>) -> Vec<Arc<Sale>> {
        let below = (Bound::Unbounded, before.map_or(Bound::Unbounded, Bound::Excluded));
        self.sales.read().range(below).rev().take(MAX_SCAN).map(|(_, sale)| sale.clone()).collect()
    }
}

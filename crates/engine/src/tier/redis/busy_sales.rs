//! The sales on which a task of this process is working, so that one that takes long holds up no other.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use stampede_core::SaleId;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(in crate::tier) struct BusySales {
    sales: Mutex<HashSet<SaleId>>,
    became_idle: Notify,
}

impl BusySales {
    /// Marks the sale as busy until the guard is dropped; `None` if it is already.
    pub(in crate::tier) fn try_enter(self: &Arc<Self>, sale: SaleId) -> Option<BusySale> {
        self.sales.lock().insert(sale).then(|| BusySale { of: self.clone(), sale })
    }

    /// Those of the sales that are not busy.
    pub(in crate::tier) fn idle(&self, sales: Vec<SaleId>) -> Vec<SaleId> {
        let busy = self.sales.lock();
        sales.into_iter().filter(|sale| !busy.contains(sale)).collect()
    }

    /// Returns when a sale has become idle.
    pub(in crate::tier) async fn became_idle(&self) {
        self.became_idle.notified().await;
    }
}

/// Marks a sale as idle when it is dropped, also after a panic.
#[derive(Debug)]
pub(in crate::tier) struct BusySale {
    of: Arc<BusySales>,
    sale: SaleId,
}

impl Drop for BusySale {
    fn drop(&mut self) {
        self.of.sales.lock().remove(&self.sale);
        self.of.became_idle.notify_one();
    }
}

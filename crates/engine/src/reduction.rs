//! The second step of a reduction of stock. The first lowers the ledger's cap; the gate then takes it, but never below its marks; and the
//! ledger's cap and total become what the gate has answered. While the cap is below the total, a reduction is not completed: any process
//! completes it, so that a crash between the steps leaves nothing behind.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use stampede_core::ports::{Ledger, Result};
use stampede_core::{Sale, SaleId, Timestamp, failpoint};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

use crate::error::describe;

/// Reductions that are completed at once: each may wait for a row that another client has locked, and has a connection of the database
/// meanwhile.
const CONCURRENT: usize = 4;

/// Completes reductions in tasks, one for each sale, so that a sale whose row another client has locked holds up no other.
#[derive(Debug)]
pub(crate) struct Reductions {
    tasks: Mutex<HashMap<SaleId, AbortOnDropHandle<()>>>,
    permits: Arc<Semaphore>,
}

impl Default for Reductions {
    fn default() -> Self {
        Self { tasks: Mutex::default(), permits: Arc::new(Semaphore::new(CONCURRENT)) }
    }
}

impl Reductions {
    /// Completes the reduction of a sale by `completing`, unless that is under way. If it fails, the caller finds the sale again.
    pub(crate) fn start(&self, sale: SaleId, completing: impl Future<Output = Result<()>> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        tasks.retain(|_, task| !task.is_finished());
        tasks.entry(sale).or_insert_with(|| {
            let permits = self.permits.clone();
            AbortOnDropHandle::new(tokio::spawn(async move {
                // The semaphore is never closed.
                let _permit = permits.acquire().await;
                if let Err(error) = completing.await {
                    tracing::debug!(%sale, error = describe(&error), "cannot complete a reduction of stock yet");
                }
            }))
        });
    }

    /// Stops all tasks. What they have not completed, another process or the next start completes.
    pub(crate) fn stop(&self) {
        self.tasks.lock().clear();
    }
}

/// Completes the reductions of a sale, if there are any. `cap` is the cap of the gate under the version of `sale`; `None` if the gate does
/// not have the sale: then the ledger decides. Returns the sale as it is afterwards.
pub(crate) async fn complete(ledger: &dyn Ledger, sale: Sale, cap: Option<u32>, now: Timestamp) -> Result<Sale> {
    if sale.cap >= sale.total {
        return Ok(sale);
    }
    failpoint::hit("reduce.gate");
    match ledger.adopt_cap(sale.id, sale.version, cap.unwrap_or(sale.cap), now).await? {
        Some(cap) => {
            tracing::info!(sale = %sale.id, from = sale.total, to = cap, "the stock of a sale was reduced");
            Ok(Sale { cap, total: cap, ..sale })
        }
        // Another edit came between; it completes this one.
        None => Ok(ledger.sale(sale.id).await?.unwrap_or(sale)),
    }
}

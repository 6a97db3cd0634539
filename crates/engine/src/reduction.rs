//! The second step of a reduction of stock. The first lowers the ledger's cap; the gate then takes it, but never below its marks; and the
//! ledger's cap and total become what the gate has answered. While the cap is below the total, a reduction is not completed: any process
//! completes it, so that a crash between the steps leaves nothing behind.

use stampede_core::ports::{Ledger, Result};
use stampede_core::{Sale, Timestamp, failpoint};

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

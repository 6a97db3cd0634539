//! What an operator does with orders that could not be recorded.

use stampede_core::ports::{DiscardOutcome, LedgerError, QuarantinedOrder, RecordOutcome};
use stampede_core::{Code, OrderId, SaleId};

use crate::engine::Engine;
use crate::error::{Error, describe};

impl Engine {
    /// The orders in quarantine, newest first, those below `before`.
    pub async fn quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>, Error> {
        Ok(self.stores.ledger.quarantined(before, limit).await?)
    }

    pub async fn quarantined_order(&self, id: OrderId) -> Result<QuarantinedOrder, Error> {
        self.stores.ledger.quarantined_order(id).await?.ok_or(Error::Plain(Code::NoSuchOrder))
    }

    /// How many orders of a sale are in quarantine, each with a unit of its stock.
    pub async fn quarantined_in(&self, sale: SaleId) -> Result<u64, Error> {
        let sales = self.stores.ledger.quarantined_sales().await?;
        Ok(sales.into_iter().find(|(of, _)| *of == sale).map_or(0, |(_, orders)| orders))
    }

    /// Records the order under the sale's current epoch. If the ledger refuses it now, it is rejected and its mark is released.
    pub async fn retry_quarantined(&self, id: OrderId) -> Result<RecordOutcome, Error> {
        match self.stores.ledger.retry_quarantined(id).await {
            Ok(Some(recorded)) => {
                self.release_added.notify_one();
                Ok(recorded)
            }
            Ok(None) => Err(Error::Plain(Code::NoSuchOrder)),
            Err(LedgerError::Poison(error)) => Err(Error::NotRecordable(describe(&*error))),
            Err(error) => Err(error.into()),
        }
    }

    /// Rejects the order for good. Its mark is released by the worker that does so for all dead orders.
    pub async fn discard_quarantined(&self, id: OrderId) -> Result<(), Error> {
        let discarded = match self.stores.ledger.discard_quarantined(id).await {
            // The database rejects even the `rejected` row.
            Err(LedgerError::Poison(error)) => return Err(Error::NotRecordable(describe(&*error))),
            discarded => discarded?,
        };
        match discarded {
            DiscardOutcome::Done => {
                self.release_added.notify_one();
                Ok(())
            }
            // It was recorded in the meantime and is live.
            DiscardOutcome::AlreadyRecorded => Err(Error::Plain(Code::IllegalStep)),
            DiscardOutcome::NoSuchOrder => Err(Error::Plain(Code::NoSuchOrder)),
        }
    }
}

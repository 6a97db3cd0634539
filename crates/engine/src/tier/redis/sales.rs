//! Brings sales of the ledger into the gate, and what has changed to the other nodes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use stampede_core::ports::{GateError, LedgerError};
use stampede_core::{Sale, SaleId, SalePhase, Timestamp};

use super::super::Context;
use super::RedisTier;
use crate::error::Error;
use crate::reduction;
use crate::retention::is_past_retention;

/// An id is made at most this long before its sale is committed, differences between clocks included. Where they differ by more, a new
/// sale is not found for about a second.
const MAX_CREATION_MS: i64 = 60_000;
/// No clock is this far ahead of the others.
const MAX_ID_AHEAD: Duration = Duration::from_secs(24 * 3600);

impl RedisTier {
    /// Reads a sale from the ledger again. Requests for it go to the gate if it is open there.
    pub(super) async fn refresh(&self, id: SaleId) -> Result<Option<Sale>, LedgerError> {
        let Some(sale) = self.context.ledger.sale(id).await? else { return Ok(None) };
        self.adopt(&sale);
        self.context.sale_index.put(sale.clone());
        Ok(Some(sale))
    }

    /// Whether the ledger does not have a sale of which there are messages: it was restored to an earlier time.
    pub(in crate::tier) async fn is_missing(&self, id: SaleId) -> Result<bool, LedgerError> {
        Ok(self.context.sale_index.get(id).is_none() && self.refresh(id).await?.is_none())
    }

    pub(super) fn adopt(&self, sale: &Sale) {
        if sale.phase == SalePhase::Open && !is_past_retention(sale, self.context.clock.now()) {
            self.gate.adopt(sale);
        }
    }

    /// Completes a reduction of the sale's stock, if there is one. `cap` is the cap of the gate under the version of `sale`.
    pub(super) async fn complete_reduction(&self, sale: &Sale, cap: Option<u32>) -> Result<(), LedgerError> {
        if sale.cap < sale.total {
            let Context { ledger, clock, sale_index, .. } = &self.context;
            sale_index.put(reduction::complete(ledger.as_ref(), sale.clone(), cap, clock.now()).await?);
            self.announce(sale.id).await;
        }
        Ok(())
    }

    /// Completes a reduction of the sale's stock in a task, because another client may have locked the sale's row, which must hold up no
    /// other sale.
    pub(super) fn start_reduction(self: &Arc<Self>, sale: &Sale, cap: Option<u32>) {
        if sale.cap < sale.total {
            let (tier, sale) = (self.clone(), sale.clone());
            self.reductions.start(sale.id, async move { tier.complete_reduction(&sale, cap).await });
        }
    }

    /// Notes that the gate has the edits of the sale up to the version of `sale`.
    pub(super) async fn note_applied_edits(&self, sale: &Sale) -> Result<(), LedgerError> {
        let ledger = &self.context.ledger;
        // The clock that the clock of the gate is compared with.
        let now = ledger.now().await?;
        ledger.note_applied_edits(sale.id, sale.version, now).await
    }

    /// Tells the other nodes that the sale has changed in the ledger. They notice by themselves within a second.
    pub(super) async fn announce(&self, sale: SaleId) {
        if let Err(error) = self.gate.announce(sale).await {
            tracing::debug!(%sale, %error, "cannot tell the other nodes of a change");
        }
    }
}

pub(super) fn has_sales_of(tier: &RedisTier, created_at: Timestamp) -> bool {
    let read_at_ms = tier.sales_read_at_ms.load(Ordering::Relaxed);
    created_at.ms() < read_at_ms.saturating_sub(MAX_CREATION_MS)
        || created_at > tier.context.clock.now().plus(MAX_ID_AHEAD)
}

pub(super) async fn open_created(tier: &RedisTier, id: SaleId) -> Result<Option<Sale>, Error> {
    let incarnation = tier.gate.incarnation();
    let Some(loaded) = tier.context.ledger.load(id).await? else { return Ok(None) };
    let mut sale = loaded.sale.clone();
    if !is_past_retention(&sale, tier.context.clock.now()) {
        tier.gate.open_under(incarnation, loaded).await?;
        if !tier.context.ledger.finish_load(id, sale.epoch, incarnation).await? {
            return Err(GateError::NotOpen.into());
        }
        sale.phase = SalePhase::Open;
        tier.announce(id).await;
    }
    Ok(Some(sale))
}

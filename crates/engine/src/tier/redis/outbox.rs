//! Records and settles entries that were left in the outbox: their node died or is slow, or the ledger or Redis failed. With RabbitMQ they
//! are published instead. Any node does this for any entry: recording is idempotent by order id. The outboxes of sales
//! that are not being bought are not read.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stampede_core::SaleId;
use stampede_gate::redis::{Entry, EntryId};

use super::super::queued::relay;
use super::RedisTier;
use crate::error::Error;

const INTERVAL: Duration = Duration::from_millis(500);
/// An entry that has been in the outbox for this long was left. Measured from when this node first saw it, so that no clocks are compared.
const STALE_AFTER: Duration = Duration::from_secs(2);
/// Entries that are read at once.
const PAGE: usize = 100;

type Seen = HashMap<(SaleId, EntryId), Instant>;

/// Runs until the tier is dropped.
pub(super) async fn run(tier: Weak<RedisTier>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seen = Seen::new();
    loop {
        ticks.tick().await;
        let Some(tier) = tier.upgrade() else { return };
        let mut still_there = Seen::new();
        for sale in tier.gate.sales_with_entries() {
            if let Err(error) = settle_stale(&tier, sale, &seen, &mut still_there).await {
                tracing::debug!(%sale, %error, "cannot read the outbox; trying again");
            }
        }
        seen = still_there;
    }
}

/// Settles the entries of one sale that were left, and notes the others.
async fn settle_stale(tier: &Arc<RedisTier>, sale: SaleId, seen: &Seen, still_there: &mut Seen) -> Result<(), Error> {
    let mut after = None;
    loop {
        let entries = tier.gate.entries(sale, after, PAGE).await?;
        let Some(last) = entries.last() else { return Ok(()) };
        after = Some(last.id);
        let is_last_page = entries.len() < PAGE;
        let now = Instant::now();
        let mut left: Vec<Entry> = Vec::new();
        for entry in entries {
            let first_seen = *still_there
                .entry((sale, entry.id))
                .or_insert_with(|| seen.get(&(sale, entry.id)).copied().unwrap_or(now));
            if now.duration_since(first_seen) >= STALE_AFTER {
                left.push(entry);
            }
        }
        if !left.is_empty() {
            let seller = tier.seller(sale)?;
            if let Some(broker) = &tier.broker {
                relay::publish(broker, &seller, sale, left).await;
            } else {
                tracing::info!(%sale, entries = left.len(), "recording orders that were left in the outbox");
                seller.record_entries(&left, tier.config.max_batch).await;
            }
        }
        if is_last_page {
            return Ok(());
        }
    }
}

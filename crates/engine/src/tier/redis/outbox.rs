//! Records and settles entries that were left in the outbox: their node died or is slow, or the ledger or Redis failed. With RabbitMQ they
//! are published instead. Any node does this for any entry: recording is idempotent by order id. The outboxes of sales
//! that are not being bought are not read. Each outbox is a task of its own: a sale whose orders cannot be recorded now, for example because
//! another client has locked its row, holds up no other.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stampede_core::SaleId;
use stampede_gate::redis::{Entry, EntryId};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::super::queued::relay;
use super::{BusySales, RedisTier};
use crate::error::Error;

const INTERVAL: Duration = Duration::from_millis(500);
/// An entry that has been in the outbox for this long was left. Measured from when this node first saw it, so that no clocks are compared.
const STALE_AFTER: Duration = Duration::from_secs(2);
/// Entries that are read at once.
const PAGE: usize = 100;

/// Outboxes that are read at once.
const CONCURRENT_READS: usize = 16;

/// When the entries of each sale were first seen.
type Seen = HashMap<SaleId, HashMap<EntryId, Instant>>;

/// Runs until the tier is dropped.
pub(super) async fn run(tier: Weak<RedisTier>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (busy, reads) = (Arc::<BusySales>::default(), Arc::new(Semaphore::new(CONCURRENT_READS)));
    let seen = Arc::new(Mutex::new(Seen::new()));
    let mut tasks = JoinSet::new();
    loop {
        ticks.tick().await;
        while tasks.try_join_next().is_some() {}
        let Some(tier) = tier.upgrade() else { return };
        let sales: HashSet<SaleId> = tier.gate.sales_with_entries().into_iter().collect();
        seen.lock().retain(|sale, _| sales.contains(sale));
        for sale in sales {
            let Some(guard) = busy.try_enter(sale) else { continue };
            let (tier, seen, reads) = (tier.clone(), seen.clone(), reads.clone());
            tasks.spawn(async move {
                let before = seen.lock().remove(&sale).unwrap_or_default();
                let mut still_there = HashMap::new();
                if let Err(error) = settle_stale(&tier, sale, &reads, &before, &mut still_there).await {
                    tracing::debug!(%sale, %error, "cannot read the outbox; trying again");
                }
                seen.lock().insert(sale, still_there);
                drop(guard);
            });
        }
    }
}

/// Settles the entries of one sale that were left, and notes the others.
async fn settle_stale(
    tier: &Arc<RedisTier>,
    sale: SaleId,
    reads: &Semaphore,
    before: &HashMap<EntryId, Instant>,
    still_there: &mut HashMap<EntryId, Instant>,
) -> Result<(), Error> {
    let mut after = None;
    loop {
        let entries = {
            // The semaphore is never closed.
            let _permit = reads.acquire().await;
            tier.gate.entries(sale, after, PAGE).await?
        };
        let Some(last) = entries.last() else { return Ok(()) };
        after = Some(last.id);
        let is_last_page = entries.len() < PAGE;
        let now = Instant::now();
        let mut left: Vec<Entry> = Vec::new();
        for entry in entries {
            let first_seen = before.get(&entry.id).copied().unwrap_or(now);
            still_there.insert(entry.id, first_seen);
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

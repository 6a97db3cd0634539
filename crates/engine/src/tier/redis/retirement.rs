//! Removes sales that are long over from Redis.
//!
//! A sale that is open on this node is removed by the first round of the recovery after its time ([`retire`]). The keys of others may be
//! left: no node ran at that time, the gate was rebuilt then, or another program had written to them. Each node looks for them after its start and every hour ([`run`]). What
//! is left in the outbox of such a sale is recorded before its keys are deleted. Several nodes may do this at once: recording is
//! idempotent by order id, and the script that deletes the keys requires an empty outbox.

use std::sync::{Arc, Weak};
use std::time::Duration;

use stampede_core::ports::GateError;
use stampede_core::{Sale, SaleId, Timestamp};
use stampede_gate::redis::EntryId;
use stampede_redis::{Backoff, jitter};

use super::recovery::NotReady;
use super::{RedisTier, rebuild};
use crate::retention::is_past_retention;

/// How often a node looks for keys that were left.
const INTERVAL: Duration = Duration::from_secs(3600);
/// The pause before the first time. It doubles while this fails, for example because the gate is being rebuilt.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Sales whose keys are looked for with one command.
const SALES: usize = 200;
/// Entries of an outbox that are settled at once.
const PAGE: usize = 100;

/// Removes the sales that are open on this node and long over.
pub(super) async fn retire(tier: &RedisTier, now: Timestamp) -> Result<(), NotReady> {
    for id in tier.gate.sales() {
        if !tier.context.sale_index.get(id).is_some_and(|sale| is_past_retention(&sale, now)) {
            continue;
        }
        match tier.gate.remove(id).await {
            Ok(true) => close_queue(tier, id),
            Ok(false) => {}
            Err(GateError::Damaged) => {
                // Otherwise this would fail in every round, and no sale would be followed. `run` closes the sale and deletes its keys.
                tracing::warn!(sale = %id, "the keys of a sale that is long over are damaged; they are deleted later");
                tier.gate.forget(id);
                close_queue(tier, id);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Runs until the tier is dropped.
pub(super) async fn run(tier: Weak<RedisTier>) {
    let mut retries = Backoff::new(FIRST_PAUSE, INTERVAL);
    let mut pause = retries.advance();
    loop {
        tokio::time::sleep(jitter(pause)).await;
        let Some(tier) = tier.upgrade() else { return };
        pause = match remove_left(&tier).await {
            Ok(()) => {
                retries.reset();
                INTERVAL
            }
            Err(reason) => {
                let cause = reason.cause();
                tracing::debug!(%reason, cause, "cannot remove sales that are long over; trying again");
                retries.advance()
            }
        };
    }
}

/// Removes the sales that are long over and not open on this node. One that cannot be removed now holds up no other.
async fn remove_left(tier: &Arc<RedisTier>) -> Result<(), NotReady> {
    let not_ready = tier.not_ready.lock().clone();
    if let Some(reason) = not_ready {
        return Err(reason);
    }
    // Closing a sale that is on would interrupt it, so the clock of the database counts as well: one that is ahead does no harm.
    let now = tier.context.clock.now().min(tier.context.ledger.now().await?);
    let is_left = |sale: &&Arc<Sale>| is_past_retention(sale, now) && tier.gate.opened_as(sale.id).is_none();
    let (mut before, mut failed) = (None, None);
    loop {
        let page = tier.context.sale_index.newest(before);
        let Some(last) = page.last() else { break };
        before = Some(last.id);
        let left: Vec<SaleId> = page.iter().filter(is_left).map(|sale| sale.id).collect();
        for sales in left.chunks(SALES) {
            if !tier.gate.has_keys(sales).await? {
                continue;
            }
            for &sale in sales {
                if tier.gate.has_keys(&[sale]).await?
                    && let Err(reason) = remove_one(tier, sale, now).await
                {
                    tracing::warn!(%sale, %reason, cause = reason.cause(), "cannot remove a sale that is long over yet");
                    failed = Some(reason);
                }
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Removes one sale, after what is left in its outbox is recorded.
async fn remove_one(tier: &Arc<RedisTier>, id: SaleId, now: Timestamp) -> Result<(), NotReady> {
    // What this node knows of a sale that is over may be old.
    let Some(sale) = tier.context.ledger.sale(id).await?.filter(|sale| is_past_retention(sale, now)) else {
        return Ok(());
    };
    // Under the current incarnation, with which alone the script deletes the keys. Nothing is admitted any more.
    if !rebuild::close(tier, &sale, tier.gate.incarnation()).await? {
        return Ok(());
    }
    rebuild::record_survivors(tier, &sale).await?;
    settle_all(tier, id).await?;
    if tier.gate.remove_closed(id).await? {
        tracing::info!(sale = %id, "removed a sale from Redis that has been over for longer than a day");
    }
    close_queue(tier, id);
    Ok(())
}

/// Settles all entries of an outbox, whose orders are recorded.
async fn settle_all(tier: &RedisTier, id: SaleId) -> Result<(), NotReady> {
    let mut after = None;
    loop {
        let entries = tier.gate.entries(id, after, PAGE).await?;
        let Some(last) = entries.last() else { return Ok(()) };
        after = Some(last.id);
        // One that cannot be read stays until it is stored as a dead letter.
        let readable = entries.iter().filter(|entry| entry.unreadable.is_none());
        let recorded: Vec<EntryId> = readable.map(|entry| entry.id).collect();
        // Nobody waits for these orders any more.
        tier.gate.settle_entries(id, &recorded, false).await?;
    }
}

/// Stops the tasks of a sale.
fn close_queue(tier: &RedisTier, id: SaleId) {
    if let Some(queue) = tier.queues.remove(id) {
        // Not awaited: it may wait for an order that is being recorded.
        tokio::spawn(queue.close());
    }
}

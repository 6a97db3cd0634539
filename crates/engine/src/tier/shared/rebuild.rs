//! Rebuilds the gate from the ledger, after Redis has lost it or another tier has sold from the ledger.
//!
//! 1. The next incarnation is valid, and every sale is `closing`: one node wins.
//! 2. The scripts of the new incarnation are loaded, and every sale is closed in Redis: no node can sell.
//! 3. What has survived in Redis is recorded: entries of the outbox, and marks without a row.
//! 4. A sale gets the next epoch, is loaded with the ledger's live orders, and is opened.
//!
//! A node that has missed this sends its orders with the old epoch, which the ledger refuses. A rebuild that does not end is begun again
//! by another node; two of them do no harm, because the ledger and Redis refuse the older incarnation.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use futures_util::TryStreamExt as _;
use metrics::{counter, histogram};
use stampede_core::ports::{Admitted, Gate as _, LoadedSale};
use stampede_core::{Sale, failpoint};

use super::Shared;
use super::recovery::NotReady;
use crate::retention::RETENTION;

/// Sales that are rebuilt at once.
const CONCURRENT_SALES: usize = 8;
/// Entries of the outbox that are read at once.
const ENTRIES: usize = 100;
/// Orders that are recorded at once.
const ORDERS: usize = 1000;

/// Rebuilds the whole gate, unless another node has begun to.
pub(super) async fn all(shared: &Arc<Shared>, reason: &str) -> Result<(), NotReady> {
    let (gate, ledger, started) = (&shared.gate, &shared.context.ledger, Instant::now());
    let end_after = shared.context.clock.now().minus(RETENTION);
    let Some(incarnation) = ledger.begin_rebuild(gate.incarnation(), end_after).await? else {
        return Err(NotReady::Rebuilding);
    };
    tracing::warn!(reason, incarnation, "rebuilding the gate; sales are closed meanwhile");
    *shared.not_ready.lock() = Some(NotReady::Rebuilding);
    counter!("stampede_gate_rebuilds_total").increment(1);
    failpoint::hit("rebuild.begun");
    gate.set_incarnation(incarnation);
    gate.load_scripts().await?;
    let sales = ledger.sales(Some(end_after)).await?;
    for sale in &sales {
        if !gate.close(sale.id, sale.epoch).await? {
            return Err(NotReady::Rebuilding);
        }
    }
    failpoint::hit("rebuild.closed");
    let rebuilding = sales.iter().map(Ok).collect::<Vec<_>>();
    futures_util::stream::iter(rebuilding)
        .try_for_each_concurrent(CONCURRENT_SALES, |sale| load(shared, sale, incarnation))
        .await?;
    histogram!("stampede_gate_rebuild_seconds").record(started.elapsed());
    tracing::info!(sales = sales.len(), ms = started.elapsed().as_millis(), "the gate has been rebuilt");
    Ok(())
}

/// Opens one sale under the current incarnation: one that was created and not opened.
pub(super) async fn one(shared: &Arc<Shared>, sale: &Sale, incarnation: u64) -> Result<(), NotReady> {
    if !shared.gate.close(sale.id, sale.epoch).await? {
        return Err(NotReady::Rebuilding);
    }
    load(shared, sale, incarnation).await
}

/// Records what has survived of a closed sale, then loads and opens it.
async fn load(shared: &Arc<Shared>, sale: &Sale, incarnation: u64) -> Result<(), NotReady> {
    record_survivors(shared, sale).await?;
    let (gate, ledger) = (&shared.gate, &shared.context.ledger);
    let Some(LoadedSale { sale, marks }) = ledger.begin_load(sale.id, incarnation).await? else {
        return Err(NotReady::Rebuilding);
    };
    failpoint::hit("rebuild.loading");
    let (id, epoch) = (sale.id, sale.epoch);
    gate.open(LoadedSale { sale, marks }).await?;
    failpoint::hit("rebuild.opened");
    if !ledger.finish_load(id, epoch, incarnation).await? {
        return Err(NotReady::Rebuilding);
    }
    shared.refresh(id).await?;
    shared.announce(id).await;
    Ok(())
}

/// Records the entries of the outbox, and the marks that have no row.
async fn record_survivors(shared: &Arc<Shared>, sale: &Sale) -> Result<(), NotReady> {
    let seller = shared.with_queue(sale.id, |queue| queue.seller.clone())?;
    let mut after = None;
    loop {
        let entries = shared.gate.entries(sale.id, after, ENTRIES).await?;
        let Some(last) = entries.last() else { break };
        after = Some(last.id);
        for entry in entries {
            seller.record_only(entry.id.epoch, entry.orders.into_iter()).await;
        }
    }
    let Some((epoch, marks)) = shared.gate.surviving_marks(sale.id).await? else { return Ok(()) };
    let Some(loaded) = shared.context.ledger.load(sale.id).await? else { return Ok(()) };
    let recorded: HashSet<_> = loaded.marks.into_iter().collect();
    // Of a mark alone neither the sequence number nor the time is known. It was admitted before what is in the outbox.
    let at = shared.context.clock.now();
    let admitted = |&(user, order): &_| Admitted { order, user, seq: 0, at };
    let missing: Vec<Admitted> = marks.iter().filter(|mark| !recorded.contains(mark)).map(admitted).collect();
    for orders in missing.chunks(ORDERS) {
        seller.record_only(epoch, orders.iter().copied()).await;
    }
    Ok(())
}

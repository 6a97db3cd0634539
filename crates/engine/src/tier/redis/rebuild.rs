//! Rebuilds the gate from the ledger, after Redis has lost it or another tier has sold from the ledger.
//!
//! 1. Redis is checked: a server with a wrong clock or an eviction policy must not be opened. Then the next incarnation is valid, and every
//!    sale is `closing`: one node wins. The ledger notes the replication id of the server.
//! 2. The scripts of the new incarnation are loaded, and every sale is closed in Redis: no node can sell.
//! 3. What has survived in Redis is recorded: entries of the outbox, and marks without a row. What cannot be recorded is quarantined.
//! 4. With a queue, orders may be confirmed until `accept_within` after step 2; the rebuild waits for that. With RabbitMQ it then waits until
//!    everything that was confirmed is recorded ([`drain`]).
//! 5. A sale is closed once more, which fails if another server answers by now: then step 3 may have read that one. It gets the next epoch, is loaded with the ledger's live orders, and is opened.
//!
//! A sale that the ledger cannot record or read now stays closed, and is tried again; the others are opened.
//!
//! A node that has missed this sends its orders with the old epoch, which the ledger refuses. A rebuild whose heartbeat stops is begun
//! again by another node; two of them do no harm, because the ledger and Redis refuse the older incarnation.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use metrics::{counter, histogram};
use stampede_core::ports::{Admitted, Gate as _, GateRecord, LoadedSale};
use stampede_core::{Sale, failpoint};
use stampede_redis::Backoff;
use tokio_util::task::AbortOnDropHandle;

use super::super::queued::drain::drain;
use super::recovery::NotReady;
use super::{RedisTier, requirements};
use crate::alerts::AlertKind;
use crate::retention::RETENTION;

/// Sales that are rebuilt at once.
const CONCURRENT_SALES: usize = 8;
/// How often the heartbeat of a rebuild is raised: several times before other nodes would begin another rebuild.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Entries of the outbox that are read at once.
const ENTRIES: usize = 100;
/// How long one call that records orders may take. Recording goes on while the ledger is away, and a sale must not hold up the others.
const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a node goes on with sales that could not be rebuilt.
const FINISH_TIMEOUT: Duration = Duration::from_secs(600);
/// The pauses between attempts to rebuild a sale that could not be rebuilt.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Orders that are recorded at once.
const ORDERS: usize = 1000;

/// Rebuilds the whole gate, unless another node has begun to.
pub(super) async fn all(tier: &Arc<RedisTier>, reason: &str) -> Result<(), NotReady> {
    let (gate, ledger, started) = (&tier.gate, &tier.context.ledger, Instant::now());
    tier.closed.begin();
    // A sale whose row is locked holds up the next steps; the node is not ready meanwhile.
    *tier.not_ready.lock() = Some(NotReady::Rebuilding);
    requirements::check(&tier.config.redis, ledger.as_ref(), tier.config.assume_noeviction).await?;
    // Read before the scripts are loaded: where they are, the ledger knows the server.
    let replication_id = gate.replication_id().await?;
    let end_after = tier.context.clock.now().minus(RETENTION);
    let from = gate.incarnation();
    let Some(incarnation) = ledger.begin_rebuild(from, &replication_id, end_after).await? else {
        return Err(NotReady::Rebuilding);
    };
    tracing::warn!(reason, incarnation, "rebuilding the gate; sales are closed meanwhile");
    counter!("stampede_gate_rebuilds_total").increment(1);
    failpoint::hit("rebuild.begun");
    let heartbeat = start_heartbeat(tier);
    tier.set_incarnation(&GateRecord { ledger_id: gate.ledger_id().to_owned(), incarnation, replication_id });
    gate.load_scripts().await?;
    let sales = ledger.sales(Some(end_after)).await?;
    all_of(sales.iter().map(|sale| close(tier, sale).boxed()).collect()).await?;
    failpoint::hit("rebuild.closed");
    // With a queue, an order whose admission began before now may be confirmed until then.
    let not_before = Instant::now() + tier.delivery.queue().map_or(Duration::ZERO, |queue| queue.accept_within);
    let mut failed = each(&sales, |sale| record_survivors(tier, sale)).await?;
    if !sales.is_empty() {
        tokio::time::sleep_until(not_before.into()).await;
        if let Some(broker) = &tier.broker {
            drain(tier, broker, incarnation).await.map_err(NotReady::Queue)?;
        }
    }
    let recorded: Vec<Sale> = sales.iter().filter(|sale| !failed.contains(sale)).cloned().collect();
    failed.extend(each(&recorded, |sale| load(tier, sale, incarnation)).await?);
    histogram!("stampede_gate_rebuild_seconds").record(started.elapsed());
    let opened = sales.len() - failed.len();
    tracing::info!(sales = opened, ms = started.elapsed().as_millis(), "the gate has been rebuilt");
    if !failed.is_empty() {
        tokio::spawn(finish(Arc::downgrade(tier), failed, incarnation, heartbeat));
    }
    Ok(())
}

/// Does a step for all sales, some at once, and returns those for which the ledger does not allow it now. Any other failure concerns all
/// sales, and so does one of all of them.
async fn each<'a, F>(sales: &'a [Sale], step: impl Fn(&'a Sale) -> F) -> Result<Vec<Sale>, NotReady>
where
    F: Future<Output = Result<(), NotReady>> + Send + 'a,
{
    let work: Vec<BoxFuture<'a, _>> =
        sales.iter().map(|sale| step(sale).map(move |done| (sale, done)).boxed()).collect();
    let done: Vec<_> = futures_util::stream::iter(work).buffer_unordered(CONCURRENT_SALES).collect().await;
    let mut failed = Vec::new();
    for (sale, done) in done {
        match done {
            Ok(()) => {}
            Err(NotReady::Ledger(cause)) if sales.len() > 1 => {
                tracing::error!(sale = %sale.id, cause, "a sale cannot be rebuilt now and stays closed");
                failed.push(sale.clone());
            }
            Err(error) => return Err(error),
        }
    }
    if !failed.is_empty() && failed.len() == sales.len() {
        return Err(NotReady::Ledger("no sale can be rebuilt".to_owned()));
    }
    Ok(failed)
}

/// Goes on with the sales that could not be rebuilt, while the others are sold. The heartbeat tells other nodes not to begin another
/// rebuild; it ends after a while, because another node may succeed.
async fn finish(tier: Weak<RedisTier>, mut failed: Vec<Sale>, incarnation: u64, _heartbeat: AbortOnDropHandle<()>) {
    let (mut backoff, started) = (Backoff::new(FIRST_PAUSE, LONGEST_PAUSE), Instant::now());
    if let Some(tier) = tier.upgrade() {
        for sale in &failed {
            let message = "the sale is closed, because its orders cannot be recorded or read; the log has the cause";
            tier.context.alerts.raise(AlertKind::NotRebuilt, format!("sale {}", sale.id), message.to_owned()).await;
        }
    }
    while !failed.is_empty() && started.elapsed() < FINISH_TIMEOUT {
        backoff.sleep().await;
        let Some(tier) = tier.upgrade() else { return };
        for sale in std::mem::take(&mut failed) {
            let rebuilt = async {
                close(&tier, &sale).await?;
                record_survivors(&tier, &sale).await?;
                load(&tier, &sale, incarnation).await
            };
            match rebuilt.await {
                Ok(()) => tracing::info!(sale = %sale.id, "a sale that could not be rebuilt is on sale again"),
                Err(_) if tier.gate.incarnation() != incarnation => return,
                Err(error) => {
                    let cause = error.cause();
                    tracing::warn!(sale = %sale.id, %error, cause, "the sale cannot be rebuilt yet; trying again");
                    failed.push(sale);
                }
            }
        }
    }
}

/// Runs the work of all sales, some at once. One that fails stops none of the others, and is reported afterwards.
async fn all_of(work: Vec<BoxFuture<'_, Result<(), NotReady>>>) -> Result<(), NotReady> {
    let done: Vec<_> = futures_util::stream::iter(work).buffer_unordered(CONCURRENT_SALES).collect().await;
    done.into_iter().collect()
}

/// Tells the other nodes that this one is at work, for as long as the returned handle exists.
fn start_heartbeat(tier: &Arc<RedisTier>) -> AbortOnDropHandle<()> {
    let gate = tier.gate.clone();
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            if let Err(error) = gate.beat().await {
                tracing::debug!(%error, "cannot tell the other nodes that the rebuild goes on");
            }
            tokio::time::sleep(HEARTBEAT).await;
        }
    }))
}

async fn close(tier: &Arc<RedisTier>, sale: &Sale) -> Result<(), NotReady> {
    if tier.gate.close(sale.id, sale.epoch).await? { Ok(()) } else { Err(NotReady::Rebuilding) }
}

/// Opens one sale under the current incarnation: one that was created and not opened.
pub(super) async fn one(tier: &Arc<RedisTier>, sale: &Sale, incarnation: u64) -> Result<(), NotReady> {
    close(tier, sale).await?;
    record_survivors(tier, sale).await?;
    load(tier, sale, incarnation).await
}

/// Loads and opens a closed sale, of which everything is recorded that has survived.
async fn load(tier: &Arc<RedisTier>, sale: &Sale, incarnation: u64) -> Result<(), NotReady> {
    close(tier, sale).await?;
    let (gate, ledger) = (&tier.gate, &tier.context.ledger);
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
    tier.refresh(id).await?;
    tier.announce(id).await;
    Ok(())
}

fn timed_out(sale: &Sale) -> NotReady {
    NotReady::Ledger(format!("orders of sale {} cannot be recorded", sale.id))
}

/// Records the entries of the outbox, and the marks that have no row.
async fn record_survivors(tier: &Arc<RedisTier>, sale: &Sale) -> Result<(), NotReady> {
    let seller = tier.seller(sale.id)?;
    let mut after = None;
    loop {
        let entries = tier.gate.entries(sale.id, after, ENTRIES).await?;
        let Some(last) = entries.last() else { break };
        after = Some(last.id);
        seller.remove_unreadable(&entries).await;
        for entry in entries {
            let recording = seller.record_before_rebuild(entry.id.epoch, entry.orders.into_iter());
            tokio::time::timeout(RECORD_TIMEOUT, recording).await.map_err(|_| timed_out(sale))??;
        }
    }
    let Some((epoch, marks)) = tier.gate.surviving_marks(sale.id).await? else { return Ok(()) };
    let Some(loaded) = tier.context.ledger.load(sale.id).await? else { return Ok(()) };
    let recorded: HashSet<_> = loaded.marks.into_iter().collect();
    // Of a mark alone neither the sequence number nor the time is known. It was admitted before what is in the outbox.
    let at = tier.context.clock.now();
    let admitted = |&(user, order): &_| Admitted { order, user, seq: 0, at };
    let missing: Vec<Admitted> = marks.iter().filter(|mark| !recorded.contains(mark)).map(admitted).collect();
    for orders in missing.chunks(ORDERS) {
        let recording = seller.record_before_rebuild(epoch, orders.iter().copied());
        tokio::time::timeout(RECORD_TIMEOUT, recording).await.map_err(|_| timed_out(sale))??;
    }
    Ok(())
}

//! Rebuilds the gate from the ledger, after Redis has lost it or another tier has sold from the ledger.
//!
//! 1. Redis is checked: a server with a wrong clock or an eviction policy must not be opened. Then the next incarnation is valid, so that every
//!    sale is `closing`: one node wins. The ledger notes the replication id of the server.
//! 2. The scripts of the new incarnation are loaded, and every sale is closed in Redis: no node can sell.
//! 3. What has survived in Redis is recorded: entries of the outbox, and marks without a row. What cannot be recorded is quarantined; if every
//!    order of a batch fails, and no other order of the sale is recorded, that is an outage: nothing is quarantined, and the sale stays closed.
//! 4. With a queue, orders may be confirmed until `accept_within` after step 2, and after a fail-over as long as the old master accepts
//!    them (`failover_window`); the rebuild waits for that. With RabbitMQ it then waits until everything that was confirmed is recorded ([`drain`]), or kept in the ledger because its sale's orders cannot be ([`parked`]).
//! 5. A sale is closed once more, which fails if another server answers by now: then step 3 may have read that one. It gets the next epoch, is loaded with the ledger's live orders, and is opened.
//!
//! A sale that the ledger cannot record or read now, for example because another client has locked its row, stays closed and is tried
//! again; the others are opened.
//!
//! A node that has missed this sends its orders with the old epoch, which the ledger refuses. A rebuild whose heartbeat stops is begun
//! again by another node; two of them do no harm, because the ledger and Redis refuse the older incarnation. Within one incarnation, two nodes
//! may open the same sale that was created and not opened: one of them gets the next epoch, and Redis refuses to open the sale under an epoch
//! that the ledger had given it before it was closed.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _, TryFutureExt as _};
use metrics::{counter, histogram};
use stampede_core::ports::{Admitted, GateRecord};
use stampede_core::{Sale, SaleId, SalePhase, failpoint};
use stampede_gate::redis::RebuildStage;
use stampede_redis::Backoff;
use tokio_util::task::AbortOnDropHandle;

use super::super::queued::drain::drain;
use super::super::queued::parked;
use super::super::{QueueConfig, time_of_mark};
use super::recovery::{NotReady, Opened};
use super::{RedisTier, Seller, requirements};
use crate::alerts::AlertKind;
use crate::failpoints::hit_on_another_thread;
use crate::recording::Pending;
use crate::retention::RETENTION;

/// Sales that are rebuilt at once.
const CONCURRENT_SALES: usize = 8;
/// How often the heartbeat of a rebuild is raised: several times before other nodes would begin another rebuild.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Entries of the outbox that are read at once.
const ENTRIES: usize = 100;
/// How long one call that records orders may take. Recording goes on while the ledger is away, and a sale must not hold up the others.
pub(super) const RECORD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a node goes on with sales that could not be rebuilt.
const FINISH_TIMEOUT: Duration = Duration::from_secs(600);
/// The pauses between attempts to rebuild a sale that could not be rebuilt.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Orders that are recorded at once.
const ORDERS: usize = 1000;
/// If more sales than this cannot be rebuilt, one alert is about all of them.
const MAX_ALERTS: usize = 10;

/// Rebuilds the whole gate, unless another node has begun to. Sales for which the ledger does not allow it now follow later.
pub(super) async fn all(tier: &Arc<RedisTier>, reason: &str) -> Result<Opened, NotReady> {
    let (gate, ledger, started) = (&tier.gate, &tier.context.ledger, Instant::now());
    tier.closed.begin();
    *tier.not_ready.lock() = Some(NotReady::Rebuilding);
    requirements::check(&tier.gate, ledger.as_ref(), tier.config.assume_noeviction).await?;
    // Read before the scripts are loaded: where they are, the ledger knows the server.
    let replication_id = gate.replication_id().await?;
    let end_after = tier.context.clock.now().minus(RETENTION);
    let from = gate.incarnation();
    let Some(incarnation) = ledger.begin_rebuild(from, &replication_id).await? else {
        return Err(NotReady::Rebuilding);
    };
    tracing::warn!(reason, incarnation, "rebuilding the gate; sales are closed meanwhile");
    counter!("stampede_gate_rebuilds_total").increment(1);
    failpoint::hit("rebuild.begun");
    let _heartbeat = start_heartbeat(tier, RebuildStage::All);
    tier.set_incarnation(&GateRecord { ledger_id: gate.ledger_id().to_owned(), incarnation, replication_id });
    gate.load_scripts(incarnation).await?;
    let sales = ledger.sales(Some(end_after)).await?;
    all_of(sales.iter().map(|sale| close(tier, sale, incarnation).map_ok(drop).boxed()).collect()).await?;
    hit_on_another_thread("rebuild.closed", "").await;
    // With a queue, an order whose admission began before now, or on an old master, may be confirmed until then.
    let wait = |queue: &QueueConfig| queue.accept_within.max(tier.config.failover_window);
    let not_before = Instant::now() + tier.delivery.queue().map_or(Duration::ZERO, wait);
    let mut failed = each(tier, &sales, |sale| record_survivors(tier, sale)).await?;
    if !sales.is_empty() {
        if !failpoint::planted("skip-wait") {
            tokio::time::sleep_until(not_before.into()).await;
        }
        if let Some(broker) = &tier.broker
            && !failpoint::planted("skip-drain")
        {
            drain(tier, broker, incarnation).await.map_err(NotReady::Queue)?;
        }
    }
    let recorded: Vec<Sale> = sales.iter().filter(|sale| !failed.contains(sale)).cloned().collect();
    failed.extend(each(tier, &recorded, |sale| load(tier, sale, incarnation)).await?);
    histogram!("stampede_gate_rebuild_seconds").record(started.elapsed());
    let closed = failed.len();
    tracing::info!(
        sales = sales.len() - closed,
        closed,
        ms = started.elapsed().as_millis(),
        "the gate has been rebuilt"
    );
    if failed.is_empty() {
        return Ok(Opened::All);
    }
    let heartbeat = start_heartbeat(tier, RebuildStage::Rest);
    tokio::spawn(finish(Arc::downgrade(tier), failed, incarnation, heartbeat));
    Ok(Opened::AllBut(closed))
}

/// Does a step for all sales, some at once, and returns those for which the ledger does not allow it now. Any other failure concerns all
/// sales, and so does one of all of them while the ledger does not answer.
async fn each<'a, F>(tier: &RedisTier, sales: &'a [Sale], step: impl Fn(&'a Sale) -> F) -> Result<Vec<Sale>, NotReady>
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
            Err(NotReady::Ledger(cause)) => {
                tracing::error!(sale = %sale.id, cause, "a sale cannot be rebuilt now and stays closed");
                failed.push(sale.clone());
            }
            Err(error) => return Err(error),
        }
    }
    if !failed.is_empty() && failed.len() == sales.len() {
        tier.context.ledger.ping().await?;
    }
    Ok(failed)
}

/// Goes on with the sales that could not be rebuilt, while the others are sold. The heartbeat tells other nodes not to begin another
/// rebuild; it ends after a while, because another node may succeed.
async fn finish(tier: Weak<RedisTier>, mut failed: Vec<Sale>, incarnation: u64, _heartbeat: AbortOnDropHandle<()>) {
    let (mut backoff, started) = (Backoff::new(FIRST_PAUSE, LONGEST_PAUSE), Instant::now());
    while !failed.is_empty() && started.elapsed() < FINISH_TIMEOUT {
        if let Some(tier) = tier.upgrade() {
            // Repeated for as long as they cannot be rebuilt.
            alert(&tier, &failed).await;
        }
        backoff.sleep().await;
        let Some(tier) = tier.upgrade() else { return };
        if tier.gate.incarnation() != incarnation {
            // A later rebuild concerns all sales.
            return;
        }
        let work = failed.iter().map(|sale| retry(&tier, sale.id, incarnation).map(move |done| (sale, done)).boxed());
        let mut rebuilding = futures_util::stream::iter(work.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_SALES);
        let mut still_failed = Vec::new();
        while let Some((sale, done)) = rebuilding.next().await {
            match done {
                Ok(()) => tracing::info!(sale = %sale.id, "a sale that could not be rebuilt is on sale again"),
                Err(_) if tier.gate.incarnation() != incarnation => return,
                Err(error) => {
                    let cause = error.cause();
                    tracing::warn!(sale = %sale.id, %error, cause, "the sale cannot be rebuilt yet; trying again");
                    still_failed.push(sale.clone());
                }
            }
        }
        drop(rebuilding);
        failed = still_failed;
    }
}

/// Reports sales that could not be rebuilt.
async fn alert(tier: &RedisTier, failed: &[Sale]) {
    let alerts = &tier.context.alerts;
    if failed.len() > MAX_ALERTS {
        let message = format!(
            "{} sales are closed, because their orders cannot be recorded or read; the log has the causes",
            failed.len()
        );
        alerts.raise(AlertKind::NotRebuilt, "gate".to_owned(), message).await;
        return;
    }
    for sale in failed {
        let message = "the sale is closed, because its orders cannot be recorded or read; the log has the cause";
        alerts.raise(AlertKind::NotRebuilt, format!("sale {}", sale.id), message.to_owned()).await;
    }
}

/// Runs the work of all sales, some at once. One that fails stops none of the others, and is reported afterwards.
async fn all_of(work: Vec<BoxFuture<'_, Result<(), NotReady>>>) -> Result<(), NotReady> {
    let done: Vec<_> = futures_util::stream::iter(work).buffer_unordered(CONCURRENT_SALES).collect().await;
    done.into_iter().collect()
}

/// Tells the other nodes that this one is at work, for as long as the returned handle exists.
fn start_heartbeat(tier: &Arc<RedisTier>, stage: RebuildStage) -> AbortOnDropHandle<()> {
    let gate = tier.gate.clone();
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            if let Err(error) = gate.beat(stage).await {
                tracing::debug!(%error, "cannot tell the other nodes that the rebuild goes on");
            }
            tokio::time::sleep(HEARTBEAT).await;
        }
    }))
}

/// Closes a sale in Redis under this incarnation. `false` if another node has opened it since it was read from the ledger.
pub(super) async fn close(tier: &Arc<RedisTier>, sale: &Sale, incarnation: u64) -> Result<bool, NotReady> {
    if tier.gate.close(sale.id, sale.epoch, incarnation).await? {
        return Ok(true);
    }
    ensure_current(tier, incarnation).await.map(|()| false)
}

/// An error if the ledger has another incarnation by now.
async fn ensure_current(tier: &RedisTier, incarnation: u64) -> Result<(), NotReady> {
    let current = tier.context.ledger.gate_record("").await?.incarnation;
    if current == incarnation { Ok(()) } else { Err(NotReady::Rebuilding) }
}

/// Opens one sale under this incarnation: one that was created and not opened, or that could not be rebuilt with the others. Another node
/// may be doing the same.
pub(super) async fn one(tier: &Arc<RedisTier>, sale: &Sale, incarnation: u64) -> Result<(), NotReady> {
    if !close(tier, sale, incarnation).await? {
        return Ok(());
    }
    record_survivors(tier, sale).await?;
    load(tier, sale, incarnation).await
}

/// Opens a sale that could not be rebuilt with the others, unless another node has.
async fn retry(tier: &Arc<RedisTier>, id: SaleId, incarnation: u64) -> Result<(), NotReady> {
    match tier.refresh(id).await? {
        Some(sale) if sale.phase != SalePhase::Open => one(tier, &sale, incarnation).await,
        _ => Ok(()),
    }
}

/// Loads and opens a closed sale, of which everything is recorded that has survived. Does nothing if another node has begun to load it since:
/// between the closing under the sale's epoch and the next epoch nothing was admitted, because an open that was under way is refused.
async fn load(tier: &Arc<RedisTier>, sale: &Sale, incarnation: u64) -> Result<(), NotReady> {
    // Under the next epoch they would be rejected.
    parked::record_before_load(tier, sale.id, RECORD_TIMEOUT).await.map_err(NotReady::Ledger)?;
    if !close(tier, sale, incarnation).await? {
        return Ok(());
    }
    let (gate, ledger) = (&tier.gate, &tier.context.ledger);
    let Some(loaded) = ledger.begin_load(sale.id, sale.epoch, incarnation).await? else {
        return ensure_current(tier, incarnation).await;
    };
    hit_on_another_thread("rebuild.loading", &sale.id.to_string()).await;
    let (id, epoch) = (loaded.sale.id, loaded.sale.epoch);
    gate.open_under(incarnation, loaded).await?;
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

/// Records what Redis holds of a closed sale: the entries of the outbox, and the marks that have no row.
pub(super) async fn record_survivors(tier: &Arc<RedisTier>, sale: &Sale) -> Result<(), NotReady> {
    let (seller, started) = (tier.seller(sale.id)?, Instant::now());
    let (mut after, mut failed) = (None, Vec::new());
    loop {
        let entries = tier.gate.entries(sale.id, after, ENTRIES).await?;
        let Some(last) = entries.last() else { break };
        after = Some(last.id);
        // Opening the sale deletes its outbox.
        seller.remove_unreadable(&entries).await?;
        for entry in entries {
            let recording = seller.record_before_rebuild(entry.id.epoch, entry.orders.into_iter());
            failed.extend(tokio::time::timeout(RECORD_TIMEOUT, recording).await.map_err(|_| timed_out(sale))??);
        }
    }
    // Before the marks are read: most of these orders have one as well.
    quarantine_failed(&seller, sale, &failed, started).await?;
    let Some((epoch, marks)) = tier.gate.surviving_marks(sale.id).await? else { return Ok(()) };
    if marks.is_empty() {
        return Ok(());
    }
    let Some(loaded) = tier.context.ledger.load(sale.id).await? else { return Ok(()) };
    let recorded: HashSet<_> = loaded.marks.into_iter().collect();
    // Of a mark alone neither the sequence number nor the time is known. It was admitted before what is in the outbox.
    let at = time_of_mark(Some(sale), tier.context.clock.now());
    let admitted = |&(user, order): &_| Admitted { order, user, seq: 0, at };
    let mut missing: Vec<Admitted> = marks.iter().filter(|mark| !recorded.contains(mark)).map(admitted).collect();
    // A batch has one row in `payment_due`, with the range of its ids: the batches must not overlap.
    missing.sort_unstable_by_key(|admitted| admitted.order);
    let mut failed = Vec::new();
    for orders in missing.chunks(ORDERS) {
        let recording = seller.record_before_rebuild(epoch, orders.iter().copied());
        failed.extend(tokio::time::timeout(RECORD_TIMEOUT, recording).await.map_err(|_| timed_out(sale))??);
    }
    quarantine_failed(&seller, sale, &failed, started).await
}

/// Quarantines orders of batches in which every order has failed. An error if no order of the sale was recorded since `started`: then the
/// cause is probably not in the orders, and under the next epoch they would be rejected.
async fn quarantine_failed(seller: &Seller, sale: &Sale, failed: &[Pending], started: Instant) -> Result<(), NotReady> {
    let quarantining = seller.quarantine_failed(failed, started);
    if tokio::time::timeout(RECORD_TIMEOUT, quarantining).await.map_err(|_| timed_out(sale))?? {
        return Ok(());
    }
    Err(NotReady::Ledger(format!("the database rejects every order of a batch of sale {}", sale.id)))
}

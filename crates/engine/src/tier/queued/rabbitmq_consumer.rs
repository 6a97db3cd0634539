//! Records what RabbitMQ delivers. The deliveries of one sale are recorded together, and each is acknowledged when all its orders have a
//! row or are in quarantine. Nothing is published again except dead letters: a marker could overtake it.
//!
//! Any number of processes run this. The broker delivers each partition to one of them at a time.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use metrics::{Counter, counter};
use stampede_core::ports::Admitted;
use stampede_core::{Epoch, OrderId, SaleId, failpoint};
use stampede_queue::{Batch, Consumer, Marker, QueueError, Tag, message};
use stampede_redis::Backoff;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::broker::Broker;
use super::deliveries::{Deliveries, Held, Work};
use super::parked;
use crate::error::describe;
use crate::recording::Pending;
use crate::tier::redis::RedisTier;

/// Deliveries that are received at once.
const RECEIVED: usize = 256;
/// How long a consumer that stops waits for what is being recorded. It keeps its partitions meanwhile, and a sale may be stuck.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// How quickly the ledger must answer to count as working.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// What a task has done.
enum Done {
    Recorded {
        sale: SaleId,
        batches: Vec<(Held, bool)>,
    },
    /// A marker was reported, or a dead letter stored.
    Finished {
        partition: u16,
        tag: Tag,
    },
    /// Whether the ledger has answered.
    Probed(bool),
    Parked {
        sale: SaleId,
        held: Vec<Held>,
        is_stored: bool,
    },
}

/// Consumes until `stop` is cancelled or the tier is dropped. What has begun is finished and acknowledged, if that does not take too long.
pub(in crate::tier) async fn run(tier: Weak<RedisTier>, broker: Arc<Broker>, stop: CancellationToken) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
    let orders = counter!("stampede_queue_consumed_orders_total");
    orders.increment(0);
    counter!("stampede_queue_dead_letters_total").increment(0);
    while tier.strong_count() > 0 {
        let opened = tokio::select! {
            () = stop.cancelled() => return,
            opened = broker.consume() => opened,
        };
        match opened {
            Ok(consumer) => {
                backoff.reset();
                consume(&tier, &broker, &stop, consumer, &orders).await;
            }
            Err(error) => tracing::debug!(%error, "cannot consume yet; trying again"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = backoff.sleep() => {}
        }
    }
}

/// Consumes until `stop` is cancelled, or a task panics: then everything is delivered again.
async fn consume(
    tier: &Weak<RedisTier>,
    broker: &Arc<Broker>,
    stop: &CancellationToken,
    mut consumer: Box<dyn Consumer>,
    orders: &Counter,
) {
    let (mut deliveries, mut tasks) = (Deliveries::default(), JoinSet::new());
    loop {
        let due = deliveries.next_due(Instant::now());
        let mut acks = Vec::new();
        tokio::select! {
            () = stop.cancelled() => break,
            received = consumer.next(RECEIVED) => match received {
                Ok(received) => {
                    let now = Instant::now();
                    received.into_iter().for_each(|delivery| deliveries.add(delivery, now));
                }
                Err(error) => {
                    tracing::debug!(%error, "deliveries come again");
                    deliveries.forget();
                }
            },
            Some(done) = tasks.join_next() => {
                let Some(tags) = finish(&mut deliveries, done) else { return };
                acks = tags;
            }
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => {}
        }
        acknowledge(&mut consumer, &mut deliveries, &acks).await;
        let Some(tier) = tier.upgrade() else { break };
        for work in deliveries.take_work(Instant::now(), tier.config.max_batch) {
            if let Work::Record { batches, .. } = &work {
                orders.increment(batches.iter().map(|held| held.batch.orders.len() as u64).sum());
            }
            tasks.spawn(perform(tier.clone(), broker.clone(), work));
        }
    }
    // What is recorded in time is acknowledged; the rest goes to another consumer, and is recorded once.
    let give_up_at = tokio::time::Instant::now() + STOP_TIMEOUT;
    while let Ok(Some(done)) = tokio::time::timeout_at(give_up_at, tasks.join_next()).await {
        let Some(acks) = finish(&mut deliveries, done) else { return };
        acknowledge(&mut consumer, &mut deliveries, &acks).await;
    }
    consumer.close().await;
}

/// The deliveries to be acknowledged; `None` if the task has panicked.
fn finish(deliveries: &mut Deliveries, done: Result<Done, tokio::task::JoinError>) -> Option<Vec<Tag>> {
    match done {
        Ok(Done::Recorded { sale, batches }) => Some(deliveries.recorded(sale, batches, Instant::now())),
        Ok(Done::Finished { partition, tag }) => Some(deliveries.finished(partition, tag).into_iter().collect()),
        Ok(Done::Probed(is_answered)) => {
            deliveries.probed(is_answered, Instant::now());
            Some(Vec::new())
        }
        Ok(Done::Parked { sale, held, is_stored }) => Some(deliveries.parked(sale, &held, is_stored, Instant::now())),
        Err(error) => {
            tracing::error!(%error, "a task that records orders has failed; everything is delivered again");
            None
        }
    }
}

async fn acknowledge(consumer: &mut Box<dyn Consumer>, deliveries: &mut Deliveries, tags: &[Tag]) {
    if tags.is_empty() {
        return;
    }
    failpoint::hit("queue.ack");
    if let Err(error) = consumer.ack(tags).await {
        tracing::debug!(%error, "deliveries come again");
        deliveries.forget();
    }
}

async fn perform(tier: Arc<RedisTier>, broker: Arc<Broker>, work: Work) -> Done {
    match work {
        Work::Record { sale, batches: held, quarantine } => {
            let batches: Vec<Arc<Batch>> = held.iter().map(|held| held.batch.clone()).collect();
            let done = match tier.is_missing(sale).await {
                Ok(false) => record_batches(&tier, sale, &batches, quarantine).await,
                Ok(true) => store_as_dead_letters(&broker, sale, &batches).await,
                Err(error) => {
                    tracing::debug!(%sale, error = describe(&error), "cannot look for a sale yet; trying again");
                    vec![false; batches.len()]
                }
            };
            Done::Recorded { sale, batches: held.into_iter().zip(done).collect() }
        }
        Work::Probe => {
            let answered = tokio::time::timeout(PROBE_TIMEOUT, tier.ledger().parked_sales()).await;
            Done::Probed(matches!(answered, Ok(Ok(_))))
        }
        Work::Park { sale, held } => {
            let batches: Vec<Arc<Batch>> = held.iter().map(|held| held.batch.clone()).collect();
            let is_stored = parked::store(&tier, sale, &batches, broker.max_parked()).await;
            Done::Parked { sale, held, is_stored }
        }
        Work::Marker { tag, partition, marker: Marker::Rebuild { incarnation } } => {
            let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(1));
            while let Err(error) = tier.ledger().pass_marker(partition, incarnation).await {
                tracing::warn!(partition, error = describe(&error), "cannot report a marker yet; trying again");
                backoff.sleep().await;
            }
            Done::Finished { partition, tag }
        }
        Work::Marker { tag, partition, marker: Marker::Reconcile { id } } => {
            // Without the report the comparison repairs nothing, and there will be another one.
            if let Err(error) = tier.gate.pass_marker(id, partition).await {
                tracing::debug!(partition, %error, "cannot report the marker of a comparison");
            }
            Done::Finished { partition, tag }
        }
        Work::DeadLetter { tag, partition, bytes, reason } => {
            tracing::error!(
                partition,
                reason,
                bytes = bytes.len(),
                "a message cannot be read: stored as a dead letter"
            );
            counter!("stampede_queue_dead_letters_total").increment(1);
            let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
            while let Err(error) = broker.dead_letter(&bytes, &reason).await {
                // Without a connection there is no delivery, either: it comes again.
                if matches!(error, QueueError::NotSent(_)) {
                    tracing::debug!(%error, "cannot store a dead letter yet");
                }
                backoff.sleep().await;
            }
            Done::Finished { partition, tag }
        }
    }
}

/// Records batches of one sale. Returns for each whether all its orders have a row or are in quarantine.
pub(super) async fn record_batches(
    tier: &Arc<RedisTier>,
    sale: SaleId,
    batches: &[Arc<Batch>],
    quarantine: bool,
) -> Vec<bool> {
    let Ok(seller) = tier.seller(sale) else { return vec![false; batches.len()] };
    // A batch may have been published twice. One call of the ledger has one epoch.
    let mut orders: HashMap<(Epoch, OrderId), Admitted> = HashMap::new();
    for batch in batches {
        orders.extend(batch.orders.iter().map(|order| ((batch.epoch, order.order), *order)));
    }
    let mut pending: Vec<Pending> =
        orders.into_iter().map(|((epoch, _), admitted)| Pending { epoch, admitted }).collect();
    pending.sort_by_key(|pending| (pending.epoch, pending.admitted.seq));
    let done = seller.record_delivered(&pending, quarantine).await;
    let done: HashMap<(Epoch, OrderId), bool> =
        pending.iter().zip(done).map(|(pending, done)| ((pending.epoch, pending.admitted.order), done)).collect();
    let is_done = |batch: &Arc<Batch>| {
        let of = |order: &Admitted| done.get(&(batch.epoch, order.order)).copied().unwrap_or(false);
        batch.orders.iter().all(of)
    };
    batches.iter().map(is_done).collect()
}

/// Stores batches of a sale that the ledger does not have as dead letters: they can never be recorded. Returns for each whether it is
/// stored.
pub(super) async fn store_as_dead_letters(broker: &Broker, sale: SaleId, batches: &[Arc<Batch>]) -> Vec<bool> {
    let reason = format!("the database has no sale {sale}");
    let mut stored = Vec::with_capacity(batches.len());
    for batch in batches {
        let letter = match message::encode_batch(batch) {
            Ok(bytes) => broker.dead_letter(&bytes, &reason).await,
            Err(error) => Err(error),
        };
        match &letter {
            Ok(()) => {
                tracing::error!(orders = batch.orders.len(), reason, "a message was stored as a dead letter");
                counter!("stampede_queue_dead_letters_total").increment(1);
            }
            Err(error) => tracing::debug!(%sale, %error, "cannot store a dead letter yet"),
        }
        stored.push(letter.is_ok());
    }
    stored
}

//! Messages of a sale whose orders cannot be recorded, while those of other sales can: another client holds the sale's row locked, or a
//! trigger refuses its orders. They are kept in the ledger, and acknowledged, so that they do not fill what a consumer may receive of
//! their partition. A marker then passes as well; a rebuild leaves such a sale closed until its messages are recorded.
//!
//! While the whole database is away nothing can be kept in it, and the messages stay in the broker.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use metrics::{counter, gauge};
use sha2::{Digest as _, Sha256};
use stampede_core::SaleId;
use stampede_core::ports::{LedgerError, ParkedMessage};
use stampede_queue::{Batch, Payload, message};
use tokio::task::JoinSet;

use super::rabbitmq_consumer::{record_batches, store_as_dead_letters};
use crate::alerts::AlertKind;
use crate::error::describe;
use crate::tier::redis::RedisTier;

/// Messages that are stored in one transaction.
const STORED: usize = 64;
/// Messages of a sale that are read, and recorded, at once.
const READ: u32 = 16;
/// How often consumers look for parked messages.
const INTERVAL: Duration = Duration::from_secs(1);
/// The pause before messages of a sale are tried again that could not be recorded.
const PAUSE: Duration = Duration::from_secs(5);

/// Keeps messages of a sale in the ledger. Returns whether all of them are; otherwise they must stay in the queue.
pub(super) async fn store(tier: &RedisTier, sale: SaleId, batches: &[Arc<Batch>], limit: u64) -> bool {
    match try_store(tier, sale, batches, limit).await {
        Ok(true) => {
            tracing::warn!(%sale, messages = batches.len(), "orders cannot be recorded; their messages wait in the database");
            counter!("stampede_queue_parked_total").increment(batches.len() as u64);
            raise_parked(tier, sale).await;
            true
        }
        Ok(false) => {
            let message = format!(
                "{limit} messages wait in the database because their orders cannot be recorded (rabbitmq.max_parked); sale {sale} \
                 holds up the other sales of its partition"
            );
            tracing::error!(%sale, limit, "too many messages wait in the database");
            raise(tier, "queue".to_owned(), message).await;
            false
        }
        Err(error) => {
            tracing::warn!(%sale, error, "messages stay in the queue");
            false
        }
    }
}

async fn raise_parked(tier: &RedisTier, sale: SaleId) {
    let message = "its orders cannot be recorded, while those of other sales can; they wait in the database";
    raise(tier, format!("sale {sale}"), message.to_owned()).await;
}

async fn raise(tier: &RedisTier, about: String, message: String) {
    tier.alerts().raise(AlertKind::NotRecorded, about, message).await;
}

async fn try_store(tier: &RedisTier, sale: SaleId, batches: &[Arc<Batch>], limit: u64) -> Result<bool, String> {
    for batches in batches.chunks(STORED) {
        let parked = |batch: &Arc<Batch>| {
            let payload = message::encode_batch(batch).map_err(|error| error.to_string());
            payload.map(|payload| ParkedMessage { id: Sha256::digest(&payload).into(), sale, payload })
        };
        let messages: Vec<ParkedMessage> = batches.iter().map(parked).collect::<Result<_, String>>()?;
        if !tier.ledger().park(&messages, limit).await.map_err(|error| describe(&error))? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Records parked messages as soon as that is possible, until the tier is dropped. One task for each sale that has some: as many as may be
/// parked at the most.
pub(in crate::tier) async fn run(tier: Weak<RedisTier>) {
    let parked = gauge!("stampede_queue_parked_messages");
    counter!("stampede_queue_parked_total").increment(0);
    let (mut busy, mut tasks) = (HashSet::new(), JoinSet::new());
    loop {
        {
            let Some(tier) = tier.upgrade() else { return };
            match tier.ledger().parked_sales().await {
                Ok(sales) => {
                    let messages: u64 = sales.iter().map(|(_, messages)| messages).sum();
                    parked.set(u32::try_from(messages).unwrap_or(u32::MAX));
                    for &(sale, _) in &sales {
                        if busy.insert(sale) {
                            tasks.spawn(record_sale(tier.clone(), sale));
                        }
                    }
                    // The alert is repeated for as long as some are parked.
                    for (sale, _) in sales {
                        raise_parked(&tier, sale).await;
                    }
                }
                Err(error) => tracing::debug!(error = describe(&error), "cannot read the parked messages"),
            }
        }
        tokio::time::sleep(INTERVAL).await;
        while let Some(done) = tasks.try_join_next() {
            match done {
                Ok(sale) => _ = busy.remove(&sale),
                Err(error) => {
                    tracing::error!(%error, "a task that records parked messages has failed");
                    busy.clear();
                }
            }
        }
    }
}

async fn record_sale(tier: Arc<RedisTier>, sale: SaleId) -> SaleId {
    match record(&tier, sale, None).await {
        Ok(()) => tracing::info!(%sale, "the orders that could not be recorded are recorded"),
        Err(error) => {
            tracing::debug!(%sale, error, "parked messages cannot be recorded yet");
            tokio::time::sleep(PAUSE).await;
        }
    }
    sale
}

/// In a rebuild, before a sale gets its next epoch: records its parked messages. What the database rejects goes into quarantine, unless every
/// order of a batch fails. `timeout` is for each call.
pub(in crate::tier) async fn record_before_load(
    tier: &Arc<RedisTier>,
    sale: SaleId,
    timeout: Duration,
) -> Result<(), String> {
    record(tier, sale, Some(timeout)).await
}

/// Records all parked messages of a sale, and deletes them. Those that cannot be recorded hold up no others. Without a time limit it waits
/// as long as the ledger does not answer.
async fn record(tier: &Arc<RedisTier>, sale: SaleId, timeout: Option<Duration>) -> Result<(), String> {
    let failed = |error: LedgerError| describe(&error);
    let is_missing = tier.is_missing(sale).await.map_err(failed)?;
    let (mut after, mut is_all) = (None, true);
    loop {
        let messages = tier.ledger().parked(sale, after, READ).await.map_err(failed)?;
        let Some(last) = messages.last() else {
            if !is_all {
                return Err(format!("some orders of sale {sale} cannot be recorded"));
            }
            // Messages with lower ids may have been parked meanwhile.
            if after.take().is_none() {
                return Ok(());
            }
            continue;
        };
        after = Some(last.id);
        for messages in groups(messages, tier.config.max_batch)? {
            let (messages, batches): (Vec<ParkedMessage>, Vec<Arc<Batch>>) = messages.into_iter().unzip();
            let recording = async {
                match &tier.broker {
                    Some(broker) if is_missing => store_as_dead_letters(broker, sale, &batches).await,
                    _ => record_batches(tier, sale, &batches, timeout.is_some()).await,
                }
            };
            // A call that takes too long says that the ledger records nothing of this sale.
            let done = match timeout {
                None => recording.await,
                Some(timeout) => tokio::time::timeout(timeout, recording)
                    .await
                    .map_err(|_| format!("orders of sale {sale} cannot be recorded"))?,
            };
            is_all &= done.iter().all(|done| *done);
            let recorded: Vec<_> =
                messages.into_iter().zip(done).filter(|(_, done)| *done).map(|(message, _)| message).collect();
            tier.ledger().unpark(&recorded).await.map_err(failed)?;
        }
    }
}

/// Messages that are recorded together, with the orders that they contain.
type Group = Vec<(ParkedMessage, Arc<Batch>)>;

/// Divides messages into groups of at most `max_orders` orders, or of one message.
fn groups(messages: Vec<ParkedMessage>, max_orders: usize) -> Result<Vec<Group>, String> {
    let (mut groups, mut orders): (Vec<Group>, _) = (Vec::new(), 0);
    for message in messages {
        let Payload::Batch(batch) = message::decode(message.payload.clone()) else {
            return Err(format!("a parked message of sale {} cannot be read", message.sale));
        };
        let (size, item) = (batch.orders.len(), (message, Arc::new(batch)));
        match groups.last_mut() {
            Some(group) if orders + size <= max_orders => {
                orders += size;
                group.push(item);
            }
            _ => {
                orders = size;
                groups.push(vec![item]);
            }
        }
    }
    Ok(groups)
}

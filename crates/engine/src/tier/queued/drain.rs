//! In a rebuild: waits until every message that was confirmed before is recorded.
//!
//! A marker is published to each partition. Consumers get the messages of a partition in their order, and report a marker in the ledger
//! once everything before it is recorded ([`super::rabbitmq_consumer`]). This node consumes as well meanwhile, so that a rebuild does not
//! depend on other processes; where one of them is the active consumer, this one stands by.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::QueueRecords;
use stampede_queue::Marker;
use stampede_redis::Backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::broker::Broker;
use super::rabbitmq_consumer;
use crate::error::describe;
use crate::tier::redis::RedisTier;

/// How long a rebuild waits for the markers. After that it is begun again. Longer than the broker takes to notice that the active consumer
/// hangs.
const TIMEOUT: Duration = Duration::from_secs(30);
/// A marker that has not come through after this time is published again: the broker may have lost what it had not confirmed.
const REPEAT_AFTER: Duration = Duration::from_secs(10);

/// Why the markers have not come through in time.
pub(in crate::tier) async fn drain(
    tier: &Arc<RedisTier>,
    broker: &Arc<Broker>,
    incarnation: u64,
) -> Result<(), String> {
    let stop = CancellationToken::new();
    // The consumer finishes what it has begun after this function has returned.
    let _guard = stop.clone().drop_guard();
    if !tier.consumes() {
        tokio::spawn(rabbitmq_consumer::run(Arc::downgrade(tier), broker.clone(), stop));
    }
    let deadline = Instant::now() + TIMEOUT;
    let mut reason = String::new();
    while Instant::now() < deadline {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));
        match tokio::time::timeout_at(deadline, broker.publish_marker(Marker::Rebuild { incarnation })).await {
            Err(_) => "RabbitMQ does not confirm a marker".clone_into(&mut reason),
            Ok(Ok(())) => {
                let repeat_at = deadline.min(Instant::now() + REPEAT_AFTER);
                while Instant::now() < repeat_at {
                    match passed(tier.ledger(), incarnation, broker.partitions()).await {
                        Ok(true) => return Ok(()),
                        Ok(false) => "orders that were confirmed earlier are not recorded yet".clone_into(&mut reason),
                        Err(error) => reason = error,
                    }
                    backoff.sleep().await;
                }
            }
            Ok(Err(error)) => {
                reason = error.to_string();
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
    Err(reason)
}

async fn passed(ledger: &(dyn QueueRecords + '_), incarnation: u64, partitions: u16) -> Result<bool, String> {
    let passed = ledger.passed_markers(incarnation).await.map_err(|error| describe(&error))?;
    Ok(passed >= partitions)
}

//! What an operator does with the dead-letter queue. Each action has a connection of its own: what it receives and does not acknowledge
//! goes back to its place when the connection ends.

use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicGetOptions};
use lapin::types::AMQPValue;

use super::connection::Link;
use super::topology::Target;
use super::{RabbitMq, message};
use crate::{DeadLetter, DeadLetterId, Payload, QueueError};

/// How many dead letters are searched for one.
const MAX_SEARCHED: usize = 10_000;

impl RabbitMq {
    async fn open_dead_letters(&self) -> Result<(Link, Channel), QueueError> {
        self.setup.open("operator").await.map_err(|error| QueueError::NotSent(error.to_string()))
    }

    /// Receives the oldest dead letter that this channel has not received yet, with its number on the channel.
    async fn next_dead_letter(&self, channel: &Channel) -> Result<Option<(u64, DeadLetter)>, QueueError> {
        let queue = self.setup.topology.queue(Target::DeadLetters);
        let getting = channel.basic_get(queue.into(), BasicGetOptions { no_ack: false });
        let found = self.setup.answer(getting).await.map_err(|error| QueueError::NotSent(error.to_string()))?;
        Ok(found.map(|found| {
            let delivery = found.delivery;
            let headers = delivery.properties.headers().as_ref();
            let reason = match headers.and_then(|headers| headers.inner().get("reason")) {
                Some(AMQPValue::LongString(text)) => text.to_string(),
                _ => String::new(),
            };
            let letter = DeadLetter { id: DeadLetterId::of(&delivery.data), reason, bytes: delivery.data };
            (delivery.delivery_tag, letter)
        }))
    }

    pub(super) async fn list_dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let (link, channel) = self.open_dead_letters().await?;
        let mut found = Vec::new();
        while found.len() < limit
            && let Some((_, letter)) = self.next_dead_letter(&channel).await?
        {
            found.push(letter);
        }
        link.close().await;
        Ok(found)
    }

    /// Removes a dead letter, after publishing its content again if `retry`. Returns whether there was one.
    pub(super) async fn remove_dead_letter(&self, id: DeadLetterId, retry: bool) -> Result<bool, QueueError> {
        let (link, channel) = self.open_dead_letters().await?;
        let mut removed = false;
        for _ in 0..MAX_SEARCHED {
            let Some((number, letter)) = self.next_dead_letter(&channel).await? else { break };
            if letter.id != id {
                continue;
            }
            if retry {
                let partition = match message::decode(letter.bytes.clone()) {
                    Payload::Batch(batch) => self.setup.topology.partition_of(batch.sale),
                    // It comes back as a dead letter.
                    Payload::Marker(_) | Payload::Undecodable { .. } => 0,
                };
                self.publisher.publish(Target::Partition(partition), letter.bytes, None).await?;
            }
            let acknowledging = channel.basic_ack(number, BasicAckOptions { multiple: false });
            acknowledging.await.map_err(|error| QueueError::Unconfirmed(error.to_string()))?;
            removed = true;
            break;
        }
        // The broker handles what was sent before it answers that the connection is closed.
        link.close().await;
        Ok(removed)
    }
}

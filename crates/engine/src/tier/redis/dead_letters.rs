//! Dead letters: in RabbitMQ, or entries of outboxes that could not be read.

use stampede_queue::{DeadLetter, DeadLetterId, QueueError};

use super::RedisTier;
use crate::error::Error;

/// How many are searched for one.
const MAX_SEARCHED: usize = 10_000;

fn unready(error: &QueueError) -> Error {
    tracing::warn!(%error, "cannot reach the dead letters");
    Error::Unready("RabbitMQ cannot be used".to_owned())
}

pub(super) async fn list(tier: &RedisTier, limit: usize) -> Result<Vec<DeadLetter>, Error> {
    if let Some(broker) = &tier.broker {
        return broker.dead_letters(limit).await.map_err(|error| unready(&error));
    }
    let letter = |content: String| {
        let (bytes, reason) = (content.into_bytes(), "an entry of the outbox cannot be read".to_owned());
        DeadLetter { id: DeadLetterId::of(&bytes), reason, bytes }
    };
    Ok(tier.gate.dead_entries(limit).await?.iter().map(|dead| letter(dead.content())).collect())
}

pub(super) async fn remove(tier: &RedisTier, id: DeadLetterId, retry: bool) -> Result<bool, Error> {
    if let Some(broker) = &tier.broker {
        return broker.remove_dead_letter(id, retry).await.map_err(|error| unready(&error));
    }
    let dead = tier.gate.dead_entries(MAX_SEARCHED).await?;
    let Some(dead) = dead.into_iter().find(|dead| DeadLetterId::of(dead.content().as_bytes()) == id) else {
        return Ok(false);
    };
    if retry {
        let still = || Error::Illegal("the message still cannot be read".to_owned());
        let (sale, entry) = dead.parse().ok_or_else(still)?;
        tier.seller(sale)?.record_entries(&[entry], tier.config.max_batch).await;
    }
    Ok(tier.gate.remove_dead(&dead).await?)
}

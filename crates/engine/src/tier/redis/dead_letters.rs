//! Dead letters: entries of outboxes that could not be read, and with RabbitMQ messages that could not be read.

use stampede_queue::{DeadLetter, DeadLetterId, QueueError};

use super::RedisTier;
use crate::error::Error;

/// How many are searched for one.
const MAX_SEARCHED: usize = 10_000;

fn unready(error: &QueueError) -> Error {
    tracing::warn!(%error, "cannot reach the dead letters");
    Error::Unready("RabbitMQ cannot be used".to_owned())
}

/// The entries of outboxes come first.
pub(super) async fn list(tier: &RedisTier, limit: usize) -> Result<Vec<DeadLetter>, Error> {
    let letter = |bytes: Vec<u8>| {
        let reason = "an entry of the outbox cannot be read".to_owned();
        DeadLetter { id: DeadLetterId::of(&bytes), reason, bytes }
    };
    let mut letters: Vec<_> = tier.gate.dead_entries(limit).await?.iter().map(|dead| letter(dead.content())).collect();
    if let Some(broker) = &tier.broker
        && letters.len() < limit
    {
        letters.extend(broker.dead_letters(limit - letters.len()).await.map_err(|error| unready(&error))?);
    }
    Ok(letters)
}

pub(super) async fn remove(tier: &RedisTier, id: DeadLetterId, retry: bool) -> Result<bool, Error> {
    let dead = tier.gate.dead_entries(MAX_SEARCHED).await?;
    let Some(dead) = dead.into_iter().find(|dead| DeadLetterId::of(&dead.content()) == id) else {
        let Some(broker) = &tier.broker else { return Ok(false) };
        return broker.remove_dead_letter(id, retry).await.map_err(|error| unready(&error));
    };
    if retry {
        let still = || Error::Illegal("the message still cannot be read".to_owned());
        let (sale, entry) = dead.parse().ok_or_else(still)?;
        if tier.is_missing(sale).await? {
            return Err(Error::Illegal(format!("the database has no sale {sale}")));
        }
        if !tier.seller(sale)?.record_entries(&[entry], tier.config.max_batch).await {
            return Err(Error::Unready("its orders cannot be recorded now; the dead letter is kept".to_owned()));
        }
    }
    Ok(tier.gate.remove_dead(&dead).await?)
}

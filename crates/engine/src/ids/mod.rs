//! Makes the ids of a node.
//!
//! - [`IdConfig`]: the two ways, [`Snowflake`] and a counter in Redis
//! - `redis_counter`: blocks of a counter in Redis, fetched ahead; why its ids never repeat
//! - `blocks`: what was fetched, and the ids that are made of it

mod blocks;
mod redis_counter;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ids::{IdGenerator, IdKind, Snowflake};
use stampede_core::ports::{Ledger, LedgerError};
use stampede_redis::Client;
use tokio::task::JoinSet;

use self::redis_counter::RedisCounter;
use crate::error::Error;
use crate::tier::gate_record;

/// How long a start waits for the first ids. Redis may be away, and the node starts all the same.
const FIRST_IDS_TIMEOUT: Duration = Duration::from_secs(3);

/// How ids are made.
#[derive(Debug, Clone)]
pub enum IdConfig {
    /// From the time and a worker number that the ledger leases.
    Snowflake,
    /// From the time and a counter in this Redis.
    Redis(Arc<Client>),
}

impl IdConfig {
    pub(crate) const fn kind(&self) -> IdKind {
        match self {
            Self::Snowflake => IdKind::Snowflake,
            Self::Redis(_) => IdKind::Counter,
        }
    }
}

/// The generators of a node's ids.
#[derive(Debug)]
pub(crate) struct Ids {
    /// Holds the worker number, which tells the nodes apart whichever way ids are made.
    pub(crate) worker: Arc<Snowflake>,
    orders: Arc<dyn IdGenerator>,
    others: Arc<dyn IdGenerator>,
    counters: Vec<Arc<RedisCounter>>,
}

impl Ids {
    /// Starts the tasks that fetch ids into `workers`.
    pub(crate) async fn start(
        config: IdConfig,
        ledger: &dyn Ledger,
        worker: Arc<Snowflake>,
        workers: &mut JoinSet<()>,
    ) -> Result<Self, LedgerError> {
        let client = match config {
            IdConfig::Snowflake => {
                return Ok(Self { orders: worker.clone(), others: worker.clone(), worker, counters: Vec::new() });
            }
            IdConfig::Redis(client) => client,
        };
        let ledger_id = gate_record(ledger).await?.ledger_id;
        let mut start = |prefix: &str| {
            let (counter, fetching) = RedisCounter::new(client.clone(), format!("stampede:{ledger_id}:ids:{prefix}"));
            workers.spawn(fetching);
            counter
        };
        let (orders, others) = (start("order"), start("other"));
        let counters = vec![orders.clone(), others.clone()];
        let first = async {
            for counter in &counters {
                counter.wait_until_usable().await;
            }
        };
        if tokio::time::timeout(FIRST_IDS_TIMEOUT, first).await.is_err() {
            tracing::warn!("no ids can be made: Redis cannot be used; trying again");
        }
        Ok(Self { orders, others, worker, counters })
    }

    /// The id of an order.
    pub(crate) fn next_order(&self) -> Result<i64, Error> {
        Ok(self.orders.next()?)
    }

    /// The id of anything but an order.
    pub(crate) fn next(&self) -> Result<i64, Error> {
        Ok(self.others.next()?)
    }

    /// Whether ids can be made.
    pub(crate) fn ready(&self) -> Result<(), Error> {
        let is_usable = match &self.counters[..] {
            [] => self.worker.is_usable(),
            counters => counters.iter().all(|counter| counter.is_usable()),
        };
        if is_usable { Ok(()) } else { Err(Error::Unready("no ids can be made".to_owned())) }
    }
}

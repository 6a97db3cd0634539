//! Copies the orders of sales that are long over into the index by user, so that listing a user's orders does not search every
//! sale.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::Clock;
use stampede_core::ports::{Fenced, OrderLedger};

use crate::error::describe;
use crate::retention::RETENTION;
use crate::scheduled::{Schedule, WorkPermit};

const INTERVAL: Duration = Duration::from_secs(60);
/// Orders per transaction: few, so that nothing waits for it.
const BATCH: u32 = 1000;
/// Pause between two transactions, so that this takes a small part of the database's time.
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) async fn run(ledger: Arc<dyn OrderLedger>, clock: Arc<dyn Clock>, schedule: Schedule) {
    loop {
        if let Some(permit) = schedule.begin().await {
            index_all(ledger.as_ref(), clock.as_ref(), &permit).await;
            permit.end().await;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Copies until nothing is left, or this node must not go on.
async fn index_all(ledger: &dyn OrderLedger, clock: &dyn Clock, permit: &WorkPermit) {
    loop {
        match ledger.index_orders(permit.fence(), clock.now().minus(RETENTION), BATCH).await {
            Ok(Fenced::Done(true)) => tokio::time::sleep(PAUSE).await,
            Ok(Fenced::Done(false)) => return,
            Ok(Fenced::Superseded) => return permit.warn_superseded(),
            Err(error) => {
                tracing::warn!(error = describe(&error), "cannot index orders by user; trying again");
                return;
            }
        }
    }
}

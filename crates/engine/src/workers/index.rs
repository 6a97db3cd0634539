//! Copies the orders of sales that are long over into the index by user, so that listing a user's orders does not search every
//! sale.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::Clock;
use stampede_core::ports::OrderLedger;

use crate::error::describe;
use crate::retention::RETENTION;

const INTERVAL: Duration = Duration::from_secs(60);
/// Orders per transaction: few, so that nothing waits for it.
const STEP: u32 = 1000;
/// Pause between two transactions, so that this takes a small part of the database's time.
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) async fn run(ledger: Arc<dyn OrderLedger>, clock: Arc<dyn Clock>) {
    loop {
        let pause = match ledger.index_orders(clock.now().minus(RETENTION), STEP).await {
            Ok(true) => PAUSE,
            Ok(false) => INTERVAL,
            Err(error) => {
                tracing::warn!(error = describe(&error), "cannot index orders by user; trying again");
                INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

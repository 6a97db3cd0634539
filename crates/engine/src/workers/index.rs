//! Copies the orders of sales that are long over into the index by user, so that the list of a user's orders does not cost a look
//! into every sale there ever was.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::Clock;
use stampede_core::ports::Ledger;

use crate::commit::describe;
use crate::engine::KEPT_AFTER_END;

const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Orders in one step: a short transaction, so that nothing waits for it.
const STEP: u32 = 1000;
/// Between two steps, so that this takes a small part of the database's time.
const PAUSE: Duration = Duration::from_millis(50);

pub(crate) async fn run(ledger: Arc<dyn Ledger>, clock: Arc<dyn Clock>) {
    loop {
        let pause = match ledger.index_orders(clock.now().minus(KEPT_AFTER_END), STEP).await {
            Ok(true) => PAUSE,
            Ok(false) => LOOK_EVERY,
            Err(error) => {
                tracing::warn!(error = describe(&error), "cannot index orders by user; trying again");
                LOOK_EVERY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

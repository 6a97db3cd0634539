//! How fast a consumer records the orders that wait in the queue, after everything else was measured.

use std::time::{Duration, Instant};

use stampede_core::SaleId;

use crate::report::Drain;
use crate::system::{System, SystemError};

/// How often the ledger is asked how much is recorded: one query for all sales.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long nothing may be recorded.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts the consumer, and measures from the first order that it records to the last. Buyers must have been answered: the number of orders
/// that wait is read before that.
pub(crate) async fn run(system: &mut System, sales: &[SaleId]) -> Result<Drain, SystemError> {
    let (before, expected) = (system.recorded(sales).await?, system.marks_of(sales).await?);
    system.start_late_consumer()?;
    let (mut recorded, mut begun_at, mut changed_at) = (before, Instant::now(), Instant::now());
    while recorded < expected {
        tokio::time::sleep(INTERVAL).await;
        let asked_at = Instant::now();
        let now = system.recorded(sales).await?;
        if now > recorded {
            (recorded, changed_at) = (now, Instant::now());
        } else if changed_at.elapsed() > TIMEOUT {
            return Err(SystemError::Unexpected(format!(
                "a consumer that has recorded {recorded} of {expected} orders"
            )));
        }
        if recorded == before {
            begun_at = asked_at;
        }
    }
    let elapsed = changed_at.duration_since(begun_at).as_secs_f64();
    let orders = expected - before;
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    let per_s = if elapsed > 0.0 { orders as f64 / elapsed } else { 0.0 };
    let batch = system.late_batch().await?;
    Ok(Drain { orders, per_s, batch, raw_per_s: None, vs_raw: None, sales: sales.to_vec() })
}

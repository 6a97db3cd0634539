//! Renews the worker number of the id generator at a third of its span, so that two renewals may fail.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::Timestamp;
use stampede_core::ids::{Lease, Snowflake};
use stampede_core::ports::{Result, WorkerLeases};

use crate::error::describe;

pub(crate) const SPAN: Duration = Duration::from_secs(60);

pub(crate) async fn first(ledger: &dyn WorkerLeases, holder: &str) -> Result<Lease> {
    ledger.lease_worker(holder, None, Timestamp::from_ms(0), SPAN).await
}

pub(crate) async fn run(ledger: Arc<dyn WorkerLeases>, ids: Arc<Snowflake>, holder: String) {
    let mut pause = SPAN / 3;
    loop {
        tokio::time::sleep(pause).await;
        match ledger.lease_worker(&holder, Some(ids.worker()), ids.unused_from(), SPAN).await {
            Ok(lease) => {
                ids.grant(lease);
                pause = SPAN / 3;
            }
            Err(error) => {
                tracing::warn!(error = describe(&error), "cannot renew the worker lease; trying again");
                pause = Duration::from_secs(1);
            }
        }
    }
}

//! Deletes sessions and login codes that have expired from the ledger.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::Clock;
use stampede_core::ports::{Accounts, Fenced, Ledger};

use crate::error::describe;
use crate::scheduled::Schedule;

const INTERVAL: Duration = Duration::from_secs(60);

pub(crate) async fn run(
    accounts: Arc<dyn Accounts>,
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    schedule: Schedule,
) {
    loop {
        if let Some(permit) = schedule.begin().await {
            let deleting = async {
                let now = super::earlier_now(clock.as_ref(), ledger.as_ref()).await?;
                accounts.delete_expired(permit.fence(), now).await
            };
            match deleting.await {
                Ok(Fenced::Done(_)) => {}
                Ok(Fenced::Superseded) => permit.warn_superseded(),
                // What has expired waits for the next round.
                Err(error) => tracing::warn!(error = describe(&error), "cannot delete what has expired"),
            }
            permit.end().await;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

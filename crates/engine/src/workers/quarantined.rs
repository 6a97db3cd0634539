//! Shows as a metric how many orders are in quarantine, of all sales and from all processes, and reminds operators of them.

use std::sync::Arc;
use std::time::Duration;

use metrics::gauge;
use stampede_core::ports::OrderLedger;

use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;

const INTERVAL: Duration = Duration::from_secs(5);

pub(crate) async fn run(ledger: Arc<dyn OrderLedger>, alerts: Arc<Alerts>) {
    let quarantined = gauge!("stampede_quarantined_orders");
    quarantined.set(0);
    loop {
        match ledger.quarantined_sales().await {
            Ok(sales) => {
                let orders: u64 = sales.iter().map(|(_, orders)| orders).sum();
                quarantined.set(u32::try_from(orders).unwrap_or(u32::MAX));
                // The alert that was raised with the first of them is repeated for as long as there are some.
                for (sale, orders) in sales {
                    let message = format!("orders in quarantine: {orders}");
                    alerts.raise(AlertKind::Quarantined, format!("sale {sale}"), message).await;
                }
            }
            // The last number is shown until the ledger answers again.
            Err(error) => tracing::debug!(error = describe(&error), "cannot count the orders in quarantine"),
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

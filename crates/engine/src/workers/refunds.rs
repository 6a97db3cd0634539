//! Returns payments that cannot pay their orders, and those of refunded orders.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use metrics::{Counter, counter};
use stampede_core::ports::{Ledger, LedgerError};
use stampede_core::{Clock, Payment, RefundAttempt, Timestamp};

use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;
use crate::payments::PaymentConfig;

/// How often the ledger is asked what is due.
const INTERVAL: Duration = Duration::from_millis(500);
/// Payments that are read at once.
const READ: u32 = 200;
/// Calls of the provider under way.
const CONCURRENT_CALLS: usize = 8;
/// How long the provider may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the alerts of payments that an operator must return are raised again. Each is sent only after `alerts.repeat_after`.
const REMIND_INTERVAL: Duration = Duration::from_secs(60);
/// The longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(3600);

pub(crate) struct Refunds {
    pub ledger: Arc<dyn Ledger>,
    pub clock: Arc<dyn Clock>,
    pub config: PaymentConfig,
    pub alerts: Arc<Alerts>,
}

/// The pause after this many attempts.
fn pause(first: Duration, tries: u32) -> Duration {
    super::doubled(first, tries).min(MAX_PAUSE)
}

/// What an alert about a payment is about.
fn about(payment: &Payment) -> String {
    format!("payment {} {}", payment.reported.provider, payment.reported.transaction)
}

impl Refunds {
    /// Any number of nodes may do this at once: an attempt is claimed in the ledger before the provider is called.
    pub(crate) async fn run(self) {
        let refunded = counter!("stampede_refunds_total");
        refunded.increment(0);
        let mut reminded_at = Instant::now();
        loop {
            if let Err(error) = self.return_due(&refunded).await {
                tracing::warn!(error = describe(&error), "cannot return payments; trying again");
            }
            if reminded_at.elapsed() >= REMIND_INTERVAL {
                reminded_at = Instant::now();
                if let Err(error) = self.remind().await {
                    tracing::warn!(error = describe(&error), "cannot read payments to be returned; trying again");
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Raises the alerts again of the oldest payments that only an operator can return.
    async fn remind(&self) -> Result<(), LedgerError> {
        for attempt in self.ledger.open_refunds(READ).await? {
            if attempt.due_at.is_none() {
                let error = attempt.error.as_deref().unwrap_or_default();
                self.alert(&attempt.payment, attempt.tries, error).await;
            }
        }
        Ok(())
    }

    /// Asks an operator to return a payment that the provider has not returned in so many attempts.
    async fn alert(&self, payment: &Payment, tries: u32, error: &str) {
        let reason = payment.reason.map_or("", |reason| reason.as_str());
        let what =
            format!("a payment of {} cents for order {} ({reason})", payment.reported.amount_cents, payment.order);
        let (kind, message) = match tries {
            0 => (AlertKind::RefundDue, format!("{what} must be returned")),
            _ => (AlertKind::RefundFailed, format!("{what} was not returned after {tries} attempts: {error}")),
        };
        self.alerts.raise(kind, about(payment), message).await;
    }

    async fn now(&self) -> Result<Timestamp, LedgerError> {
        super::earlier_now(self.clock.as_ref(), self.ledger.as_ref()).await
    }

    async fn return_due(&self, refunded: &Counter) -> Result<(), LedgerError> {
        if self.ledger.due_refunds(self.clock.now(), 1).await?.is_empty() {
            return Ok(());
        }
        let due = self.ledger.due_refunds(self.now().await?, READ).await?;
        let attempts = stream::iter(due).map(|attempt| self.attempt(attempt, refunded));
        let done: Vec<_> = attempts.buffer_unordered(CONCURRENT_CALLS).collect().await;
        done.into_iter().collect()
    }

    async fn attempt(&self, mut attempt: RefundAttempt, refunded: &Counter) -> Result<(), LedgerError> {
        let reported = &attempt.payment.reported;
        // Nobody has moved it to a new order in time; from here on nobody can.
        if attempt.held && !self.ledger.end_hold(reported, self.clock.now()).await? {
            return Ok(());
        }
        let Some(provider) = self.config.provider_of(reported) else {
            self.alert(&attempt.payment, 0, "").await;
            return self.ledger.fail_refund(&attempt, "no provider is set that returns it", None).await;
        };
        let (tries, now) = (attempt.tries + 1, self.now().await?);
        let pause = pause(self.config.refund_pause, tries);
        if !self.ledger.begin_refund(&attempt, now.plus(CALL_TIMEOUT + pause)).await? {
            return Ok(());
        }
        attempt.tries = tries;
        let payment = &attempt.payment;
        let error = match tokio::time::timeout(CALL_TIMEOUT, provider.refund(payment)).await {
            Ok(Ok(())) => {
                self.ledger.complete_refund(&payment.reported, self.clock.now()).await?;
                refunded.increment(1);
                return Ok(());
            }
            Ok(Err(error)) => describe(&*error),
            Err(_) => "the provider did not answer in time".to_owned(),
        };
        tracing::warn!(about = about(payment), tries, error, "the provider has not returned a payment");
        if tries < self.config.refund_tries {
            return self.ledger.fail_refund(&attempt, &error, Some(self.now().await?.plus(pause))).await;
        }
        self.alert(payment, tries, &error).await;
        self.ledger.fail_refund(&attempt, &error, None).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound() {
        let first = Duration::from_secs(1);
        let pauses = [1, 2, 3, 12, 40].map(|tries| pause(first, tries).as_secs());
        assert_eq!(pauses, [1, 2, 4, 2048, 3600]);
    }
}

//! Cancels orders that were not paid in time, so that their stock is sold again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Counter, counter};
use stampede_core::ports::{Ledger, LedgerError};
use stampede_core::{Clock, OrderId, SaleId};
use tokio::sync::Notify;

use super::{doubled, earlier_now};
use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;
use crate::scheduled::Schedule;

/// How often the ledger is asked what is due.
const INTERVAL: Duration = Duration::from_millis(500);
/// Recorded batches that are looked at in one call. (SQLite allows 500 parts in a query.)
const BATCHES: u32 = 400;
/// A call is followed by a pause as long as the call took, but not longer than this, so that buyers get a part of the time in which the row
/// of their sale is locked.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How long a sale is left out after its first failure. The time doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// After this many failures of a sale in a row, which takes about a minute if its row is locked, an alert is raised.
const MAX_FAILURES: u32 = 6;
/// Sales that are left out at once. If more fail, the cause is not a single sale.
const MAX_FAILING: usize = 500;
/// An order whose row is locked for longer than this is not just being paid: an alert is raised.
const LONGEST_LOCK: Duration = Duration::from_secs(60);

/// Any number of nodes may do this at once: the lock of `schedule` only avoids that they do the same work. An order is due when it is so by
/// the clock of the ledger and by that of this node, so that one clock that jumps ahead cancels nothing.
pub(crate) struct PaymentDeadlines {
    pub ledger: Arc<dyn Ledger>,
    pub clock: Arc<dyn Clock>,
    pub schedule: Schedule,
    /// Notified when marks are to be released.
    pub release_added: Arc<Notify>,
    pub alerts: Arc<Alerts>,
}

/// A sale whose orders could not be cancelled.
#[derive(Debug, Clone, Copy)]
struct Failing {
    failures: u32,
    /// It is left out until then.
    retry_at: Instant,
}

/// The first order of a sale that is due and was left out, because its row is locked.
#[derive(Debug, Clone, Copy)]
struct Locked {
    order: OrderId,
    since: Instant,
    /// The sale is left out until then.
    retry_at: Instant,
}

/// Sales that are left out for a while, so that they hold up no others.
#[derive(Debug, Default)]
struct Delayed {
    failing: HashMap<SaleId, Failing>,
    locked: HashMap<SaleId, Locked>,
}

impl Delayed {
    /// The sales that are left out now. One that has not failed again for a while after its retry is forgotten.
    fn left_out(&mut self, now: Instant) -> Vec<SaleId> {
        self.failing.retain(|_, failing| now < failing.retry_at + LONGEST_RETRY);
        self.locked.retain(|_, locked| now < locked.retry_at + LONGEST_RETRY);
        let failing = self.failing.iter().filter(|(_, failing)| now < failing.retry_at).map(|(sale, _)| *sale);
        let locked = self.locked.iter().filter(|(_, locked)| now < locked.retry_at).map(|(sale, _)| *sale);
        failing.chain(locked).take(MAX_FAILING).collect()
    }

    /// Counts a failure. Returns how many there were in a row; `None` if too many sales fail.
    fn add_failure(&mut self, sale: SaleId, now: Instant) -> Option<u32> {
        if self.failing.len() >= MAX_FAILING && !self.failing.contains_key(&sale) {
            return None;
        }
        let failing = self.failing.entry(sale).or_insert(Failing { failures: 0, retry_at: now });
        failing.failures = failing.failures.saturating_add(1);
        failing.retry_at = now + doubled(FIRST_RETRY, failing.failures).min(LONGEST_RETRY);
        Some(failing.failures)
    }

    /// An order was left out because its row is locked, and others of its sale were cancelled (`is_done`) or not: then the sale is left out
    /// until the next round. Returns for how long it was found locked.
    fn add_locked(&mut self, sale: SaleId, order: OrderId, is_done: bool, now: Instant) -> Duration {
        let retry_at = if is_done { now } else { now + INTERVAL };
        let before = self.locked.get(&sale).filter(|before| before.order == order);
        let since = before.map_or(now, |before| before.since);
        self.locked.insert(sale, Locked { order, since, retry_at });
        now - since
    }

    /// What was due of these sales was cancelled, except for what was locked.
    fn remove(&mut self, done: &[SaleId], locked: &[(SaleId, OrderId)]) {
        for sale in done {
            self.failing.remove(sale);
            if !locked.iter().any(|(other, _)| other == sale) {
                self.locked.remove(sale);
            }
        }
    }
}

impl PaymentDeadlines {
    pub(crate) async fn run(self) {
        let expired_orders = counter!("stampede_expired_orders_total");
        expired_orders.increment(0);
        let mut delayed = Delayed::default();
        loop {
            if let Err(error) = self.expire_all(&mut delayed, &expired_orders).await {
                tracing::warn!(
                    error = describe(&error),
                    "cannot cancel orders that were not paid in time; trying again"
                );
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn expire_all(&self, delayed: &mut Delayed, expired_orders: &Counter) -> Result<(), LedgerError> {
        let Some(next) = self.ledger.next_payment_due().await? else { return Ok(()) };
        if next > earlier_now(self.clock.as_ref(), self.ledger.as_ref()).await? {
            return Ok(());
        }
        loop {
            let started = Instant::now();
            // For one page, so that the lock need not be renewed; another node may go on after any.
            let Some(permit) = self.schedule.begin().await else { return Ok(()) };
            let more = self.expire_page(delayed, expired_orders).await;
            permit.end().await;
            if !more? {
                return Ok(());
            }
            tokio::time::sleep(started.elapsed().min(LONGEST_PAUSE)).await;
        }
    }

    /// Cancels what is due of some recorded batches. Returns whether more may be due.
    async fn expire_page(&self, delayed: &mut Delayed, expired_orders: &Counter) -> Result<bool, LedgerError> {
        let now = earlier_now(self.clock.as_ref(), self.ledger.as_ref()).await?;
        let expired = self.ledger.expire_orders(now, BATCHES, &delayed.left_out(Instant::now())).await?;
        expired_orders.increment(expired.orders);
        if expired.orders > 0 {
            self.release_added.notify_one();
        }
        delayed.remove(&expired.done, &expired.locked);
        for (sale, order) in expired.locked {
            let elapsed = delayed.add_locked(sale, order, expired.done.contains(&sale), Instant::now());
            if elapsed >= LONGEST_LOCK {
                self.report_locked(sale, order).await;
            }
        }
        for (sale, error) in expired.failed {
            match delayed.add_failure(sale, Instant::now()) {
                Some(failures) => self.report(sale, failures, &error).await,
                None => return Err(error),
            }
        }
        Ok(expired.more)
    }

    async fn report(&self, sale: SaleId, failures: u32, error: &LedgerError) {
        let error = describe(error);
        tracing::warn!(%sale, failures, error, "unpaid orders of a sale cannot be cancelled; leaving it out for a while");
        if failures >= MAX_FAILURES {
            let message = format!(
                "orders that were not paid in time could not be cancelled {failures} times; their stock is not sold: {error}"
            );
            self.alerts.raise(AlertKind::NotExpired, format!("sale {sale}"), message).await;
        }
    }

    async fn report_locked(&self, sale: SaleId, order: OrderId) {
        let message = format!(
            "order {order} was not paid in time and could not be cancelled for a minute, because another client keeps its row locked; its stock is not sold"
        );
        self.alerts.raise(AlertKind::NotExpired, format!("sale {sale}"), message).await;
    }
}

#[cfg(test)]
mod tests;

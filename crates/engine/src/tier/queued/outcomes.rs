//! Tells those who wait for it what became of an order in the queue.
//!
//! A message says that orders of a sale were recorded. Then the orders of that sale that are waited for are read from the ledger, all
//! with one query. A lost message costs a second, after which all are read. The first look at an order, which may have been recorded before
//! the wait began, shares a query with those of others as well.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, gauge};
use parking_lot::Mutex;
use stampede_core::ports::OrderLedger;
use stampede_core::{Order, OrderId, SaleId};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

use crate::error::{Error, describe};

/// The most callers that wait at once.
const MAX_WAITING: usize = 100_000;
/// Orders that are read with one query.
const READ: usize = 1000;
const INTERVAL: Duration = Duration::from_secs(1);

/// Callers that look orders up once, with or without a row.
type Lookups = HashMap<OrderId, Vec<oneshot::Sender<Option<Order>>>>;

#[derive(Debug, Default)]
struct Waiting {
    callers: HashMap<SaleId, HashMap<OrderId, Vec<oneshot::Sender<Order>>>>,
    /// Sales of which orders were recorded.
    recorded: HashSet<SaleId>,
    /// Orders that may have been recorded before the wait began.
    unread: HashMap<SaleId, HashSet<OrderId>>,
    lookups: Lookups,
}

/// Those who wait for orders on this node.
#[derive(Debug)]
pub(in crate::tier) struct Outcomes {
    waiting: Mutex<Waiting>,
    notify: Notify,
    permits: Arc<Semaphore>,
}

impl Default for Outcomes {
    fn default() -> Self {
        Self { waiting: Mutex::default(), notify: Notify::new(), permits: Arc::new(Semaphore::new(MAX_WAITING)) }
    }
}

/// Waits for the row of one order.
#[derive(Debug)]
pub(crate) struct OrderWait {
    outcomes: Arc<Outcomes>,
    sale: SaleId,
    order: OrderId,
    row: oneshot::Receiver<Order>,
    _permit: OwnedSemaphorePermit,
}

impl OrderWait {
    /// The row that the order has now; `None` if it has none. Orders that are recorded later are not missed, because the wait has begun.
    pub(crate) async fn row(&self) -> Result<Option<Order>, Error> {
        let (sender, row) = oneshot::channel();
        self.outcomes.waiting.lock().lookups.entry(self.order).or_default().push(sender);
        self.outcomes.notify.notify_one();
        row.await.map_err(|_| Error::Unready("the database cannot be used".to_owned()))
    }

    /// The order once the ledger has it; `None` if this node stops.
    pub(crate) async fn recorded(mut self) -> Option<Order> {
        (&mut self.row).await.ok()
    }
}

impl Drop for OrderWait {
    fn drop(&mut self) {
        self.row.close();
        let mut waiting = self.outcomes.waiting.lock();
        let Some(orders) = waiting.callers.get_mut(&self.sale) else { return };
        if let Some(callers) = orders.get_mut(&self.order) {
            callers.retain(|caller| !caller.is_closed());
            if callers.is_empty() {
                orders.remove(&self.order);
            }
        }
        if orders.is_empty() {
            waiting.callers.remove(&self.sale);
        }
    }
}

impl Outcomes {
    /// Waits for an order that is not in the queue yet.
    pub(in crate::tier) fn wait_for_new(self: &Arc<Self>, sale: SaleId, order: OrderId) -> Result<OrderWait, Error> {
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| Error::Busy)?;
        let (sender, row) = oneshot::channel();
        let mut waiting = self.waiting.lock();
        waiting.callers.entry(sale).or_default().entry(order).or_default().push(sender);
        drop(waiting);
        Ok(OrderWait { outcomes: self.clone(), sale, order, row, _permit: permit })
    }

    /// Waits for an order that may have been recorded.
    pub(in crate::tier) fn wait_for(self: &Arc<Self>, sale: SaleId, order: OrderId) -> Result<OrderWait, Error> {
        let wait = self.wait_for_new(sale, order)?;
        self.waiting.lock().unread.entry(sale).or_default().insert(order);
        self.notify.notify_one();
        Ok(wait)
    }

    /// Orders of this sale were recorded.
    pub(in crate::tier) fn notify(&self, sale: SaleId) {
        let mut waiting = self.waiting.lock();
        if waiting.callers.contains_key(&sale) {
            waiting.recorded.insert(sale);
            self.notify.notify_one();
        }
    }

    /// Reads what is waited for until the task is aborted.
    pub(in crate::tier) async fn run(self: Arc<Self>, ledger: Arc<dyn OrderLedger>) {
        let queries = counter!("stampede_queue_watch_queries_total");
        queries.increment(0);
        let mut rounds = tokio::time::interval(INTERVAL);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let all = tokio::select! {
                () = self.notify.notified() => false,
                _ = rounds.tick() => true,
            };
            let (due, mut lookups) = self.take_due(all);
            let waiting = MAX_WAITING.saturating_sub(self.permits.available_permits());
            gauge!("stampede_queue_watched_orders").set(u32::try_from(waiting).unwrap_or(u32::MAX));
            for orders in due.chunks(READ) {
                queries.increment(1);
                match ledger.orders_with(orders).await {
                    Ok(rows) => {
                        answer_lookups(&mut lookups, orders, &rows);
                        self.distribute(rows);
                    }
                    Err(error) => {
                        tracing::warn!(
                            error = describe(&error),
                            "cannot read orders that are waited for; trying again"
                        );
                        break;
                    }
                }
            }
        }
    }

    /// The orders to read now, and those who look some of them up.
    fn take_due(&self, all: bool) -> (Vec<OrderId>, Lookups) {
        let mut waiting = self.waiting.lock();
        let (recorded, unread) = (std::mem::take(&mut waiting.recorded), std::mem::take(&mut waiting.unread));
        let lookups = std::mem::take(&mut waiting.lookups);
        let of_sale = |sale: &SaleId| waiting.callers.get(sale).into_iter().flat_map(HashMap::keys).copied();
        let mut due: HashSet<OrderId> = if all {
            waiting.callers.keys().flat_map(of_sale).collect()
        } else {
            recorded.iter().flat_map(of_sale).chain(unread.into_values().flatten()).collect()
        };
        due.extend(lookups.keys());
        (due.into_iter().collect(), lookups)
    }

    fn distribute(&self, rows: Vec<Order>) {
        let mut waiting = self.waiting.lock();
        for row in rows {
            let Some(orders) = waiting.callers.get_mut(&row.sale) else { continue };
            for caller in orders.remove(&row.id).unwrap_or_default() {
                // A caller that has gone does not need it.
                let _ = caller.send(row.clone());
            }
            if orders.is_empty() {
                waiting.callers.remove(&row.sale);
            }
        }
    }
}

/// Answers those who look up one of these orders, which have these rows.
fn answer_lookups(lookups: &mut Lookups, orders: &[OrderId], rows: &[Order]) {
    let mut answer = |order: &OrderId, row: Option<&Order>| {
        for caller in lookups.remove(order).unwrap_or_default() {
            // A caller that has gone does not need it.
            let _ = caller.send(row.cloned());
        }
    };
    rows.iter().for_each(|row| answer(&row.id, Some(row)));
    orders.iter().for_each(|order| answer(order, None));
}

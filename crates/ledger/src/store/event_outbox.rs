//! The outbox of events. An entry is written in the transaction of what it is about: one for a recorded batch, one for each later step of an
//! order. Everything else here is done by the worker that delivers them, and by operators.

use std::collections::HashMap;

use stampede_core::ports::{EventDelivery, HeldEvent, OutboxEntry, OutgoingEvent, RejectedEvent, Result, WaitingStep};
use stampede_core::{Order, OrderEvent, OrderId, OrderStatus, SaleId, StepReason, Timestamp};

use super::events::{self, as_rows};
use super::{Store, list, unreadable};
use crate::db::{Row, Tx, args, expect_rows};

/// The columns of a step, then those of its entry.
const ENTRIES: &str =
    "SELECT order_id, from_status, to_status, at, reason, actor, id, orders, tries, next_at, failed, error
    FROM event_outbox WHERE";

/// Entries are read up to the first with which they have so many orders.
const MAX_ORDERS: usize = 2000;
/// The longest error that is kept.
const MAX_ERROR_CHARS: usize = 500;

/// Why an event waits that was not rejected itself.
const HELD: &str = "an earlier event of the order was not accepted";

/// Ids as a JSON array.
pub(crate) fn json_ids(orders: impl Iterator<Item = OrderId>) -> String {
    format!("[{}]", list(orders.map(OrderId::get)))
}

fn parse_ids(text: &str) -> Result<Vec<OrderId>> {
    let bad = || unreadable("the orders of an entry of the outbox");
    let ids = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).ok_or_else(bad)?;
    let ids = ids.split(',').map(str::trim).filter(|id| !id.is_empty());
    ids.map(|id| id.parse().map_err(|_| bad())).collect()
}

/// Writes the entry of a batch that is recorded in this transaction.
pub(super) async fn insert_batch(tx: &mut Tx, sale: SaleId, orders: &[OrderId]) -> Result<()> {
    let ids = json_ids(orders.iter().copied());
    tx.execute_on(1, "INSERT INTO event_outbox (sale_id, orders) VALUES (?, ?)", args![sale.get(), ids.as_str()]).await
}

/// Writes the entries of steps that are taken in this transaction.
pub(super) async fn insert_steps(
    tx: &mut Tx,
    sale: SaleId,
    orders: &[(OrderId, Timestamp)],
    step: OrderEvent,
) -> Result<()> {
    let rows = as_rows(&format!("{sale},"), orders, step);
    let insert = format!("INSERT INTO event_outbox (sale_id, {}) VALUES {rows}", events::COLUMNS);
    expect_rows(orders.len() as u64, tx.execute_text(insert).await?)
}

/// An entry as it is stored: without what is in the rows of its orders.
struct StoredEntry {
    entry: OutboxEntry,
    /// Its orders; a batch has no steps.
    steps: Vec<(OrderId, Option<OrderEvent>)>,
}

fn read(row: &Row) -> Result<StoredEntry> {
    let batch = row.maybe_text(7)?;
    let steps = match &batch {
        Some(orders) => parse_ids(orders)?.into_iter().map(|order| (order, None)).collect(),
        None => {
            let (order, step) = events::read(row)?;
            vec![(order, Some(step))]
        }
    };
    let (next_at, is_failed) = (Timestamp::from_ms(row.int(9)?), row.int(10)? != 0);
    let entry = OutboxEntry {
        id: row.int(6)?,
        is_batch: batch.is_some(),
        events: Vec::new(),
        tries: u32::try_from(row.int(8)?).unwrap_or(u32::MAX),
        next_at: (!is_failed).then_some(next_at),
        error: row.maybe_text(11)?,
    };
    Ok(StoredEntry { entry, steps })
}

fn complete(stored: StoredEntry, orders: &HashMap<OrderId, (Order, Option<StepReason>)>) -> OutboxEntry {
    let StoredEntry { mut entry, steps } = stored;
    for (id, step) in steps {
        let Some((order, reason)) = orders.get(&id) else {
            tracing::warn!(order = %id, "an order was deleted; its events are not sent");
            continue;
        };
        let step = step.unwrap_or_else(|| OrderEvent::recorded(order, *reason));
        entry.events.push(OutgoingEvent { order: id, sale: order.sale, user: order.user, step });
    }
    entry
}

impl Store {
    /// Adds what is in the rows of their orders.
    async fn complete_entries(&self, stored: Vec<StoredEntry>) -> Result<Vec<OutboxEntry>> {
        let ids: Vec<OrderId> = stored.iter().flat_map(|stored| stored.steps.iter().map(|(order, _)| *order)).collect();
        let rows = self.read_orders_with_reasons(&ids).await?;
        let orders = rows.into_iter().map(|(order, reason)| (order.id, (order, reason))).collect();
        Ok(stored.into_iter().map(|stored| complete(stored, &orders)).collect())
    }

    pub(super) async fn read_due_events(&self, now: Timestamp, limit: u32) -> Result<Vec<OutboxEntry>> {
        let sql = format!("{ENTRIES} failed = 0 AND next_at <= ? ORDER BY id LIMIT ?");
        let (mut due, mut orders) = (Vec::new(), 0);
        for row in &self.db.rows(&sql, args![now.ms(), limit]).await? {
            let stored = read(row)?;
            orders += stored.steps.len();
            due.push(stored);
            if orders >= MAX_ORDERS {
                break;
            }
        }
        self.complete_entries(due).await
    }

    pub(super) async fn read_failed_events(&self, limit: u32) -> Result<Vec<OutboxEntry>> {
        let sql = format!("{ENTRIES} failed = 1 ORDER BY id LIMIT ?");
        let failed = self.db.rows(&sql, args![limit]).await?.iter().map(read).collect::<Result<Vec<_>>>()?;
        self.complete_entries(failed).await
    }

    pub(super) async fn read_waiting_steps(&self, orders: &[OrderId]) -> Result<Vec<WaitingStep>> {
        if orders.is_empty() {
            return Ok(Vec::new());
        }
        let ids = list(orders.iter().map(|order| order.get()));
        let sql = format!("SELECT id, order_id, to_status FROM event_outbox WHERE order_id IN ({ids})");
        let bad = || unreadable("an entry of the outbox");
        let read = |row: &Row| {
            let order = OrderId::new(row.int(1)?).map_err(|_| bad())?;
            let to = OrderStatus::parse(&row.text(2)?).ok_or_else(bad)?;
            Ok(WaitingStep { entry: row.int(0)?, order, to })
        };
        self.db.rows(&sql, args![]).await?.iter().map(read).collect()
    }

    pub(super) async fn store_delivery(&self, delivery: &EventDelivery) -> Result<()> {
        let EventDelivery { done, left, rejected, held } = delivery;
        let mut tx = self.db.begin().await?;
        for event in rejected {
            self.store_rejected(&mut tx, event).await?;
        }
        for (entry, orders) in left {
            let ids = json_ids(orders.iter().copied());
            let update = "UPDATE event_outbox SET orders = ? WHERE id = ? AND orders IS NOT NULL";
            tx.execute(update, args![ids.as_str(), *entry]).await?;
        }
        for event in held {
            self.hold(&mut tx, event).await?;
        }
        if !done.is_empty() {
            let ids = list(done.iter().copied());
            tx.execute_text(format!("DELETE FROM event_outbox WHERE id IN ({ids})")).await?;
        }
        tx.commit().await
    }

    async fn store_rejected(&self, tx: &mut Tx, rejected: &RejectedEvent) -> Result<()> {
        let RejectedEvent { entry, from_batch, event, tries, next_at, error } = rejected;
        let error: String = error.chars().take(MAX_ERROR_CHARS).collect();
        let (next_at, failed) = next_at.map_or((0, 1_i64), |at| (at.ms(), 0));
        if !from_batch {
            let update = "UPDATE event_outbox SET tries = ?, next_at = ?, failed = ?, error = ? WHERE id = ?";
            tx.execute(update, args![*tries, next_at, failed, error.as_str(), *entry]).await?;
            return Ok(());
        }
        // If the batch has gone, another process has sent this event, or has stored it as rejected.
        let lock = self.db.dialect().for_update();
        if tx.row(&format!("SELECT id FROM event_outbox WHERE id = ?{lock}"), args![*entry]).await?.is_none() {
            return Ok(());
        }
        let insert = "INSERT INTO event_outbox
            (sale_id, order_id, from_status, to_status, at, reason, actor, tries, next_at, failed, error)
            VALUES (?, ?, ?, ?, ?, NULLIF(?, ''), ?, ?, ?, ?, ?)";
        let sql = format!("{insert}{}", self.db.dialect().on_conflict_do_nothing("order_id, to_status"));
        let OutgoingEvent { order, sale, step, .. } = event;
        let (from, to, by) = (step.from.as_str(), step.to.as_str(), step.by.as_str());
        let (at, reason) = (step.at.ms(), step.reason.map_or("", StepReason::as_str));
        let values = args![sale.get(), order.get(), from, to, at, reason, by, *tries, next_at, failed, error.as_str()];
        tx.execute(&sql, values).await?;
        Ok(())
    }

    /// Lets an event wait as the earlier one of its order does.
    async fn hold(&self, tx: &mut Tx, held: &HeldEvent) -> Result<()> {
        let HeldEvent { entry, earlier, until } = held;
        // Locked, so that an operator who retries the earlier one does not miss this one.
        let lock = self.db.dialect().for_update();
        let sql = format!("SELECT next_at, failed FROM event_outbox WHERE id = ?{lock}");
        let Some(row) = tx.row(&sql, args![*earlier]).await? else { return Ok(()) };
        let (next_at, failed) = (row.int(0)?.max(until.ms()), row.int(1)?);
        let update = "UPDATE event_outbox SET next_at = ?, failed = ?, error = ? WHERE id = ?";
        tx.execute(update, args![next_at, failed, HELD, *entry]).await?;
        Ok(())
    }

    pub(super) async fn set_events_due(&self, order: Option<OrderId>) -> Result<u64> {
        let which = order.map_or_else(|| "failed = 1".to_owned(), |order| format!("failed = 1 AND order_id = {order}"));
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        // An event that is being set aside because of one of these is seen by the second statement, as it waits here until that is done.
        tx.rows_text(format!("SELECT id FROM event_outbox WHERE {which}{lock}")).await?;
        let update = format!("UPDATE event_outbox SET failed = 0, tries = 0, next_at = 0 WHERE {which}");
        let retried = tx.execute_text(update).await?;
        tx.commit().await?;
        Ok(retried)
    }

    pub(super) async fn count_entries(&self) -> Result<u64> {
        let bad = || unreadable("the number of entries of the outbox");
        let row = self.db.row("SELECT COUNT(*) FROM event_outbox", &[]).await?.ok_or_else(bad)?;
        u64::try_from(row.int(0)?).map_err(|_| bad())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_written_and_read_as_json() {
        let order = |id| OrderId::new(id).unwrap();
        for (ids, text) in
            [(vec![], "[]"), (vec![7], "[7]"), (vec![1, 9_223_372_036_854_775_807], "[1,9223372036854775807]")]
        {
            let ids: Vec<OrderId> = ids.into_iter().map(order).collect();
            assert_eq!(json_ids(ids.iter().copied()), text);
            assert_eq!(parse_ids(text).unwrap(), ids);
        }
        assert_eq!(parse_ids("[1, 2]").unwrap(), [order(1), order(2)]);
        for bad in ["", "[", "1", "[x]", "[0]", "[-1]", "[1;2]"] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }
}

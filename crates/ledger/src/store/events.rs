//! The steps of orders after they were recorded. Each is written in the transaction that takes it.

use std::fmt::Write as _;

use stampede_core::ports::Result;
use stampede_core::{Actor, OrderEvent, OrderId, OrderStatus, SaleId, Timestamp};

use super::event_outbox::insert_steps;
use super::orders::read_reason;
use super::{Store, list, unreadable};
use crate::db::{Row, Tx, args, expect_rows};

pub(super) const COLUMNS: &str = "order_id, from_status, to_status, at, reason, actor";

/// The step in a row that begins with [`COLUMNS`].
pub(super) fn read(row: &Row) -> Result<(OrderId, OrderEvent)> {
    let bad = || unreadable("a step of an order");
    let status = |column| OrderStatus::parse(&row.text(column)?).ok_or_else(bad);
    let event = OrderEvent {
        from: status(1)?,
        to: status(2)?,
        at: Timestamp::from_ms(row.int(3)?),
        reason: read_reason(row, 4)?,
        by: Actor::parse(&row.text(5)?).ok_or_else(bad)?,
    };
    Ok((OrderId::new(row.int(0)?).map_err(|_| bad())?, event))
}

/// The place of a step in the history of its order.
const fn place(event: &OrderEvent) -> u32 {
    event.to.number()
}

/// The same kind of step of some orders as rows with [`COLUMNS`], each after `first`.
pub(super) fn as_rows(first: &str, orders: &[(OrderId, Timestamp)], step: OrderEvent) -> String {
    let (from, to, by) = (step.from.as_str(), step.to.as_str(), step.by.as_str());
    let reason = step.reason.map_or_else(|| "NULL".to_owned(), |reason| format!("'{}'", reason.as_str()));
    let mut rows = String::new();
    for (order, at) in orders {
        let comma = if rows.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(rows, "{comma}({first}{order},'{from}','{to}',{},{reason},'{by}')", at.ms());
    }
    rows
}

/// The steps of a sale's orders with an id in `after..=last`; those of one order in sequence.
pub(super) async fn read_events_in(
    tx: &mut Tx,
    sale: SaleId,
    after: i64,
    last: i64,
    into: &mut Vec<(OrderId, OrderEvent)>,
) -> Result<()> {
    let sql = "SELECT e.order_id, e.from_status, e.to_status, e.at, e.reason, e.actor
        FROM order_events e JOIN orders o ON o.id = e.order_id
        WHERE e.order_id > ? AND e.order_id <= ? AND o.sale_id = ?";
    let rows = tx.rows(sql, args![after, last, sale.get()]).await?;
    let mut events = rows.iter().map(read).collect::<Result<Vec<_>>>()?;
    events.sort_by_key(|(order, event)| (*order, place(event)));
    into.append(&mut events);
    Ok(())
}

impl Store {
    /// Writes the same kind of step of some orders of a sale. An order that has taken it before is an error.
    pub(super) async fn insert_events(
        &self,
        tx: &mut Tx,
        sale: SaleId,
        orders: &[(OrderId, Timestamp)],
        step: OrderEvent,
    ) -> Result<()> {
        if orders.is_empty() {
            return Ok(());
        }
        let rows = as_rows("", orders, step);
        let inserted = tx.execute_text(format!("INSERT INTO order_events ({COLUMNS}) VALUES {rows}")).await?;
        expect_rows(orders.len() as u64, inserted)?;
        tx.add_steps(step.to, step.by, inserted);
        if self.config.writes_events { insert_steps(tx, sale, orders, step).await } else { Ok(()) }
    }

    pub(super) async fn read_steps_of(&self, orders: &[OrderId]) -> Result<Vec<(OrderId, OrderEvent)>> {
        if orders.is_empty() {
            return Ok(Vec::new());
        }
        let ids = list(orders.iter().map(|order| order.get()));
        let sql = format!("SELECT {COLUMNS} FROM order_events WHERE order_id IN ({ids})");
        let mut events = self.db.rows(&sql, args![]).await?.iter().map(read).collect::<Result<Vec<_>>>()?;
        events.sort_by_key(|(order, event)| (*order, place(event)));
        Ok(events)
    }

    pub(super) async fn read_history(&self, id: OrderId) -> Result<Vec<OrderEvent>> {
        let Some((order, reason)) = self.read_order_with_reason(id).await? else { return Ok(Vec::new()) };
        // A step that follows the reading of the row is shown as well.
        let sql = format!("SELECT {COLUMNS} FROM order_events WHERE order_id = ?");
        let rows = self.db.rows(&sql, args![id.get()]).await?;
        let mut events = rows.iter().map(|row| Ok(read(row)?.1)).collect::<Result<Vec<_>>>()?;
        events.push(OrderEvent::recorded(&order, reason));
        events.sort_by_key(place);
        Ok(events)
    }
}

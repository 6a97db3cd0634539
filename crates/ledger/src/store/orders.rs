//! Reading and cancelling orders.

use stampede_core::ports::{Fence, Fenced, OrderRow, PendingRelease, Result, TransitionOutcome};
use stampede_core::{Epoch, Money, Order, OrderId, OrderStatus, SaleId, Timestamp, UserId, failpoint};

use super::{Store, list, unreadable};
use crate::db::{Row, Tx, args};

const ORDERS: &str = "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at FROM orders WHERE";

/// With the columns that only an inspection needs.
pub(super) const ROWS: &str =
    "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at, live, epoch, seq
    FROM orders WHERE sale_id = ? AND id > ? ORDER BY id LIMIT ?";

/// The order in a row of [`ORDERS`].
fn read(row: &Row) -> Result<Order> {
    let bad = || unreadable("an order");
    Ok(Order {
        id: OrderId::new(row.int(0)?).map_err(|_| bad())?,
        sale: SaleId::new(row.int(1)?).map_err(|_| bad())?,
        user: UserId::new(row.int(2)?).map_err(|_| bad())?,
        status: OrderStatus::parse(&row.text(3)?).ok_or_else(bad)?,
        price: Money::from_cents(row.int(4)?).ok_or_else(bad)?,
        created_at: Timestamp::from_ms(row.int(5)?),
        updated_at: Timestamp::from_ms(row.int(6)?),
    })
}

/// The order in a row of [`ROWS`].
pub(super) fn read_row(row: &Row) -> Result<OrderRow> {
    let live = row.maybe_int(7)?.is_some();
    Ok(OrderRow { order: read(row)?, live, epoch: Epoch(row.int(8)?), seq: row.int(9)? })
}

/// Records that the gate must release the mark of this order.
pub(super) async fn insert_pending_release(tx: &mut Tx, order: OrderId, sale: SaleId, user: UserId) -> Result<()> {
    let pending_releases = "INSERT INTO pending_releases (order_id, sale_id, user_id) VALUES (?, ?, ?)";
    tx.execute_on(1, pending_releases, args![order.get(), sale.get(), user.get()]).await
}

impl Store {
    pub(super) async fn read_orders_in(
        &self,
        sale: SaleId,
        after: Option<OrderId>,
        limit: u32,
    ) -> Result<Vec<OrderRow>> {
        let after = after.map_or(0, OrderId::get);
        self.db.rows(ROWS, args![sale.get(), after, limit]).await?.iter().map(read_row).collect()
    }

    pub(super) async fn read_order(&self, id: OrderId) -> Result<Option<Order>> {
        let row = self.db.row(&format!("{ORDERS} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn read_orders_with(&self, ids: &[OrderId]) -> Result<Vec<Order>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let ids = list(ids.iter().map(|id| id.get()));
        self.db.rows(&format!("{ORDERS} id IN ({ids})"), args![]).await?.iter().map(read).collect()
    }

    pub(super) async fn read_live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>> {
        let sql = format!("{ORDERS} sale_id = ? AND user_id = ? AND live = 1");
        let row = self.db.row(&sql, args![sale.get(), user.get()]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn read_orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
        // Old sales are read from the index; the few sales that are not in it yet are read from the orders.
        let sql = "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at FROM (
                SELECT o.id, o.sale_id, o.user_id, o.status, o.price_cents, o.created_at, o.updated_at
                FROM (
                    SELECT order_id FROM orders_by_user WHERE user_id = ? AND order_id < ? ORDER BY order_id DESC LIMIT ?
                ) AS i JOIN orders o ON o.id = i.order_id
                UNION
                SELECT o.id, o.sale_id, o.user_id, o.status, o.price_cents, o.created_at, o.updated_at
                FROM sale s JOIN orders o ON o.sale_id = s.id AND o.user_id = ?
                WHERE s.orders_indexed_to < 9223372036854775807 AND o.id < ? AND o.status <> 'rejected'
            ) AS found ORDER BY id DESC LIMIT ?";
        let before = before.map_or(i64::MAX, OrderId::get);
        let rows = self.db.rows(sql, args![user.get(), before, limit, user.get(), before, limit]).await?;
        rows.iter().map(read).collect()
    }

    /// Copies some orders of old sales to the index by user.
    pub(super) async fn copy_into_index(
        &self,
        fence: Option<Fence>,
        ended_before: Timestamp,
        limit: u32,
    ) -> Result<Fenced<bool>> {
        let due =
            "SELECT id FROM sale WHERE orders_indexed_to < 9223372036854775807 AND end_at < ? ORDER BY id LIMIT 1";
        let Some(row) = self.db.row(due, args![ended_before.ms()]).await? else {
            return Ok(Fenced::Done(false));
        };
        let (sale, lock) = (row.int(0)?, self.db.dialect().for_update());
        let mut tx = self.db.begin().await?;
        if !self.check_fence(&mut tx, fence).await? {
            tx.roll_back().await?;
            return Ok(Fenced::Superseded);
        }
        // The sale's row is locked, so that a late recording either is complete and visible here, or sees the index afterwards.
        let sql = format!("SELECT orders_indexed_to FROM sale WHERE id = ?{lock}");
        let Some(row) = tx.row(&sql, args![sale]).await? else {
            tx.roll_back().await?;
            return Ok(Fenced::Done(true));
        };
        let sql = "SELECT user_id, id FROM orders
            WHERE sale_id = ? AND user_id > ? AND status <> 'rejected' ORDER BY user_id LIMIT ?";
        let mut pairs = Vec::new();
        tx.pairs(sql, args![sale, row.int(0)?, limit], &mut pairs).await?;
        let indexed_to = match pairs.last() {
            Some((last, _)) if pairs.len() >= limit as usize => *last,
            _ => i64::MAX,
        };
        if indexed_to < i64::MAX {
            // The page may contain only some orders of its last user: read all of them.
            let sql = "SELECT user_id, id FROM orders WHERE sale_id = ? AND user_id = ? AND status <> 'rejected'";
            pairs.retain(|(user, _)| *user < indexed_to);
            tx.pairs(sql, args![sale, indexed_to], &mut pairs).await?;
        }
        if !pairs.is_empty() {
            let values = pairs.iter().map(|(user, order)| format!("({user},{order})")).collect::<Vec<_>>().join(",");
            let leave = self.db.dialect().on_conflict_do_nothing("user_id, order_id");
            tx.execute_text(format!("INSERT INTO orders_by_user (user_id, order_id) VALUES {values}{leave}")).await?;
        }
        tx.execute("UPDATE sale SET orders_indexed_to = ? WHERE id = ?", args![indexed_to, sale]).await?;
        tx.commit().await?;
        Ok(Fenced::Done(true))
    }

    pub(super) async fn cancel_order(&self, id: OrderId, user: UserId, now: Timestamp) -> Result<TransitionOutcome> {
        // The sale of an order never changes, so it may be read before the lock.
        let Some(seen) = self.read_order(id).await?.filter(|order| order.user == user) else {
            return Ok(TransitionOutcome::NoSuchOrder);
        };
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        tx.rows(&format!("SELECT id FROM sale WHERE id = ?{lock}"), args![seen.sale.get()]).await?;
        let row = tx.row(&format!("{ORDERS} id = ?{lock}"), args![id.get()]).await?;
        let mut order = read(&row.ok_or_else(|| unreadable("an order"))?)?;
        if !order.status.may_become(OrderStatus::Cancelled) {
            tx.roll_back().await?;
            let repeated = order.status == OrderStatus::Cancelled;
            return Ok(if repeated {
                TransitionOutcome::Repeated(order)
            } else {
                TransitionOutcome::Illegal(order.status)
            });
        }
        order.status = OrderStatus::Cancelled;
        // The clock of this process may be behind that of the process that created the order.
        order.updated_at = now.max(order.updated_at);
        let update = "UPDATE orders SET status = ?, live = NULL, updated_at = ? WHERE id = ?";
        tx.execute_on(1, update, args![order.status.as_str(), order.updated_at.ms(), id.get()]).await?;
        let freed = if failpoint::planted("release-twice") { 2_i64 } else { 1 };
        let update = "UPDATE sale SET sold = sold - ?, released = released + 1 WHERE id = ?";
        tx.execute_on(1, update, args![freed, order.sale.get()]).await?;
        insert_pending_release(&mut tx, id, order.sale, user).await?;
        tx.commit().await?;
        Ok(TransitionOutcome::Done(order))
    }

    pub(super) async fn read_pending_releases(
        &self,
        after: Option<OrderId>,
        limit: u32,
    ) -> Result<Vec<PendingRelease>> {
        let sql =
            "SELECT order_id, sale_id, user_id FROM pending_releases WHERE order_id > ? ORDER BY order_id LIMIT ?";
        let rows = self.db.rows(sql, args![after.map_or(0, OrderId::get), limit]).await?;
        let bad = |_| unreadable("a row of pending_releases");
        let read = |row: &Row| {
            Ok(PendingRelease {
                order: OrderId::new(row.int(0)?).map_err(bad)?,
                sale: SaleId::new(row.int(1)?).map_err(bad)?,
                user: UserId::new(row.int(2)?).map_err(bad)?,
            })
        };
        rows.iter().map(read).collect()
    }

    pub(super) async fn remove_pending_releases(&self, orders: &[OrderId]) -> Result<()> {
        if orders.is_empty() {
            return Ok(());
        }
        let mut tx = self.db.begin().await?;
        let ids = list(orders.iter().map(|order| order.get()));
        tx.execute_text(format!("DELETE FROM pending_releases WHERE order_id IN ({ids})")).await?;
        tx.commit().await
    }
}

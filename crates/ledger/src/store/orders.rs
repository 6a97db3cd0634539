//! Reading and cancelling orders.

use std::time::Duration;

use stampede_core::ports::{Fence, Fenced, LedgerError, OrderRow, PendingRelease, Result, TransitionOutcome};
use stampede_core::{
    Actor, Epoch, Money, Order, OrderEvent, OrderId, OrderStatus, SaleId, StepReason, Timestamp, UserId, failpoint,
};
use stampede_lock::KeyedMutexGuard;

use super::{Store, list, unreadable};
use crate::db::{Dialect, Row, Tx, args};

/// How long a change of an order waits for those before it of the same sale. Many may wait while the database is busy.
const CHANGING_TIMEOUT: Duration = Duration::from_secs(20);

const ORDERS: &str =
    "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at, pay_by FROM orders WHERE";

/// With the reason of the status.
const WITH_REASON: &str =
    "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at, pay_by, reason FROM orders WHERE";

/// With the columns that only an inspection needs.
pub(super) const ROWS: &str =
    "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at, pay_by, live, epoch, seq, reason
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
        pay_by: row.maybe_int(7)?.map(Timestamp::from_ms),
    })
}

/// The order in a row of [`WITH_REASON`], with the reason of its status.
fn read_with_reason(row: &Row) -> Result<(Order, Option<StepReason>)> {
    Ok((read(row)?, read_reason(row, 8)?))
}

/// The order in a row of [`ROWS`].
pub(super) fn read_row(row: &Row) -> Result<OrderRow> {
    let live = row.maybe_int(8)?.is_some();
    let (epoch, seq) = (Epoch(row.int(9)?), row.int(10)?);
    Ok(OrderRow { order: read(row)?, live, reason: read_reason(row, 11)?, epoch, seq })
}

/// The reason in this column, if there is one.
pub(super) fn read_reason(row: &Row, column: usize) -> Result<Option<StepReason>> {
    let parse = |text: String| StepReason::parse(&text).ok_or_else(|| unreadable("a reason"));
    row.maybe_text(column)?.map(parse).transpose()
}

/// Reads the order and locks its row until the transaction ends.
pub(super) async fn read_locked(tx: &mut Tx, dialect: Dialect, id: OrderId) -> Result<Option<Order>> {
    let row = tx.row(&format!("{ORDERS} id = ?{}", dialect.for_update()), args![id.get()]).await?;
    row.as_ref().map(read).transpose()
}

/// Reads the order in a transaction, without a lock.
pub(super) async fn read_in(tx: &mut Tx, id: OrderId) -> Result<Option<Order>> {
    tx.row(&format!("{ORDERS} id = ?"), args![id.get()]).await?.as_ref().map(read).transpose()
}

/// Records that the gate must release the mark of this order.
pub(super) async fn insert_pending_release(tx: &mut Tx, order: OrderId, sale: SaleId, user: UserId) -> Result<()> {
    let pending_releases = "INSERT INTO pending_releases (order_id, sale_id, user_id) VALUES (?, ?, ?)";
    tx.execute_on(1, pending_releases, args![order.get(), sale.get(), user.get()]).await
}

impl Store {
    /// A live order takes a step after which it is not live: its stock is returned. Stampede itself ends only orders that were made for a late
    /// payment. The rows of its sale and of the order are locked.
    pub(super) async fn end_order(
        &self,
        tx: &mut Tx,
        order: &mut Order,
        to: OrderStatus,
        by: Actor,
        now: Timestamp,
    ) -> Result<()> {
        // The clock of this process may be behind that of the process that created the order.
        let (id, from, at) = (order.id, order.status, now.max(order.updated_at));
        (order.status, order.updated_at) = (to, at);
        let reason = match by {
            Actor::Buyer | Actor::Provider => StepReason::Requested,
            Actor::Operator => StepReason::Operator,
            Actor::System => StepReason::PaymentReturned,
        };
        let update = "UPDATE orders SET status = ?, live = NULL, reason = ?, updated_at = ? WHERE id = ?";
        tx.execute_on(1, update, args![to.as_str(), reason.as_str(), at.ms(), id.get()]).await?;
        let step = OrderEvent { from, to, at, reason: Some(reason), by };
        self.insert_events(tx, order.sale, &[(id, at)], step).await?;
        let freed = if failpoint::planted("release-twice") { 2_i64 } else { 1 };
        let update = "UPDATE sale SET sold = sold - ?, released = released + 1 WHERE id = ?";
        tx.execute_on(1, update, args![freed, order.sale.get()]).await?;
        insert_pending_release(tx, id, order.sale, order.user).await
    }

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

    pub(super) async fn read_order_with_reason(&self, id: OrderId) -> Result<Option<(Order, Option<StepReason>)>> {
        let row = self.db.row(&format!("{WITH_REASON} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read_with_reason).transpose()
    }

    pub(super) async fn read_orders_with_reasons(&self, ids: &[OrderId]) -> Result<Vec<(Order, Option<StepReason>)>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let ids = list(ids.iter().map(|id| id.get()));
        let rows = self.db.rows(&format!("{WITH_REASON} id IN ({ids})"), args![]).await?;
        rows.iter().map(read_with_reason).collect()
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
        let sql = "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at, pay_by FROM (
                SELECT o.id, o.sale_id, o.user_id, o.status, o.price_cents, o.created_at, o.updated_at, o.pay_by
                FROM (
                    SELECT order_id FROM orders_by_user WHERE user_id = ? AND order_id < ? ORDER BY order_id DESC LIMIT ?
                ) AS i JOIN orders o ON o.id = i.order_id
                UNION
                SELECT o.id, o.sale_id, o.user_id, o.status, o.price_cents, o.created_at, o.updated_at, o.pay_by
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

    /// Cancels an unpaid order. With `buyer`, it must be theirs, and may be in quarantine.
    pub(super) async fn cancel_order(
        &self,
        id: OrderId,
        buyer: Option<UserId>,
        by: Actor,
        now: Timestamp,
    ) -> Result<TransitionOutcome> {
        let Some(seen) = self.read_order(id).await? else {
            return match buyer {
                Some(buyer) => self.cancel_quarantined(id, buyer, now).await,
                None => Ok(TransitionOutcome::NoSuchOrder),
            };
        };
        if buyer.is_some_and(|buyer| buyer != seen.user) {
            return Ok(TransitionOutcome::NoSuchOrder);
        }
        // Once it is not, it never is again: nothing needs to be locked.
        if seen.status != OrderStatus::Unpaid {
            return self.not_unpaid(seen).await;
        }
        let (_changing, mut tx, mut order) = self.begin_with(&seen).await?;
        if order.status != OrderStatus::Unpaid {
            tx.roll_back().await?;
            return self.not_unpaid(order).await;
        }
        self.end_order(&mut tx, &mut order, OrderStatus::Cancelled, by, now).await?;
        tx.commit().await?;
        Ok(TransitionOutcome::Done(order))
    }

    /// The outcome of cancelling an order that is not unpaid.
    async fn not_unpaid(&self, order: Order) -> Result<TransitionOutcome> {
        let was_cancelled = match order.status {
            OrderStatus::Cancelled => true,
            // By a late payment, or by an operator after it was paid.
            OrderStatus::Refunding | OrderStatus::Refunded => {
                let step = "SELECT at FROM order_events WHERE order_id = ? AND to_status = 'cancelled'";
                self.db.row(step, args![order.id.get()]).await?.is_some()
            }
            _ => false,
        };
        Ok(if was_cancelled { TransitionOutcome::Repeated(order) } else { TransitionOutcome::Illegal(order.status) })
    }

    /// Begins a transaction that locks the sale of an order, then the order. Those of one sale wait for each other here, and not for its row
    /// with a connection each: if it stays locked, the connections are left to other sales. The guard is held until the transaction has ended.
    pub(super) async fn begin_with(&self, seen: &Order) -> Result<(KeyedMutexGuard<SaleId>, Tx, Order)> {
        let dialect = self.db.dialect();
        let changing = tokio::time::timeout(CHANGING_TIMEOUT, self.changing.lock(seen.sale));
        let changing = changing.await.map_err(|elapsed| LedgerError::Conflict(elapsed.into()))?;
        let mut tx = self.db.begin().await?;
        // The sale of an order never changes, so that of an earlier reading is right.
        tx.rows(&format!("SELECT id FROM sale WHERE id = ?{}", dialect.for_update()), args![seen.sale.get()]).await?;
        let order = read_locked(&mut tx, dialect, seen.id).await?.ok_or_else(|| unreadable("an order"))?;
        Ok((changing, tx, order))
    }

    pub(super) async fn read_pending_releases(
        &self,
        after: Option<OrderId>,
        limit: u32,
    ) -> Result<Vec<PendingRelease>> {
        let sql =
            "SELECT p.order_id, p.sale_id, p.user_id, o.status
            FROM pending_releases p LEFT JOIN orders o ON o.id = p.order_id WHERE p.order_id > ? ORDER BY p.order_id LIMIT ?";
        let rows = self.db.rows(sql, args![after.map_or(0, OrderId::get), limit]).await?;
        let bad = |_| unreadable("a row of pending_releases");
        let read = |row: &Row| {
            Ok(PendingRelease {
                order: OrderId::new(row.int(0)?).map_err(bad)?,
                sale: SaleId::new(row.int(1)?).map_err(bad)?,
                user: UserId::new(row.int(2)?).map_err(bad)?,
                ended: row.maybe_text(3)?.as_deref() != Some(OrderStatus::Rejected.as_str()),
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

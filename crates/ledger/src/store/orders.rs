//! Reading orders, and the steps they take after they are made.

use stampede_core::ports::{Owed, Result, Stepped};
use stampede_core::{Money, Order, OrderId, OrderStatus, SaleId, Timestamp, UserId};

use super::{Store, list, unreadable};
use crate::db::{Row, args};

const ORDERS: &str = "SELECT id, sale_id, user_id, status, price_cents, created_at, updated_at FROM orders WHERE";

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

impl Store {
    pub(super) async fn read_order(&self, id: OrderId) -> Result<Option<Order>> {
        let row = self.db.row(&format!("{ORDERS} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn read_live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>> {
        let sql = format!("{ORDERS} sale_id = ? AND user_id = ? AND live = 1");
        let row = self.db.row(&sql, args![sale.get(), user.get()]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn read_orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
        let sql = format!("{ORDERS} user_id = ? AND id < ? AND status <> 'rejected' ORDER BY id DESC LIMIT ?");
        let before = before.map_or(i64::MAX, OrderId::get);
        let rows = self.db.rows(&sql, args![user.get(), before, limit]).await?;
        rows.iter().map(read).collect()
    }

    pub(super) async fn cancel_order(&self, id: OrderId, user: UserId, now: Timestamp) -> Result<Stepped> {
        // Which sale is told by the order, and never changes; so it may be read before anything is locked.
        let Some(seen) = self.read_order(id).await?.filter(|order| order.user == user) else {
            return Ok(Stepped::NoSuchOrder);
        };
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        tx.rows(&format!("SELECT id FROM sale WHERE id = ?{lock}"), args![seen.sale.get()]).await?;
        let row = tx.row(&format!("{ORDERS} id = ?{lock}"), args![id.get()]).await?;
        let mut order = read(&row.ok_or_else(|| unreadable("an order"))?)?;
        if !order.status.may_become(OrderStatus::Cancelled) {
            tx.roll_back().await?;
            return Ok(Stepped::Illegal(order.status));
        }
        order.status = OrderStatus::Cancelled;
        order.updated_at = now;
        let update = "UPDATE orders SET status = ?, live = NULL, updated_at = ? WHERE id = ?";
        tx.execute(update, args![order.status.as_str(), now.ms(), id.get()]).await?;
        tx.execute("UPDATE sale SET sold = sold - 1 WHERE id = ?", args![order.sale.get()]).await?;
        let owed = "INSERT INTO owed (order_id, sale_id, user_id) VALUES (?, ?, ?)";
        tx.execute(owed, args![id.get(), order.sale.get(), user.get()]).await?;
        tx.commit().await?;
        Ok(Stepped::Done(order))
    }

    pub(super) async fn read_owed(&self, limit: u32) -> Result<Vec<Owed>> {
        let sql = "SELECT order_id, sale_id, user_id FROM owed ORDER BY order_id LIMIT ?";
        let rows = self.db.rows(sql, args![limit]).await?;
        let bad = |_| unreadable("a row of owed");
        let read = |row: &Row| {
            Ok(Owed {
                order: OrderId::new(row.int(0)?).map_err(bad)?,
                sale: SaleId::new(row.int(1)?).map_err(bad)?,
                user: UserId::new(row.int(2)?).map_err(bad)?,
            })
        };
        rows.iter().map(read).collect()
    }

    pub(super) async fn delete_owed(&self, orders: &[OrderId]) -> Result<()> {
        if orders.is_empty() {
            return Ok(());
        }
        let mut tx = self.db.begin().await?;
        let ids = list(orders.iter().map(|order| order.get()));
        tx.execute_text(format!("DELETE FROM owed WHERE order_id IN ({ids})")).await?;
        tx.commit().await
    }
}

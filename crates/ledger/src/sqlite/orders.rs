//! Reading orders, and the steps they take after they are made.

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use stampede_core::ports::{LedgerError, Owed, Result, Stepped};
use stampede_core::{Money, Order, OrderId, OrderStatus, SaleId, Timestamp, UserId};

use super::{Sqlite, commit};
use crate::failed;

const COLUMNS: &str = "id, sale_id, user_id, status, price_cents, created_at, updated_at";

/// The order in a row of [`COLUMNS`].
fn read(row: &SqliteRow) -> Result<Order> {
    let order = || {
        Some(Order {
            id: OrderId::new(row.get(0)).ok()?,
            sale: SaleId::new(row.get(1)).ok()?,
            user: UserId::new(row.get(2)).ok()?,
            status: OrderStatus::parse(row.get(3))?,
            price: Money::from_cents(row.get(4))?,
            created_at: Timestamp::from_ms(row.get(5)),
            updated_at: Timestamp::from_ms(row.get(6)),
        })
    };
    order().ok_or_else(|| LedgerError::Poison(format!("order {} cannot be read", row.get::<i64, _>(0)).into()))
}

fn select(condition: &str) -> sqlx::AssertSqlSafe<String> {
    sqlx::AssertSqlSafe(format!("SELECT {COLUMNS} FROM orders WHERE {condition}"))
}

pub(super) async fn order(db: &Sqlite, id: OrderId) -> Result<Option<Order>> {
    let row = sqlx::query(select("id = ?1")).bind(id.get()).fetch_optional(&db.readers).await.map_err(failed)?;
    row.as_ref().map(read).transpose()
}

pub(super) async fn live_order(db: &Sqlite, sale: SaleId, user: UserId) -> Result<Option<Order>> {
    let row = sqlx::query(select("sale_id = ?1 AND user_id = ?2 AND live = 1"))
        .bind(sale.get())
        .bind(user.get())
        .fetch_optional(&db.readers)
        .await
        .map_err(failed)?;
    row.as_ref().map(read).transpose()
}

pub(super) async fn orders_of(db: &Sqlite, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
    let rows = sqlx::query(select("user_id = ?1 AND id < ?2 AND status <> 'rejected' ORDER BY id DESC LIMIT ?3"))
        .bind(user.get())
        .bind(before.map_or(i64::MAX, OrderId::get))
        .bind(limit)
        .fetch_all(&db.readers)
        .await
        .map_err(failed)?;
    rows.iter().map(read).collect()
}

pub(super) async fn cancel(db: &Sqlite, id: OrderId, user: UserId, now: Timestamp) -> Result<Stepped> {
    let mut tx = db.begin().await?;
    let row = sqlx::query(select("id = ?1 AND user_id = ?2"))
        .bind(id.get())
        .bind(user.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?;
    let Some(mut order) = row.as_ref().map(read).transpose()? else { return Ok(Stepped::NoSuchOrder) };
    if !order.status.may_become(OrderStatus::Cancelled) {
        return Ok(Stepped::Illegal(order.status));
    }
    order.status = OrderStatus::Cancelled;
    order.updated_at = now;
    sqlx::query("UPDATE orders SET status = ?2, live = NULL, updated_at = ?3 WHERE id = ?1")
        .bind(id.get())
        .bind(order.status.as_str())
        .bind(now.ms())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    sqlx::query("UPDATE sale SET sold = sold - 1 WHERE id = ?1")
        .bind(order.sale.get())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    sqlx::query("INSERT INTO owed (order_id, sale_id, user_id) VALUES (?1, ?2, ?3)")
        .bind(id.get())
        .bind(order.sale.get())
        .bind(user.get())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    commit(tx).await?;
    Ok(Stepped::Done(order))
}

pub(super) async fn owed(db: &Sqlite, limit: u32) -> Result<Vec<Owed>> {
    let rows = sqlx::query("SELECT order_id, sale_id, user_id FROM owed ORDER BY order_id LIMIT ?1")
        .bind(limit)
        .fetch_all(&db.readers)
        .await
        .map_err(failed)?;
    let read = |row: &SqliteRow| {
        let owed = || {
            Some(Owed {
                order: OrderId::new(row.get(0)).ok()?,
                sale: SaleId::new(row.get(1)).ok()?,
                user: UserId::new(row.get(2)).ok()?,
            })
        };
        owed().ok_or_else(|| LedgerError::Poison("a row of owed cannot be read".into()))
    };
    rows.iter().map(read).collect()
}

pub(super) async fn settle_owed(db: &Sqlite, orders: &[OrderId]) -> Result<()> {
    let ids: Vec<i64> = orders.iter().map(|order| order.get()).collect();
    sqlx::query("DELETE FROM owed WHERE order_id IN (SELECT value FROM json_each(?1))")
        .bind(serde_json::json!(ids).to_string())
        .execute(&db.writer)
        .await
        .map_err(failed)?;
    Ok(())
}

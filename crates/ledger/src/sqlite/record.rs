//! Admitted orders into rows.

use serde_json::json;
use sqlx::Row as _;
use stampede_core::ports::{Admitted, LedgerError, Recorded, Result};
use stampede_core::{Epoch, OrderId, OrderStatus, SaleId, UserId, failpoint};

use super::{Sqlite, commit};
use crate::failed;
use crate::settle::{Found, Row, settle};

pub(super) async fn record(db: &Sqlite, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<Recorded>> {
    if batch.is_empty() {
        return Ok(Vec::new());
    }
    if record_fast(db, sale, epoch, batch).await? {
        return Ok(vec![Recorded::Recorded; batch.len()]);
    }
    record_slow(db, sale, epoch, batch).await
}

/// All of them new, and room for all: the usual case. `false` if anything is in the way; then nothing was done.
async fn record_fast(db: &Sqlite, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<bool> {
    let wanted = batch.len() as u64;
    failpoint::hit("record.begin");
    let mut tx = db.begin().await?;
    let room = sqlx::query("UPDATE sale SET sold = sold + ?3 WHERE id = ?1 AND epoch = ?2 AND sold + ?3 <= total")
        .bind(sale.get())
        .bind(epoch.0)
        .bind(batch.len() as i64)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    if room.rows_affected() == 0 {
        return roll_back(tx).await;
    }
    let inserted = sqlx::query(include_str!("sql/record_fast.sql"))
        .bind(sale.get())
        .bind(epoch.0)
        .bind(rows_as_json(batch))
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    if inserted.rows_affected() != wanted {
        return roll_back(tx).await;
    }
    failpoint::hit("record.inserted");
    commit(tx).await?;
    failpoint::hit("record.committed");
    Ok(true)
}

async fn roll_back(tx: sqlx::Transaction<'static, sqlx::Sqlite>) -> Result<bool> {
    tx.rollback().await.map_err(failed)?;
    Ok(false)
}

/// `[[id,user,seq,at],…]`, sorted by id so that the rows go in where they belong, one beside the other.
fn rows_as_json(batch: &[Admitted]) -> String {
    use std::fmt::Write as _;
    let mut sorted: Vec<&Admitted> = batch.iter().collect();
    sorted.sort_by_key(|item| item.order);
    let mut text = String::with_capacity(batch.len() * 64 + 2);
    text.push('[');
    for item in sorted {
        let comma = if text.len() > 1 { "," } else { "" };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}[{},{},{},{}]", item.order, item.user, item.seq, item.at.ms());
    }
    text.push(']');
    text
}

async fn record_slow(db: &Sqlite, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<Recorded>> {
    let mut tx = db.begin().await?;
    let found = find(&mut tx, sale, batch).await?;
    let answers = settle(sale, epoch, batch, found);
    let rows: Vec<_> = batch
        .iter()
        .zip(&answers)
        .filter_map(|(item, answer)| {
            let (live, status, reason) = match answer {
                Recorded::Recorded => (Some(1), OrderStatus::Unpaid, None),
                Recorded::Refused { reason, .. } => (None, OrderStatus::Rejected, Some(reason.as_str())),
                Recorded::Already | Recorded::Dead | Recorded::IdCollision => return None,
            };
            Some(json!([item.order.get(), item.user.get(), item.seq, item.at.ms(), live, status.as_str(), reason]))
        })
        .collect();
    let sold = answers.iter().filter(|&&answer| answer == Recorded::Recorded).count() as i64;
    sqlx::query("UPDATE sale SET sold = sold + ?2 WHERE id = ?1")
        .bind(sale.get())
        .bind(sold)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    sqlx::query(include_str!("sql/record_slow.sql"))
        .bind(sale.get())
        .bind(epoch.0)
        .bind(serde_json::Value::from(rows).to_string())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    failpoint::hit("record.inserted");
    commit(tx).await?;
    failpoint::hit("record.committed");
    Ok(answers)
}

async fn find(tx: &mut sqlx::SqliteConnection, sale: SaleId, batch: &[Admitted]) -> Result<Found> {
    let row = sqlx::query("SELECT epoch, total - sold FROM sale WHERE id = ?1")
        .bind(sale.get())
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?
        .ok_or_else(|| LedgerError::Poison(format!("there is no sale {sale}").into()))?;
    let (epoch, room): (i64, i64) = (row.get(0), row.get(1));
    let ids: Vec<i64> = batch.iter().map(|item| item.order.get()).collect();
    let users: Vec<i64> = batch.iter().map(|item| item.user.get()).collect();

    let by_id = sqlx::query(include_str!("sql/orders_by_ids.sql"))
        .bind(json!(ids).to_string())
        .fetch_all(&mut *tx)
        .await
        .map_err(failed)?;
    let by_user = sqlx::query(include_str!("sql/live_by_users.sql"))
        .bind(sale.get())
        .bind(json!(users).to_string())
        .fetch_all(&mut *tx)
        .await
        .map_err(failed)?;

    let bad = |_| LedgerError::Poison("the ledger holds an id that is not one".into());
    let mut found = Found {
        epoch: Epoch(epoch),
        room: u32::try_from(room).unwrap_or(0),
        rows: Default::default(),
        live: Default::default(),
    };
    for row in by_id {
        let order = OrderId::new(row.get(0)).map_err(bad)?;
        let (sale, user) = (SaleId::new(row.get(1)).map_err(bad)?, UserId::new(row.get(2)).map_err(bad)?);
        let live = row.get::<Option<i64>, _>(3).is_some();
        found.rows.insert(order, Row { sale, user, live });
    }
    for row in by_user {
        found.live.insert(UserId::new(row.get(0)).map_err(bad)?, OrderId::new(row.get(1)).map_err(bad)?);
    }
    Ok(found)
}

pub(super) async fn quarantine(db: &Sqlite, sale: SaleId, admitted: Admitted, error: &str) -> Result<()> {
    let payload = json!({ "seq": admitted.seq, "at": admitted.at }).to_string();
    sqlx::query(
        "INSERT INTO quarantine (order_id, sale_id, user_id, payload, error) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (order_id) DO UPDATE SET error = excluded.error",
    )
    .bind(admitted.order.get())
    .bind(sale.get())
    .bind(admitted.user.get())
    .bind(payload)
    .bind(error)
    .execute(&db.writer)
    .await
    .map_err(failed)?;
    Ok(())
}

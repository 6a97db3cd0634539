//! Sales: reading, creating, editing. Every edit raises `ver`.

use futures_util::TryStreamExt as _;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};
use stampede_core::ports::{Created, Edited, LedgerError, Loaded, Result, SaleDraft};
use stampede_core::{Epoch, Money, OrderId, Sale, SaleId, SaleStatus, Timestamp, UserId, VoucherId, Window};

use super::{Sqlite, commit};
use crate::failed;

const SALES: &str = "SELECT sale.id, voucher_id, title, sale.price_cents, worth_cents, status, begin_at, end_at,
            total, cap, sold, epoch, ver
     FROM sale JOIN voucher ON voucher.id = voucher_id";

/// The sale in a row of [`SALES`].
fn read(row: &SqliteRow) -> Result<Sale> {
    let count = |column| u32::try_from(row.get::<i64, _>(column)).ok();
    let sale = || {
        Some(Sale {
            id: SaleId::new(row.get(0)).ok()?,
            voucher: VoucherId::new(row.get(1)).ok()?,
            title: row.get(2),
            price: Money::from_cents(row.get(3))?,
            worth: Money::from_cents(row.get(4))?,
            status: SaleStatus::parse(row.get(5))?,
            window: Window { begin: Timestamp::from_ms(row.get(6)), end: Timestamp::from_ms(row.get(7)) },
            total: count(8)?,
            cap: count(9)?,
            sold: count(10)?,
            epoch: Epoch(row.get(11)),
            ver: row.get(12),
        })
    };
    sale().ok_or_else(|| LedgerError::Poison(format!("sale {} cannot be read", row.get::<i64, _>(0)).into()))
}

async fn find(connection: &mut SqliteConnection, id: SaleId) -> Result<Option<Sale>> {
    let sql = sqlx::AssertSqlSafe(format!("{SALES} WHERE sale.id = ?1"));
    let row = sqlx::query(sql).bind(id.get()).fetch_optional(connection).await.map_err(failed)?;
    row.as_ref().map(read).transpose()
}

pub(super) async fn sales(db: &Sqlite) -> Result<Vec<Sale>> {
    let sql = sqlx::AssertSqlSafe(format!("{SALES} ORDER BY sale.id DESC"));
    let rows = sqlx::query(sql).fetch_all(&db.readers).await.map_err(failed)?;
    rows.iter().map(read).collect()
}

pub(super) async fn sale(db: &Sqlite, id: SaleId) -> Result<Option<Sale>> {
    let mut connection = db.readers.acquire().await.map_err(failed)?;
    find(&mut connection, id).await
}

pub(super) async fn load(db: &Sqlite, id: SaleId) -> Result<Option<Loaded>> {
    // A read transaction sees one moment: the sale's row and its orders belong together.
    let mut tx = db.readers.begin().await.map_err(failed)?;
    let Some(sale) = find(&mut tx, id).await? else { return Ok(None) };
    let mut marks = Vec::with_capacity(sale.sold as usize);
    {
        // Quarantined orders keep their mark: their stock stays taken until a person has looked.
        let mut rows = sqlx::query(
            "SELECT user_id, id FROM orders WHERE sale_id = ?1 AND live = 1
             UNION ALL
             SELECT user_id, order_id FROM quarantine WHERE sale_id = ?1",
        )
        .bind(id.get())
        .fetch(&mut *tx);
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            let (Ok(user), Ok(order)) = (UserId::new(row.get(0)), OrderId::new(row.get(1))) else {
                return Err(LedgerError::Poison(format!("an order of sale {id} cannot be read").into()));
            };
            marks.push((user, order));
        }
    }
    tx.commit().await.map_err(failed)?;
    Ok(Some(Loaded { sale, marks }))
}

pub(super) async fn create(db: &Sqlite, draft: SaleDraft, now: Timestamp) -> Result<Created> {
    let SaleDraft { id, voucher, stock, window, status } = draft;
    let mut tx = db.begin().await?;
    let price: Option<i64> =
        sqlx::query_scalar("SELECT price_cents FROM voucher WHERE id = ?1 AND kind = 'flash_sale'")
            .bind(voucher.get())
            .fetch_optional(&mut *tx)
            .await
            .map_err(failed)?;
    let Some(price) = price else { return Ok(Created::NoParent) };
    let inserted = sqlx::query(
        "INSERT INTO sale (id, voucher_id, price_cents, status, begin_at, end_at, total, cap, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8)
         ON CONFLICT (voucher_id) DO NOTHING",
    )
    .bind(id.get())
    .bind(voucher.get())
    .bind(price)
    .bind(status.as_str())
    .bind(window.begin.ms())
    .bind(window.end.ms())
    .bind(stock)
    .bind(now.ms())
    .execute(&mut *tx)
    .await
    .map_err(failed)?;
    commit(tx).await?;
    Ok(if inserted.rows_affected() == 1 { Created::Done } else { Created::Exists })
}

pub(super) async fn set_status(db: &Sqlite, id: SaleId, status: SaleStatus) -> Result<Edited> {
    let mut tx = db.begin().await?;
    let Some(mut sale) = find(&mut tx, id).await? else { return Ok(Edited::NoSuchSale) };
    if sale.status == status {
        return Ok(Edited::Repeated(sale));
    }
    if !sale.status.may_become(status) {
        return Ok(Edited::Illegal(sale.status));
    }
    sale.status = status;
    sale.ver += 1;
    sqlx::query("UPDATE sale SET status = ?2, ver = ?3 WHERE id = ?1")
        .bind(id.get())
        .bind(status.as_str())
        .bind(sale.ver)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    commit(tx).await?;
    Ok(Edited::Done(sale))
}

pub(super) async fn top_up(db: &Sqlite, id: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<Edited> {
    let mut tx = db.begin().await?;
    let Some(mut sale) = find(&mut tx, id).await? else { return Ok(Edited::NoSuchSale) };
    let earlier = sqlx::query("SELECT sale_id, added FROM top_up WHERE request_id = ?1")
        .bind(request_id)
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?;
    if let Some(row) = earlier {
        let same = (row.get::<i64, _>(0), row.get::<i64, _>(1)) == (id.get(), i64::from(add));
        return Ok(if same { Edited::Repeated(sale) } else { Edited::RequestIdReused });
    }
    let total = sale.total.checked_add(add).filter(|&total| total <= stampede_core::shop::MAX_STOCK);
    let Some(total) = total.filter(|_| sale.status != SaleStatus::Ended) else {
        return Ok(Edited::Illegal(sale.status));
    };
    sale.total = total;
    sale.cap = total;
    sale.ver += 1;
    sqlx::query("INSERT INTO top_up (request_id, sale_id, added, at) VALUES (?1, ?2, ?3, ?4)")
        .bind(request_id)
        .bind(id.get())
        .bind(add)
        .bind(now.ms())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    sqlx::query("UPDATE sale SET total = ?2, cap = ?2, ver = ?3 WHERE id = ?1")
        .bind(id.get())
        .bind(total)
        .bind(sale.ver)
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    commit(tx).await?;
    Ok(Edited::Done(sale))
}

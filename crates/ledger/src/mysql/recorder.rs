//! Records a batch in one transaction: one statement reserves the stock, one inserts the orders.

use std::fmt::Write as _;

use stampede_core::ports::{Admitted, Result};
use stampede_core::{Epoch, SaleId, failpoint};

use crate::db::{Tx, args, with_timeout};
use crate::errors::failed;

/// Reserves stock for the batch. Locks the sale's row first, like every transaction that changes `sold`. A sale with orders in quarantine or
/// in the index by user takes the slow path, which reads both.
const RESERVE_STOCK: &str =
    "UPDATE sale SET sold = sold + ? WHERE id = ? AND epoch = ? AND sold + ? <= total AND orders_indexed_to < 0
    AND NOT EXISTS (SELECT 1 FROM quarantine WHERE quarantine.sale_id = sale.id)";

/// Returns `false`, with nothing done, if there is not enough stock or an order cannot simply be inserted.
pub(crate) async fn record(mut tx: Tx, sale: SaleId, epoch: Epoch, sorted: &[&Admitted]) -> Result<bool> {
    let count = sorted.len() as i64;
    let room = tx.execute(RESERVE_STOCK, args![count, sale.get(), epoch.0, count]).await?;
    let all_inserted = room > 0 && insert_all(&mut tx, sale, epoch, sorted).await?;
    if all_inserted {
        failpoint::hit("record.inserted");
        tx.commit().await?;
    } else {
        tx.roll_back().await?;
    }
    Ok(all_inserted)
}

/// Inserts the batch as live orders. Returns `false` if a key exists.
async fn insert_all(tx: &mut Tx, sale: SaleId, epoch: Epoch, sorted: &[&Admitted]) -> Result<bool> {
    let Tx::MySql(tx) = tx else { return Ok(false) };
    let insert = sqlx::raw_sql(sqlx::AssertSqlSafe(as_values(sorted, sale, epoch)));
    match with_timeout(insert.execute(&mut **tx)).await {
        Ok(done) => Ok(done.rows_affected() == sorted.len() as u64),
        // A plain insert fails as a whole if a key exists.
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

/// One insert of many rows with numeric values. The sale's row is locked, so its price cannot change.
fn as_values(sorted: &[&Admitted], sale: SaleId, epoch: Epoch) -> String {
    let mut text = String::with_capacity(sorted.len() * 100 + 300);
    text.push_str(
        "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at) VALUES ",
    );
    for (n, item) in sorted.iter().enumerate() {
        let Admitted { order, user, seq, at } = item;
        let (comma, at) = (if n > 0 { "," } else { "" }, at.ms());
        let price = if n > 0 {
            "@price".to_owned()
        } else {
            format!("(@price := (SELECT price_cents FROM sale WHERE id = {sale}))")
        };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}({order},{sale},{user},1,'unpaid',{},{seq},{price},{at},{at})", epoch.0);
    }
    text
}

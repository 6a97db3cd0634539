//! Records a batch in one transaction: one statement reserves the stock, one inserts the orders.

use std::fmt::Write as _;

use futures_util::TryStreamExt as _;
use stampede_core::ports::{Admitted, Result};
use stampede_core::{Epoch, SaleId, failpoint};

use crate::db::{Tx, TxConnection, args, with_timeout};
use crate::errors::failed;
use crate::store::json_ids;

/// Reserves stock for the batch. Locks the sale's row first, like every transaction that changes `sold`. A sale with orders in quarantine or
/// in the index by user, or in which nobody may buy again, takes the slow path, which reads what is needed.
const RESERVE_STOCK: &str =
    "UPDATE sale SET sold = sold + ? WHERE id = ? AND epoch = ? AND sold + ? <= total AND orders_indexed_to < 0 AND buy_again = 1
    AND NOT EXISTS (SELECT 1 FROM quarantine WHERE quarantine.sale_id = sale.id)";

/// Returns `false`, with nothing done, if there is not enough stock or an order cannot simply be inserted.
pub(crate) async fn record(mut tx: Tx, sale: SaleId, epoch: Epoch, sorted: &[&Admitted], events: bool) -> Result<bool> {
    let count = sorted.len() as i64;
    let room = tx.execute(RESERVE_STOCK, args![count, sale.get(), epoch.0, count]).await?;
    let all_inserted = room > 0 && insert_all(&mut tx, sale, epoch, sorted, events).await?;
    if all_inserted {
        failpoint::hit("record.inserted");
        tx.commit().await?;
    } else {
        tx.roll_back().await?;
    }
    Ok(all_inserted)
}

/// Inserts the batch as live orders. Returns `false` if a key exists.
async fn insert_all(tx: &mut Tx, sale: SaleId, epoch: Epoch, sorted: &[&Admitted], events: bool) -> Result<bool> {
    let TxConnection::MySql(tx) = &mut tx.connection else { return Ok(false) };
    // One round trip for all statements. The first one shows how many orders were inserted.
    let mut text = as_values(sorted, sale, epoch);
    text.push_str(&due_row(sorted, sale));
    if events {
        let ids = json_ids(sorted.iter().map(|item| item.order));
        // Writing to a String cannot fail.
        let _ = write!(text, "; INSERT INTO event_outbox (sale_id, orders) VALUES ({sale},'{ids}')");
    }
    let insert = sqlx::raw_sql(sqlx::AssertSqlSafe(text));
    match with_timeout(insert.execute_many(&mut **tx).try_collect::<Vec<_>>()).await {
        Ok(done) => Ok(done.first().is_some_and(|orders| orders.rows_affected() == sorted.len() as u64)),
        // A plain insert fails as a whole if a key exists.
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

/// One insert of many rows with numeric values. The sale's row is locked, so its price cannot change.
fn as_values(sorted: &[&Admitted], sale: SaleId, epoch: Epoch) -> String {
    let mut text = String::with_capacity(sorted.len() * 100 + 300);
    text.push_str(
        "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at, pay_by) VALUES ",
    );
    let last_at = sorted.iter().map(|item| item.at.ms()).max().unwrap_or_default();
    for (n, item) in sorted.iter().enumerate() {
        let Admitted { order, user, seq, at } = item;
        let (comma, at) = (if n > 0 { "," } else { "" }, at.ms());
        let (price, pay_by) = if n > 0 {
            ("@price".to_owned(), "@pay_by".to_owned())
        } else {
            (
                format!("(@price := (SELECT price_cents FROM sale WHERE id = {sale}))"),
                format!(
                    "(@pay_by := (SELECT CASE WHEN payment_deadline_ms > 0 THEN payment_deadline_ms
                        + GREATEST({last_at}, CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)) END FROM sale WHERE id = {sale}))"
                ),
            )
        };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}({order},{sale},{user},1,'unpaid',{},{seq},{price},{at},{at},{pay_by})", epoch.0);
    }
    text
}

/// A second statement, which inserts the row of the batch in `payment_due` if its orders must be paid in time.
fn due_row(sorted: &[&Admitted], sale: SaleId) -> String {
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return String::new() };
    format!(
        "; INSERT INTO payment_due (due_at, first_order, last_order, sale_id, orders)
        SELECT @pay_by, {}, {}, {sale}, {} FROM DUAL WHERE @pay_by IS NOT NULL",
        first.order,
        last.order,
        sorted.len()
    )
}

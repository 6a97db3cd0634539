//! Cancels orders that were not paid in time.
//!
//! Every recorded batch has one row in `payment_due`, with the range of its ids. The rows that are due are found by their key, and the orders
//! by theirs, so that the size of `orders` does not matter. Nothing but the status of an order, read under the lock of its row, decides
//! whether it is cancelled: it makes no difference how many processes do this, or how long one of them is paused in between.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use stampede_core::ports::{Expired, LedgerError, Result};
use stampede_core::{Actor, OrderEvent, OrderId, OrderStatus, SaleId, StepReason, Timestamp, failpoint};

use super::{LONG_WAIT, Store, list, retry_conflicts, unreadable};
use crate::db::{Tx, args, expect_rows};

/// Orders that one transaction cancels: few, so that buyers of the sale do not wait for long.
const ORDERS_AT_ONCE: usize = 500;

/// Sales whose orders are cancelled at the same time: one whose row is locked does not hold up the others of a page.
const SALES_AT_ONCE: usize = 4;

/// Transactions for one sale in one call, if all that is due of the batches before is locked.
const TRANSACTIONS_AT_ONCE: usize = 8;

/// Reads when the next batch is due.
pub(super) const NEXT_DUE: &str = "SELECT due_at FROM payment_due ORDER BY due_at LIMIT 1";

/// Reads the batches that are due, the earliest first, without those of some sales.
fn due(except: &[SaleId]) -> String {
    let others = match except {
        [] => String::new(),
        sales => format!(" AND sale_id NOT IN ({})", list(sales.iter().map(|sale| sale.get()))),
    };
    format!(
        "SELECT due_at, first_order, last_order, sale_id, orders FROM payment_due WHERE due_at <= ?{others}
        ORDER BY due_at, first_order LIMIT ?"
    )
}

/// What was done for one sale.
struct Cancelled {
    orders: u64,
    /// Whether more may be due in its batches.
    more: bool,
    /// The first order that is due and was left out, because its row is locked.
    locked: Option<OrderId>,
}

/// A row of `payment_due`.
#[derive(Debug, Clone, Copy)]
struct DueBatch {
    due_at: i64,
    first: i64,
    last: i64,
    orders: i64,
}

/// The ranges of ids of these batches. Those of several nodes overlap, and become one.
fn merged_ranges(batches: &[DueBatch]) -> Vec<(i64, i64)> {
    let mut ranges: Vec<(i64, i64)> = batches.iter().map(|batch| (batch.first, batch.last)).collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, before| {
        let overlaps = next.0 <= before.1;
        if overlaps {
            before.1 = before.1.max(next.1);
        }
        overlaps
    });
    ranges
}

/// Reads unpaid orders of a sale that are due and belong to these batches. A query per range, and an expression for the sale that no index
/// has: so every database goes by the ids, whatever the statistics of the table say.
fn candidates(sale: SaleId, batches: &[DueBatch], now: Timestamp) -> String {
    let now = now.ms();
    let of_range = |(first, last)| {
        format!(
            "SELECT id FROM orders WHERE id BETWEEN {first} AND {last} AND sale_id + 0 = {sale} AND status = 'unpaid'
            AND pay_by <= {now}"
        )
    };
    let ranges: Vec<String> = merged_ranges(batches).into_iter().map(of_range).collect();
    format!("{} LIMIT {ORDERS_AT_ONCE}", ranges.join(" UNION ALL "))
}

/// The first batches that one transaction can cancel, at least one.
fn first_batches(batches: &[DueBatch]) -> &[DueBatch] {
    let mut orders = 0;
    let fits = |batch: &&DueBatch| {
        orders += batch.orders;
        orders <= ORDERS_AT_ONCE as i64
    };
    &batches[..batches.iter().take_while(fits).count().max(1).min(batches.len())]
}

/// Deletes exactly these rows; another process may have deleted some. An order is the first of one batch only, and the times keep the search
/// to a part of the key.
async fn delete_batches(tx: &mut Tx, batches: &[DueBatch]) -> Result<()> {
    let times = || batches.iter().map(|batch| batch.due_at);
    let (Some(from), Some(until)) = (times().min(), times().max()) else { return Ok(()) };
    let first = list(batches.iter().map(|batch| batch.first));
    let delete =
        format!("DELETE FROM payment_due WHERE due_at BETWEEN {from} AND {until} AND first_order IN ({first})");
    tx.execute_text(delete).await?;
    Ok(())
}

/// Runs the failpoint between reading and locking on a thread that may block.
async fn hit_after_reading() {
    if failpoint::is_set("expire.read")
        && let Err(error) = tokio::task::spawn_blocking(|| failpoint::hit("expire.read")).await
    {
        tracing::error!(%error, "a failpoint failed");
    }
}

impl Store {
    pub(super) async fn cancel_due(&self, now: Timestamp, limit: u32, except: &[SaleId]) -> Result<Expired> {
        let rows = self.db.rows(&due(except), args![now.ms(), limit]).await?;
        let mut by_sale: BTreeMap<SaleId, Vec<DueBatch>> = BTreeMap::new();
        for row in &rows {
            let batch = DueBatch { due_at: row.int(0)?, first: row.int(1)?, last: row.int(2)?, orders: row.int(4)? };
            let sale = SaleId::new(row.int(3)?).map_err(|_| unreadable("a sale"))?;
            by_sale.entry(sale).or_default().push(batch);
        }
        let cancelling = by_sale
            .into_iter()
            .map(|(sale, batches)| async move { (sale, self.cancel_unlocked_of(sale, &batches, now).await) });
        let mut expired = Expired { more: rows.len() >= limit as usize, ..Expired::default() };
        for (sale, done) in stream::iter(cancelling).buffer_unordered(SALES_AT_ONCE).collect::<Vec<_>>().await {
            match done {
                Ok(done) => {
                    expired.orders += done.orders;
                    expired.more |= done.more;
                    if done.orders > 0 || done.locked.is_none() {
                        expired.done.push(sale);
                    }
                    expired.locked.extend(done.locked.map(|order| (sale, order)));
                }
                // A sale that fails does not hold up the others.
                Err(error) => expired.failed.push((sale, error)),
            }
        }
        Ok(expired)
    }

    /// One transaction for the first batches of a sale, and further ones as long as everything that is due is locked: an order whose row is
    /// locked for long holds up no other.
    async fn cancel_unlocked_of(&self, sale: SaleId, batches: &[DueBatch], now: Timestamp) -> Result<Cancelled> {
        let mut rest = batches;
        let mut locked = None;
        for _ in 0..TRANSACTIONS_AT_ONCE {
            let first = first_batches(rest);
            rest = &rest[first.len()..];
            let done = retry_conflicts!(self.cancel_due_of(sale, first, now), except_after: LONG_WAIT)?;
            locked = locked.or(done.locked);
            if done.orders > 0 || done.locked.is_none() {
                return Ok(Cancelled { more: done.more || !rest.is_empty(), locked, ..done });
            }
            if rest.is_empty() {
                break;
            }
        }
        // The same would be found again at once.
        Ok(Cancelled { orders: 0, more: false, locked })
    }

    /// One transaction for some batches of one sale. Their rows are deleted once none of their orders is left. It does not wait for the row of
    /// an order that is locked: buyers of the sale would wait as well.
    async fn cancel_due_of(&self, sale: SaleId, batches: &[DueBatch], now: Timestamp) -> Result<Cancelled> {
        // Read before the lock: an order can cease to be unpaid in between, but not become it.
        let mut tx = self.db.snapshot().await?;
        let found = tx.rows_text(candidates(sale, batches, now)).await?;
        tx.roll_back().await?;
        let more = found.len() >= ORDERS_AT_ONCE;
        let ids = found.iter().map(|row| row.int(0)).collect::<Result<Vec<_>>>()?;
        hit_after_reading().await;
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        tx.rows(&format!("SELECT id FROM sale WHERE id = ?{lock}"), args![sale.get()]).await?;
        let mut expired = Vec::with_capacity(ids.len());
        let mut locked = None;
        if !ids.is_empty() {
            let unpaid = format!("FROM orders WHERE id IN ({}) AND status = 'unpaid'", list(ids.into_iter()));
            // A payment locks its order and not the sale. What it has changed since is seen here, and nothing can change it afterwards.
            let skip = self.db.dialect().for_update_skip_locked();
            for row in tx.rows_text(format!("SELECT id, user_id, updated_at {unpaid}{skip}")).await? {
                let id = OrderId::new(row.int(0)?).map_err(|_| unreadable("an order"))?;
                expired.push((id, row.int(1)?, Timestamp::from_ms(row.int(2)?).max(now)));
            }
            let cancelled: HashSet<i64> = expired.iter().map(|(id, ..)| id.get()).collect();
            for row in tx.rows_text(format!("SELECT id {unpaid} ORDER BY id")).await? {
                let id = row.int(0)?;
                if !cancelled.contains(&id) {
                    locked = Some(OrderId::new(id).map_err(|_| unreadable("an order"))?);
                    break;
                }
            }
        }
        if !expired.is_empty() {
            let ids = list(expired.iter().map(|(id, ..)| id.get()));
            // The clock of the process that created an order may be ahead.
            let update = format!(
                "UPDATE orders SET status = 'cancelled', live = NULL, reason = '{}',
                updated_at = CASE WHEN updated_at > {now} THEN updated_at ELSE {now} END WHERE id IN ({ids}) AND status = 'unpaid'",
                StepReason::Expired.as_str(),
                now = now.ms()
            );
            let count = expired.len() as u64;
            expect_rows(count, tx.execute_text(update).await?)?;
            let releases: Vec<String> = expired.iter().map(|(id, user, _)| format!("({id},{sale},{user})")).collect();
            let insert =
                format!("INSERT INTO pending_releases (order_id, sale_id, user_id) VALUES {}", releases.join(","));
            expect_rows(count, tx.execute_text(insert).await?)?;
            let steps: Vec<_> = expired.iter().map(|(id, _, at)| (*id, *at)).collect();
            let (from, to, reason) = (OrderStatus::Unpaid, OrderStatus::Cancelled, Some(StepReason::Expired));
            let step = OrderEvent { from, to, at: now, reason, by: Actor::System };
            self.insert_events(&mut tx, sale, &steps, step).await?;
            let count = i64::try_from(expired.len()).map_err(|_| unreadable("a number of orders"))?;
            let update = "UPDATE sale SET sold = sold - ?, released = released + ? WHERE id = ?";
            tx.execute_on(1, update, args![count, count, sale.get()]).await?;
        }
        if !more && locked.is_none() {
            delete_batches(&mut tx, batches).await?;
        }
        tx.commit().await?;
        Ok(Cancelled { orders: expired.len() as u64, more: more || locked.is_some(), locked })
    }
}

#[cfg(test)]
mod tests;

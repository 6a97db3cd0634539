//! Records admitted orders.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use stampede_core::ports::{Admitted, LedgerError, RecordOutcome, Result};
use stampede_core::{Actor, Epoch, OrderId, OrderStatus, RejectReason, SaleId, Timestamp, UserId, failpoint};

use super::event_outbox::insert_batch;
use super::resolve::{Found, Row, resolve};
use super::{Store, list, unreadable};
use crate::db::{Dialect, Pool, Tx, args, expect_rows};
use crate::errors::{after_lookup, not_begun};
use crate::mysql;
use crate::steps::TakenSteps;

impl Store {
    pub(super) async fn record_batch(
        &self,
        sale: SaleId,
        epoch: Epoch,
        batch: &[Admitted],
    ) -> Result<Vec<RecordOutcome>> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        if self.record_fast(sale, epoch, batch).await? {
            return Ok(vec![RecordOutcome::Inserted; batch.len()]);
        }
        self.record_slow(sale, epoch, batch).await
    }

    /// The fast path: all orders are new, and there is stock for all. Returns `false`, with nothing done, otherwise.
    async fn record_fast(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<bool> {
        let events = self.config.writes_events;
        failpoint::hit("record.begin");
        let done = match &self.db {
            Pool::Sqlite { writer, recorder, .. } => {
                let guard = writer.lock().await.map_err(not_begun)?;
                let done = recorder.record(sale, epoch, batch.to_vec(), events).await;
                // Only the lock is needed, not its connection.
                guard.done();
                done?
            }
            Pool::MySql { .. } => {
                mysql::record(self.db.begin().await?, sale, epoch, &sorted_by_id(batch), events).await?
            }
            Pool::Postgres { recorder, .. } => recorder.record(sale, epoch, &sorted_by_id(batch), events).await?,
        };
        failpoint::hit("record.committed");
        if done {
            TakenSteps { to: OrderStatus::Unpaid, by: Actor::System, orders: batch.len() as u64 }.count();
        }
        Ok(done)
    }

    async fn record_slow(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<RecordOutcome>> {
        let mut tx = self.db.begin().await?;
        let (mut found, terms) = find(&mut tx, self.db.dialect(), sale, batch).await?;
        let outcomes = resolve(sale, epoch, batch, &mut found);
        let pairs: Vec<_> = batch.iter().copied().zip(outcomes.iter().copied()).collect();
        self.insert_outcomes(&mut tx, &found, sale, epoch, terms, &pairs).await?;
        failpoint::hit("record.inserted");
        tx.commit().await?;
        failpoint::hit("record.committed");
        Ok(outcomes)
    }

    /// Inserts the orders whose outcome was decided under the lock of the sale's row, and updates `sold`.
    pub(super) async fn insert_outcomes(
        &self,
        tx: &mut Tx,
        found: &Found,
        sale: SaleId,
        epoch: Epoch,
        terms: Terms,
        outcomes: &[(Admitted, RecordOutcome)],
    ) -> Result<()> {
        let inserted =
            || outcomes.iter().filter(|(_, outcome)| *outcome == RecordOutcome::Inserted).map(|(item, _)| item);
        let pay_by = inserted().map(|item| item.at).max().and_then(|at| terms.pay_by(at));
        let (mut rows, mut index, mut sold) = (String::new(), String::new(), 0_u32);
        let mut recorded = Vec::with_capacity(outcomes.len());
        for (Admitted { order, user, seq, at }, outcome) in outcomes {
            let (live, status, reason) = match outcome {
                RecordOutcome::Inserted => ("1", OrderStatus::Unpaid, "NULL".to_owned()),
                RecordOutcome::Rejected { reason, .. } => {
                    ("NULL", OrderStatus::Rejected, format!("'{}'", reason.as_str()))
                }
                RecordOutcome::AlreadyRecorded
                | RecordOutcome::Dead
                | RecordOutcome::IdCollision
                | RecordOutcome::Quarantined => continue,
            };
            let is_discarded = matches!(outcome, RecordOutcome::Rejected { reason: RejectReason::Discarded, .. });
            tx.add_steps(status, if is_discarded { Actor::Operator } else { Actor::System }, 1);
            let pay_by = pay_by.filter(|_| status.is_live()).map_or_else(|| "NULL".to_owned(), |at| at.to_string());
            let (comma, status, at) = (if rows.is_empty() { "" } else { "," }, status.as_str(), at.ms());
            let price_cents = terms.price_cents;
            // Writing to a String cannot fail.
            let _ = write!(
                rows,
                "{comma}({order},{sale},{user},{live},'{status}',{reason},{},{seq},{price_cents},{at},{at},{pay_by})",
                epoch.0,
            );
            recorded.push(*order);
            if *outcome == RecordOutcome::Inserted {
                sold += 1;
                let _ = write!(index, "{}({user},{order})", if index.is_empty() { "" } else { "," });
            }
        }
        if sold > 0 {
            tx.execute_on(1, "UPDATE sale SET sold = sold + ? WHERE id = ?", args![sold, sale.get()]).await?;
        }
        if !rows.is_empty() {
            let columns =
                "id, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at, pay_by";
            let insert = format!("INSERT INTO orders ({columns}) VALUES {rows}");
            expect_rows(recorded.len() as u64, tx.execute_text(insert).await.map_err(after_lookup)?)?;
        }
        if self.config.writes_events && !recorded.is_empty() {
            insert_batch(tx, sale, &recorded).await?;
        }
        if let (Some(pay_by), Some(first), Some(last)) =
            (pay_by, inserted().map(|item| item.order).min(), inserted().map(|item| item.order).max())
        {
            let insert =
                "INSERT INTO payment_due (due_at, first_order, last_order, sale_id, orders) VALUES (?, ?, ?, ?, ?)";
            tx.execute_on(1, insert, args![pay_by, first.get(), last.get(), sale.get(), sold]).await?;
        }
        if found.indexed && !index.is_empty() {
            let insert = format!("INSERT INTO orders_by_user (user_id, order_id) VALUES {index}");
            expect_rows(sold.into(), tx.execute_text(insert).await?)?;
        }
        Ok(())
    }
}

/// Sorted by id, so that the rows are adjacent.
fn sorted_by_id(batch: &[Admitted]) -> Vec<&Admitted> {
    let mut sorted: Vec<&Admitted> = batch.iter().collect();
    sorted.sort_unstable_by_key(|item| item.order);
    sorted
}

/// What new orders have in common, read under the lock of the sale's row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    pub(super) price_cents: i64,
    /// How long an order may be unpaid; 0 without a limit.
    payment_deadline_ms: i64,
    /// By the database's clock.
    now_ms: i64,
}

impl Terms {
    /// Until when orders must be paid that are recorded now. An order may have been admitted long before, so the time counts from now.
    fn pay_by(&self, admitted_at: Timestamp) -> Option<i64> {
        (self.payment_deadline_ms > 0).then(|| self.now_ms.max(admitted_at.ms()) + self.payment_deadline_ms)
    }
}

/// Reads the existing rows of the batch's ids and users under the lock of the sale's row, and the terms of new orders.
pub(super) async fn find(tx: &mut Tx, dialect: Dialect, sale: SaleId, batch: &[Admitted]) -> Result<(Found, Terms)> {
    let lock = dialect.for_update();
    let now_ms = dialect.now_ms();
    let sql = format!(
        "SELECT epoch, total - sold, price_cents, orders_indexed_to, payment_deadline_ms, ({now_ms}), buy_again
        FROM sale WHERE id = ?{lock}"
    );
    let row = tx
        .row(&sql, args![sale.get()])
        .await?
        .ok_or_else(|| LedgerError::Poison(format!("there is no sale {sale}").into()))?;
    let (epoch, room, indexed) = (Epoch(row.int(0)?), row.int(1)?, row.int(3)? >= 0);
    let terms = Terms { price_cents: row.int(2)?, payment_deadline_ms: row.int(4)?, now_ms: row.int(5)? };

    let ids = list(batch.iter().map(|item| item.order.get()));
    let by_id =
        tx.rows_text(format!("SELECT id, sale_id, user_id, live FROM orders WHERE id IN ({ids}){lock}")).await?;
    let users = list(batch.iter().map(|item| item.user.get()));
    let by_user =
        format!("SELECT user_id, id FROM orders WHERE sale_id = {sale} AND live = 1 AND user_id IN ({users}){lock}");
    let by_user = tx.rows_text(by_user).await?;
    let mut ended = HashSet::new();
    if row.int(6)? == 0 {
        let sql = format!(
            "SELECT user_id FROM orders WHERE sale_id = {sale} AND live IS NULL AND status <> 'rejected' AND user_id IN ({users})"
        );
        for row in tx.rows_text(sql).await? {
            ended.insert(UserId::new(row.int(0)?).map_err(|_| unreadable("an order"))?);
        }
    }
    let quarantine = format!("SELECT order_id, sale_id, user_id FROM quarantine WHERE order_id IN ({ids}){lock}");
    let quarantine = tx.rows_text(quarantine).await?;

    let bad = |_| unreadable("an order");
    let mut rows = HashMap::with_capacity(by_id.len());
    for row in by_id {
        let order = OrderId::new(row.int(0)?).map_err(bad)?;
        let (sale, user) = (SaleId::new(row.int(1)?).map_err(bad)?, UserId::new(row.int(2)?).map_err(bad)?);
        rows.insert(order, Row { sale, user, live: row.maybe_int(3)?.is_some() });
    }
    let mut live = HashMap::with_capacity(by_user.len());
    for row in by_user {
        live.insert(UserId::new(row.int(0)?).map_err(bad)?, OrderId::new(row.int(1)?).map_err(bad)?);
    }
    let mut quarantined = HashMap::with_capacity(quarantine.len());
    for row in quarantine {
        let (sale, user) = (SaleId::new(row.int(1)?).map_err(bad)?, UserId::new(row.int(2)?).map_err(bad)?);
        quarantined.insert(OrderId::new(row.int(0)?).map_err(bad)?, (sale, user));
    }
    let room = u32::try_from(room).unwrap_or(0);
    Ok((Found { epoch, room, rows, live, ended, quarantined, indexed }, terms))
}

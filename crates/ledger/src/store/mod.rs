//! What a ledger does, written once. What differs between databases is in their dialect and in the fast way of `record`.
//!
//! - `record`: admitted orders into rows, a batch a transaction; `settle`: what becomes of each if the fast way is blocked
//! - `quarantine`: orders that cannot be recorded for a reason of their own
//! - `orders`, `sales`: the other transactions of selling
//! - `lease`: worker numbers for the id maker
//! - `catalogue`, `accounts`: shops and people; `login`: login codes; `audit`: what administrators did
//!
//! Every transaction that changes `live` or `sold` locks the sale's row first. A transaction that met another one is tried again
//! as a whole, a few times.

mod accounts;
mod audit;
mod catalogue;
mod lease;
mod login;
mod orders;
mod quarantine;
mod record;
mod sales;
mod settle;
mod shop_search;

use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ids::{Lease, WorkerId};
use stampede_core::ports::{
    Admitted, AuditFilter, AuditRow, Created, Discarded, Edited, Inspected, Ledger, LedgerError, Loaded, OrderRow,
    Owed, QuarantinedOrder, Recorded, Result, SaleDraft, Stepped,
};
use stampede_core::{Epoch, Order, OrderId, Sale, SaleId, SaleStatus, Timestamp, UserId};

use crate::db::Pool;

#[derive(Debug)]
pub(crate) struct Store {
    db: Pool,
}

impl Store {
    pub(crate) const fn new(db: Pool) -> Self {
        Self { db }
    }
}

/// How often a transaction that met another one is tried in all.
const TRIES: u32 = 8;

/// The transaction again, as a whole, while others are in its way. They are rolled back or done by then, so a short pause is enough.
macro_rules! again {
    ($transaction:expr) => {{
        let mut tried = 1;
        loop {
            match $transaction.await {
                Err(LedgerError::Conflict(error)) if tried < $crate::store::TRIES => {
                    tracing::debug!(%error, tried, "another transaction was in the way");
                    tokio::time::sleep(Duration::from_millis(u64::from(tried * tried))).await;
                    tried += 1;
                }
                done => break done,
            }
        }
    }};
}
use again;

/// A row that cannot be what we wrote.
fn unreadable(what: &str) -> LedgerError {
    LedgerError::Poison(format!("{what} cannot be read").into())
}

/// `1,2,3`, for an IN. Numbers only.
fn list(numbers: impl Iterator<Item = i64>) -> String {
    numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(",")
}

#[async_trait]
impl Ledger for Store {
    async fn record(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<Recorded>> {
        again!(self.record_batch(sale, epoch, batch))
    }

    async fn quarantine(&self, order: &QuarantinedOrder) -> Result<Recorded> {
        again!(self.put_in_quarantine(order))
    }

    async fn quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>> {
        self.read_quarantined(before, limit).await
    }

    async fn quarantined_order(&self, id: OrderId) -> Result<Option<QuarantinedOrder>> {
        self.read_quarantined_order(id).await
    }

    async fn retry_quarantined(&self, id: OrderId) -> Result<Option<Recorded>> {
        again!(self.record_quarantined(id))
    }

    async fn discard_quarantined(&self, id: OrderId) -> Result<Discarded> {
        again!(self.reject_quarantined(id))
    }

    async fn index_orders(&self, ended_before: Timestamp, limit: u32) -> Result<bool> {
        again!(self.copy_into_index(ended_before, limit))
    }

    async fn cancel(&self, order: OrderId, user: UserId, now: Timestamp) -> Result<Stepped> {
        again!(self.cancel_order(order, user, now))
    }

    async fn owed(&self, limit: u32) -> Result<Vec<Owed>> {
        self.read_owed(limit).await
    }

    async fn settle_owed(&self, orders: &[OrderId]) -> Result<()> {
        again!(self.delete_owed(orders))
    }

    async fn order(&self, id: OrderId) -> Result<Option<Order>> {
        self.read_order(id).await
    }

    async fn live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>> {
        self.read_live_order(sale, user).await
    }

    async fn orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
        self.read_orders_of(user, before, limit).await
    }

    async fn sales(&self, end_after: Option<Timestamp>) -> Result<Vec<Sale>> {
        self.read_sales(end_after).await
    }

    async fn sale(&self, id: SaleId) -> Result<Option<Sale>> {
        self.read_sale(id).await
    }

    async fn load(&self, id: SaleId) -> Result<Option<Loaded>> {
        self.load_sale(id).await
    }

    async fn inspect(&self, id: SaleId) -> Result<Option<Inspected>> {
        self.inspect_sale(id).await
    }

    async fn orders_in(&self, sale: SaleId, after: Option<OrderId>, limit: u32) -> Result<Vec<OrderRow>> {
        self.read_orders_in(sale, after, limit).await
    }

    async fn create_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<Created> {
        again!(self.insert_sale(draft, now))
    }

    async fn set_status(&self, sale: SaleId, status: SaleStatus) -> Result<Edited> {
        again!(self.edit_status(sale, status))
    }

    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<Edited> {
        again!(self.add_stock(sale, add, request_id, now))
    }

    async fn lease_worker(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        not_before: Timestamp,
        span: Duration,
    ) -> Result<Lease> {
        again!(self.grant_lease(holder, worker, not_before, span))
    }

    async fn return_worker(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()> {
        again!(self.end_lease(holder, worker, unused_from))
    }

    async fn audit(&self, row: &AuditRow) -> Result<()> {
        again!(self.append_audit(row))
    }

    async fn audit_log(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRow>> {
        self.read_audit(filter).await
    }

    async fn has_other_workers(&self, holder: &str) -> Result<bool> {
        self.find_other_worker(holder).await
    }

    async fn ping(&self) -> Result<()> {
        self.db.rows("SELECT id FROM sale WHERE id = 0", &[]).await?;
        Ok(())
    }

    async fn close(&self) {
        self.db.close().await;
    }
}

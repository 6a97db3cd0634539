//! The operations of a ledger, shared by all databases. The differences are in the dialect and in the fast path of `record`.
//!
//! - `record`: inserts admitted orders, one transaction per batch; `resolve`: the outcome of each order if the fast path does not apply
//! - `quarantine`: orders whose data the database rejects
//! - `orders`: reading and cancelling; `events`: the steps of orders; `event_outbox`: those that are to be delivered;
//!   `expiry`: cancels orders that were not paid in time; `payments`: pays orders; `refunds`: returns payments;
//!   `late_payments`: moves payments of cancelled orders to new ones; `redemption`: redeems paid orders
//! - `sales`: reading and creating sales; `sale_edits`: edits of their status and window; `stock`: top-ups and reductions
//! - `lease`: worker numbers for the id generator; `gate`: the record of a gate on a server;
//!   `queue`: the record of the queue; `fence`: which process may do scheduled work; `reconcile`: what reconciling has found
//! - `catalogue`, `accounts`: shops and users; `login`: login codes; `audit`: the audit log
//!
//! Every transaction that changes `live` or `sold` locks the sale's row first. A transaction that conflicts with another one is retried as a
//! whole, a few times.

mod accounts;
mod audit;
mod catalogue;
mod event_outbox;
mod events;
mod expiry;
mod fence;
mod gate;
mod late_payments;
mod lease;
mod login;
mod orders;
mod parked;
mod payments;
mod quarantine;
mod queue;
mod reconcile;
mod record;
mod redemption;
mod refunds;
mod resolve;
mod sale_edits;
mod sales;
mod shop_search;
mod stock;

use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ids::{IdKind, Lease, WorkerId};
use stampede_core::ports::{
    Admitted, AuditFilter, AuditLog, AuditRow, ClaimOutcome, CreateOutcome, DiscardOutcome, EditOutcome, EventDelivery,
    EventOutbox, Expired, Fence, Fenced, GateRecord, GateRecords, Ledger, LedgerError, LoadedSale, OrderLedger,
    OrderRow, OutboxEntry, ParkedMessage, PaymentLedger, PaymentOutcome, PendingRelease, QuarantinedOrder, QueueClaim,
    QueueRecords, QueueSettings, RecordOutcome, Result, SaleDraft, SaleLedger, SaleRecords, TransitionOutcome,
    WaitingStep, WorkerLeases,
};
use stampede_core::{
    Actor, Epoch, Order, OrderEvent, OrderId, Payment, RefundAttempt, ReportedPayment, Sale, SaleId, SaleStatus,
    Timestamp, UserId, WindowChange,
};

pub(crate) use self::event_outbox::json_ids;
use stampede_lock::KeyedMutex;

use crate::LedgerConfig;
use crate::db::{Pool, args};

#[derive(Debug)]
pub(crate) struct Store {
    db: Pool,
    config: LedgerConfig,
    /// The sales of which an order is being changed (`orders::begin_with`).
    changing: KeyedMutex<SaleId>,
}

impl Store {
    pub(crate) fn new(db: Pool, config: LedgerConfig) -> Self {
        Self { db, config, changing: KeyedMutex::new() }
    }
}

/// The maximum number of attempts of a transaction that conflicts with others.
const MAX_ATTEMPTS: u32 = 8;
/// A conflict after this long is a lock that another client holds, and goes on holding.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// Repeats a transaction while it conflicts with others. These have ended by then, so a short pause is enough. With `except_after`, a
/// transaction that has waited for longer than that is not repeated.
macro_rules! retry_conflicts {
    ($transaction:expr) => {
        retry_conflicts!($transaction, except_after: Duration::MAX)
    };
    ($transaction:expr, except_after: $longest:expr) => {{
        let mut tried = 1;
        loop {
            let started = std::time::Instant::now();
            match $transaction.await {
                Err(LedgerError::Conflict(error))
                    if tried < $crate::store::MAX_ATTEMPTS && started.elapsed() <= $longest =>
                {
                    tracing::debug!(%error, tried, "another transaction was in the way");
                    tokio::time::sleep(Duration::from_millis(u64::from(tried * tried))).await;
                    tried += 1;
                }
                done => break done,
            }
        }
    }};
}
use retry_conflicts;

/// The error of a row with an invalid value.
fn unreadable(what: &str) -> LedgerError {
    LedgerError::Poison(format!("{what} cannot be read").into())
}

/// `1,2,3` for an IN clause.
fn list(numbers: impl Iterator<Item = i64>) -> String {
    numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(",")
}

#[async_trait]
impl OrderLedger for Store {
    async fn record(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<RecordOutcome>> {
        retry_conflicts!(self.record_batch(sale, epoch, batch))
    }

    async fn quarantine(&self, order: &QuarantinedOrder) -> Result<RecordOutcome> {
        retry_conflicts!(self.put_in_quarantine(order))
    }

    async fn quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>> {
        self.read_quarantined(before, limit).await
    }

    async fn quarantined_order(&self, id: OrderId) -> Result<Option<QuarantinedOrder>> {
        self.read_quarantined_order(id).await
    }

    async fn quarantined_sales(&self) -> Result<Vec<(SaleId, u64)>> {
        self.count_quarantined().await
    }

    async fn retry_quarantined(&self, id: OrderId) -> Result<Option<RecordOutcome>> {
        retry_conflicts!(self.record_quarantined(id))
    }

    async fn discard_quarantined(&self, id: OrderId) -> Result<DiscardOutcome> {
        retry_conflicts!(self.reject_quarantined(id))
    }

    async fn cancel(&self, order: OrderId, user: UserId, now: Timestamp) -> Result<TransitionOutcome> {
        retry_conflicts!(self.cancel_order(order, Some(user), Actor::Buyer, now), except_after: LONG_WAIT)
    }

    async fn cancel_for_operator(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        retry_conflicts!(self.cancel_order(order, None, Actor::Operator, now), except_after: LONG_WAIT)
    }

    async fn next_payment_due(&self) -> Result<Option<Timestamp>> {
        self.db.row(expiry::NEXT_DUE, &[]).await?.map(|row| Ok(Timestamp::from_ms(row.int(0)?))).transpose()
    }

    async fn expire_orders(&self, now: Timestamp, limit: u32, except: &[SaleId]) -> Result<Expired> {
        self.cancel_due(now, limit, except).await
    }

    async fn pending_releases(&self, after: Option<OrderId>, limit: u32) -> Result<Vec<PendingRelease>> {
        self.read_pending_releases(after, limit).await
    }

    async fn delete_pending_releases(&self, orders: &[OrderId]) -> Result<()> {
        retry_conflicts!(self.remove_pending_releases(orders))
    }

    async fn order(&self, id: OrderId) -> Result<Option<Order>> {
        self.read_order(id).await
    }

    async fn order_history(&self, id: OrderId) -> Result<Vec<OrderEvent>> {
        self.read_history(id).await
    }

    async fn steps_of(&self, orders: &[OrderId]) -> Result<Vec<(OrderId, OrderEvent)>> {
        self.read_steps_of(orders).await
    }

    async fn orders_with(&self, ids: &[OrderId]) -> Result<Vec<Order>> {
        self.read_orders_with(ids).await
    }

    async fn live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>> {
        self.read_live_order(sale, user).await
    }

    async fn orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
        self.read_orders_of(user, before, limit).await
    }

    async fn index_orders(&self, fence: Option<Fence>, ended_before: Timestamp, limit: u32) -> Result<Fenced<bool>> {
        retry_conflicts!(self.copy_into_index(fence, ended_before, limit))
    }
}

#[async_trait]
impl PaymentLedger for Store {
    async fn receive_payment(
        &self,
        payment: &ReportedPayment,
        now: Timestamp,
        held_until: Option<Timestamp>,
    ) -> Result<PaymentOutcome> {
        retry_conflicts!(self.insert_payment(payment, now, held_until))
    }

    async fn move_payment(&self, payment: &ReportedPayment, to: OrderId, now: Timestamp) -> Result<bool> {
        retry_conflicts!(self.move_to_order(payment, to, now))
    }

    async fn end_hold(&self, payment: &ReportedPayment, now: Timestamp) -> Result<bool> {
        retry_conflicts!(self.end_payment_hold(payment, now))
    }

    async fn cancel_readmitted(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        retry_conflicts!(self.cancel_order(order, None, Actor::System, now), except_after: LONG_WAIT)
    }

    async fn refund(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        retry_conflicts!(self.refund_order(order, now), except_after: LONG_WAIT)
    }

    async fn due_refunds(&self, now: Timestamp, limit: u32) -> Result<Vec<RefundAttempt>> {
        self.read_due_refunds(now, limit).await
    }

    async fn open_refunds(&self, limit: u32) -> Result<Vec<RefundAttempt>> {
        self.read_open_refunds(limit).await
    }

    async fn begin_refund(&self, attempt: &RefundAttempt, next_at: Timestamp) -> Result<bool> {
        retry_conflicts!(self.count_refund(attempt, next_at))
    }

    async fn fail_refund(&self, attempt: &RefundAttempt, error: &str, next_at: Option<Timestamp>) -> Result<()> {
        retry_conflicts!(self.set_refund_error(attempt, error, next_at))
    }

    async fn retry_refund(&self, provider: &str, transaction: &str, now: Timestamp) -> Result<bool> {
        retry_conflicts!(self.set_refund_due(provider, transaction, now))
    }

    async fn payment(&self, provider: &str, transaction: &str) -> Result<Option<Payment>> {
        self.read_payment(provider, transaction).await
    }

    async fn complete_refund(&self, payment: &ReportedPayment, now: Timestamp) -> Result<bool> {
        retry_conflicts!(self.set_refunded(payment, now))
    }

    async fn stray_payments(&self) -> Result<Vec<Payment>> {
        self.read_stray_payments().await
    }

    async fn payments_of(&self, order: OrderId) -> Result<Vec<Payment>> {
        self.read_payments_of(order).await
    }

    async fn redeem_code(&self, order: OrderId, new: &str) -> Result<Option<String>> {
        retry_conflicts!(self.code_of(order, new))
    }

    async fn try_redeem_code(&self, order: OrderId) -> Result<Option<String>> {
        retry_conflicts!(self.count_redeem_try(order))
    }

    async fn redeem(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        retry_conflicts!(self.redeem_order(order, now))
    }
}

#[async_trait]
impl SaleLedger for Store {
    async fn sales(&self, end_after: Option<Timestamp>) -> Result<Vec<Sale>> {
        self.read_sales(end_after).await
    }

    async fn sale(&self, id: SaleId) -> Result<Option<Sale>> {
        self.read_sale(id).await
    }

    async fn sale_ids(&self, after: Option<SaleId>, limit: u32) -> Result<Vec<SaleId>> {
        let sql = "SELECT id FROM sale WHERE id > ? ORDER BY id LIMIT ?";
        let rows = self.db.rows(sql, args![after.map_or(0, SaleId::get), limit]).await?;
        rows.iter().map(|row| SaleId::new(row.int(0)?).map_err(|_| unreadable("a sale"))).collect()
    }

    async fn load(&self, id: SaleId) -> Result<Option<LoadedSale>> {
        self.load_sale(id).await
    }

    async fn inspect(&self, id: SaleId) -> Result<Option<SaleRecords>> {
        self.inspect_sale(id).await
    }

    async fn orders_in(&self, sale: SaleId, after: Option<OrderId>, limit: u32) -> Result<Vec<OrderRow>> {
        self.read_orders_in(sale, after, limit).await
    }

    async fn create_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<CreateOutcome> {
        retry_conflicts!(self.insert_sale(draft, now))
    }

    async fn set_status(
        &self,
        sale: SaleId,
        status: SaleStatus,
        request_id: Option<&str>,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        retry_conflicts!(self.edit_status(sale, status, request_id, now))
    }

    async fn set_window(
        &self,
        sale: SaleId,
        change: WindowChange,
        request_id: &str,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        retry_conflicts!(self.edit_window(sale, change, request_id, now))
    }

    async fn sales_with_pending_edits(&self, limit: u32) -> Result<Vec<SaleId>> {
        self.read_sales_with_pending_edits(limit).await
    }

    async fn note_applied_edits(&self, sale: SaleId, version: i64, now: Timestamp) -> Result<()> {
        retry_conflicts!(self.set_applied(sale, version, now))
    }

    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome> {
        retry_conflicts!(self.add_stock(sale, add, request_id, now))
    }

    async fn reduce(&self, sale: SaleId, remove: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome> {
        retry_conflicts!(self.lower_cap(sale, remove, request_id, now))
    }
}

#[async_trait]
impl EventOutbox for Store {
    async fn due_events(&self, now: Timestamp, limit: u32) -> Result<Vec<OutboxEntry>> {
        self.read_due_events(now, limit).await
    }

    async fn waiting_steps(&self, orders: &[OrderId]) -> Result<Vec<WaitingStep>> {
        self.read_waiting_steps(orders).await
    }

    async fn finish_events(&self, delivery: &EventDelivery) -> Result<()> {
        retry_conflicts!(self.store_delivery(delivery))
    }

    async fn failed_events(&self, limit: u32) -> Result<Vec<OutboxEntry>> {
        self.read_failed_events(limit).await
    }

    async fn retry_events(&self, order: Option<OrderId>) -> Result<u64> {
        retry_conflicts!(self.set_events_due(order))
    }

    async fn count_events(&self) -> Result<u64> {
        self.count_entries().await
    }
}

#[async_trait]
impl GateRecords for Store {
    async fn gate_record(&self, new_id: &str) -> Result<GateRecord> {
        self.read_gate_record(new_id).await
    }

    async fn claim_tier(&self, holder: &str, tier: &str, not_after: &[&str]) -> Result<ClaimOutcome> {
        retry_conflicts!(self.set_tier(holder, tier, not_after))
    }

    async fn begin_rebuild(&self, from: u64, replication_id: &str) -> Result<Option<u64>> {
        retry_conflicts!(self.replace_incarnation(from, replication_id))
    }

    async fn begin_load(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<Option<LoadedSale>> {
        retry_conflicts!(self.load_under_next_epoch(sale, epoch, incarnation), except_after: LONG_WAIT)
    }

    async fn finish_load(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<bool> {
        retry_conflicts!(self.open_loaded(sale, epoch, incarnation), except_after: LONG_WAIT)
    }

    async fn now(&self) -> Result<Timestamp> {
        self.read_clock().await
    }
}

#[async_trait]
impl QueueRecords for Store {
    async fn claim_queue(&self, holder: &str, settings: &QueueSettings) -> Result<QueueClaim> {
        retry_conflicts!(self.set_queue(holder, settings))
    }

    async fn pass_marker(&self, partition: u16, incarnation: u64) -> Result<()> {
        retry_conflicts!(self.note_marker(partition, incarnation))
    }

    async fn passed_markers(&self, incarnation: u64) -> Result<u16> {
        self.count_markers(incarnation).await
    }

    async fn park(&self, messages: &[ParkedMessage], limit: u64) -> Result<bool> {
        retry_conflicts!(self.store_parked(messages, limit))
    }

    async fn parked_sales(&self) -> Result<Vec<(SaleId, u64)>> {
        self.count_parked().await
    }

    async fn parked(&self, sale: SaleId, after: Option<[u8; 32]>, limit: u32) -> Result<Vec<ParkedMessage>> {
        self.read_parked(sale, after, limit).await
    }

    async fn unpark(&self, messages: &[ParkedMessage]) -> Result<()> {
        retry_conflicts!(self.delete_parked(messages))
    }
}

#[async_trait]
impl WorkerLeases for Store {
    async fn lease_worker(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        not_before: Timestamp,
        span: Duration,
    ) -> Result<Lease> {
        retry_conflicts!(self.grant_lease(holder, worker, not_before, span))
    }

    async fn return_worker(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()> {
        retry_conflicts!(self.end_lease(holder, worker, unused_from))
    }

    async fn has_other_workers(&self, holder: &str) -> Result<bool> {
        self.find_other_worker(holder).await
    }

    async fn claim_id_kind(&self, kind: IdKind) -> Result<bool> {
        match kind {
            IdKind::Snowflake => self.has_only_snowflakes().await,
            IdKind::Counter => retry_conflicts!(self.note_counter_ids()).map(|()| true),
        }
    }
}

#[async_trait]
impl AuditLog for Store {
    async fn audit(&self, row: &AuditRow) -> Result<()> {
        retry_conflicts!(self.append_audit(row))
    }

    async fn audit_log(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRow>> {
        self.read_audit(filter).await
    }
}

#[async_trait]
impl Ledger for Store {
    async fn ping(&self) -> Result<()> {
        self.db.rows("SELECT id FROM sale WHERE id = 0", &[]).await?;
        // Changes nothing, but fails if the database is read-only.
        self.db.execute("UPDATE sale SET ver = ver WHERE id = 0", &[]).await
    }

    async fn close(&self) {
        self.db.close().await;
    }
}

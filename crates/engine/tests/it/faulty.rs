//! The real ledger with failures injected before or after a call.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ids::{IdKind, Lease, WorkerId};
use stampede_core::ports::*;
use stampede_core::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The call never arrives.
    Before,
    /// The call is carried out and its answer is lost.
    After,
    /// The call panics.
    Panic,
    /// The call takes this long.
    Slow(Duration),
}

/// What happens to the next calls of `record`, in turn, and which users' orders it rejects.
#[derive(Debug, Default)]
pub struct Faults {
    pub cuts: Mutex<VecDeque<Cut>>,
    pub poison: Mutex<Vec<UserId>>,
    pub calls: AtomicUsize,
    /// How often the live order of a user was read.
    pub live_orders: AtomicUsize,
    /// Whether the database rejects a discarded order, too.
    pub rejects_discards: AtomicBool,
    /// Whether the next calls of `audit` arrive; `false` is cut.
    pub audits: Mutex<VecDeque<bool>>,
}

impl Faults {
    /// How many calls of `record` there were.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
pub struct Faulty {
    pub inner: Arc<dyn Ledger>,
    pub faults: Arc<Faults>,
}

#[async_trait]
impl OrderLedger for Faulty {
    async fn record(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<RecordOutcome>> {
        self.faults.calls.fetch_add(1, Ordering::SeqCst);
        let cut = self.faults.cuts.lock().unwrap().pop_front();
        match cut {
            Some(Cut::Before) => return Err(LedgerError::Unavailable("cut".into())),
            Some(Cut::Panic) => panic!("on purpose"),
            Some(Cut::Slow(span)) => tokio::time::sleep(span).await,
            Some(Cut::After) | None => {}
        }
        if batch.iter().any(|item| self.faults.poison.lock().unwrap().contains(&item.user)) {
            return Err(LedgerError::Poison("cannot hold this".into()));
        }
        let recorded = self.inner.record(sale, epoch, batch).await?;
        if cut == Some(Cut::After) { Err(LedgerError::Unknown("cut".into())) } else { Ok(recorded) }
    }

    async fn quarantine(&self, order: &QuarantinedOrder) -> Result<RecordOutcome> {
        self.inner.quarantine(order).await
    }

    async fn quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>> {
        self.inner.quarantined(before, limit).await
    }

    async fn quarantined_order(&self, id: OrderId) -> Result<Option<QuarantinedOrder>> {
        self.inner.quarantined_order(id).await
    }

    async fn quarantined_sales(&self) -> Result<Vec<(SaleId, u64)>> {
        self.inner.quarantined_sales().await
    }

    async fn retry_quarantined(&self, id: OrderId) -> Result<Option<RecordOutcome>> {
        self.inner.retry_quarantined(id).await
    }

    async fn discard_quarantined(&self, id: OrderId) -> Result<DiscardOutcome> {
        if self.faults.rejects_discards.load(Ordering::SeqCst) {
            return Err(LedgerError::Poison("cannot hold this".into()));
        }
        self.inner.discard_quarantined(id).await
    }

    async fn cancel(&self, order: OrderId, user: UserId, now: Timestamp) -> Result<TransitionOutcome> {
        self.inner.cancel(order, user, now).await
    }

    async fn cancel_for_operator(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        self.inner.cancel_for_operator(order, now).await
    }

    async fn next_payment_due(&self) -> Result<Option<Timestamp>> {
        self.inner.next_payment_due().await
    }

    async fn expire_orders(&self, now: Timestamp, limit: u32, except: &[SaleId]) -> Result<Expired> {
        self.inner.expire_orders(now, limit, except).await
    }

    async fn pending_releases(&self, after: Option<OrderId>, limit: u32) -> Result<Vec<PendingRelease>> {
        self.inner.pending_releases(after, limit).await
    }

    async fn delete_pending_releases(&self, orders: &[OrderId]) -> Result<()> {
        self.inner.delete_pending_releases(orders).await
    }

    async fn order(&self, id: OrderId) -> Result<Option<Order>> {
        self.inner.order(id).await
    }

    async fn order_history(&self, id: OrderId) -> Result<Vec<OrderEvent>> {
        self.inner.order_history(id).await
    }

    async fn steps_of(&self, orders: &[OrderId]) -> Result<Vec<(OrderId, OrderEvent)>> {
        self.inner.steps_of(orders).await
    }

    async fn orders_with(&self, ids: &[OrderId]) -> Result<Vec<Order>> {
        self.inner.orders_with(ids).await
    }

    async fn live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>> {
        self.faults.live_orders.fetch_add(1, Ordering::SeqCst);
        self.inner.live_order(sale, user).await
    }

    async fn orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
        self.inner.orders_of(user, before, limit).await
    }

    async fn index_orders(&self, fence: Option<Fence>, ended_before: Timestamp, limit: u32) -> Result<Fenced<bool>> {
        self.inner.index_orders(fence, ended_before, limit).await
    }
}

#[async_trait]
impl PaymentLedger for Faulty {
    async fn receive_payment(
        &self,
        payment: &ReportedPayment,
        now: Timestamp,
        held_until: Option<Timestamp>,
    ) -> Result<PaymentOutcome> {
        self.inner.receive_payment(payment, now, held_until).await
    }

    async fn move_payment(&self, payment: &ReportedPayment, to: OrderId, now: Timestamp) -> Result<bool> {
        self.inner.move_payment(payment, to, now).await
    }

    async fn end_hold(&self, payment: &ReportedPayment, now: Timestamp) -> Result<bool> {
        self.inner.end_hold(payment, now).await
    }

    async fn cancel_readmitted(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        self.inner.cancel_readmitted(order, now).await
    }

    async fn complete_refund(&self, payment: &ReportedPayment, now: Timestamp) -> Result<bool> {
        self.inner.complete_refund(payment, now).await
    }

    async fn stray_payments(&self) -> Result<Vec<Payment>> {
        self.inner.stray_payments().await
    }

    async fn payments_of(&self, order: OrderId) -> Result<Vec<Payment>> {
        self.inner.payments_of(order).await
    }

    async fn refund(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        self.inner.refund(order, now).await
    }

    async fn due_refunds(&self, now: Timestamp, limit: u32) -> Result<Vec<RefundAttempt>> {
        self.inner.due_refunds(now, limit).await
    }

    async fn open_refunds(&self, limit: u32) -> Result<Vec<RefundAttempt>> {
        self.inner.open_refunds(limit).await
    }

    async fn begin_refund(&self, attempt: &RefundAttempt, next_at: Timestamp) -> Result<bool> {
        self.inner.begin_refund(attempt, next_at).await
    }

    async fn fail_refund(&self, attempt: &RefundAttempt, error: &str, next_at: Option<Timestamp>) -> Result<()> {
        self.inner.fail_refund(attempt, error, next_at).await
    }

    async fn retry_refund(&self, provider: &str, transaction: &str, now: Timestamp) -> Result<bool> {
        self.inner.retry_refund(provider, transaction, now).await
    }

    async fn payment(&self, provider: &str, transaction: &str) -> Result<Option<Payment>> {
        self.inner.payment(provider, transaction).await
    }

    async fn redeem_code(&self, order: OrderId, new: &str) -> Result<Option<String>> {
        self.inner.redeem_code(order, new).await
    }

    async fn try_redeem_code(&self, order: OrderId) -> Result<Option<String>> {
        self.inner.try_redeem_code(order).await
    }

    async fn redeem(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome> {
        self.inner.redeem(order, now).await
    }
}

#[async_trait]
impl SaleLedger for Faulty {
    async fn sales(&self, end_after: Option<Timestamp>) -> Result<Vec<Sale>> {
        self.inner.sales(end_after).await
    }

    async fn sale(&self, id: SaleId) -> Result<Option<Sale>> {
        self.inner.sale(id).await
    }

    async fn sale_ids(&self, after: Option<SaleId>, limit: u32) -> Result<Vec<SaleId>> {
        self.inner.sale_ids(after, limit).await
    }

    async fn load(&self, id: SaleId) -> Result<Option<LoadedSale>> {
        self.inner.load(id).await
    }

    async fn inspect(&self, id: SaleId) -> Result<Option<SaleRecords>> {
        self.inner.inspect(id).await
    }

    async fn orders_in(&self, sale: SaleId, after: Option<OrderId>, limit: u32) -> Result<Vec<OrderRow>> {
        self.inner.orders_in(sale, after, limit).await
    }

    async fn create_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<CreateOutcome> {
        self.inner.create_sale(draft, now).await
    }

    async fn set_status(
        &self,
        sale: SaleId,
        status: SaleStatus,
        request_id: Option<&str>,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        self.inner.set_status(sale, status, request_id, now).await
    }

    async fn set_window(
        &self,
        sale: SaleId,
        change: WindowChange,
        request_id: &str,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        self.inner.set_window(sale, change, request_id, now).await
    }

    async fn sales_with_pending_edits(&self, limit: u32) -> Result<Vec<SaleId>> {
        self.inner.sales_with_pending_edits(limit).await
    }

    async fn note_applied_edits(&self, sale: SaleId, version: i64, now: Timestamp) -> Result<()> {
        self.inner.note_applied_edits(sale, version, now).await
    }

    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome> {
        self.inner.top_up(sale, add, request_id, now).await
    }

    async fn reduce(&self, sale: SaleId, remove: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome> {
        self.inner.reduce(sale, remove, request_id, now).await
    }
}

#[async_trait]
impl GateRecords for Faulty {
    async fn gate_record(&self, new_id: &str) -> Result<GateRecord> {
        self.inner.gate_record(new_id).await
    }

    async fn claim_tier(&self, holder: &str, tier: &str, not_after: &[&str]) -> Result<ClaimOutcome> {
        self.inner.claim_tier(holder, tier, not_after).await
    }

    async fn begin_rebuild(&self, from: u64, replication_id: &str) -> Result<Option<u64>> {
        self.inner.begin_rebuild(from, replication_id).await
    }

    async fn begin_load(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<Option<LoadedSale>> {
        self.inner.begin_load(sale, epoch, incarnation).await
    }

    async fn finish_load(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<bool> {
        self.inner.finish_load(sale, epoch, incarnation).await
    }

    async fn now(&self) -> Result<Timestamp> {
        self.inner.now().await
    }
}

#[async_trait]
impl QueueRecords for Faulty {
    async fn claim_queue(&self, holder: &str, settings: &QueueSettings) -> Result<QueueClaim> {
        self.inner.claim_queue(holder, settings).await
    }

    async fn pass_marker(&self, partition: u16, incarnation: u64) -> Result<()> {
        self.inner.pass_marker(partition, incarnation).await
    }

    async fn passed_markers(&self, incarnation: u64) -> Result<u16> {
        self.inner.passed_markers(incarnation).await
    }

    async fn park(&self, messages: &[ParkedMessage], limit: u64) -> Result<bool> {
        self.inner.park(messages, limit).await
    }

    async fn parked_sales(&self) -> Result<Vec<(SaleId, u64)>> {
        self.inner.parked_sales().await
    }

    async fn parked(&self, sale: SaleId, after: Option<[u8; 32]>, limit: u32) -> Result<Vec<ParkedMessage>> {
        self.inner.parked(sale, after, limit).await
    }

    async fn unpark(&self, messages: &[ParkedMessage]) -> Result<()> {
        self.inner.unpark(messages).await
    }
}

#[async_trait]
impl WorkerLeases for Faulty {
    async fn lease_worker(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        from: Timestamp,
        span: Duration,
    ) -> Result<Lease> {
        self.inner.lease_worker(holder, worker, from, span).await
    }

    async fn return_worker(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()> {
        self.inner.return_worker(holder, worker, unused_from).await
    }

    async fn has_other_workers(&self, holder: &str) -> Result<bool> {
        self.inner.has_other_workers(holder).await
    }

    async fn claim_id_kind(&self, kind: IdKind) -> Result<bool> {
        self.inner.claim_id_kind(kind).await
    }
}

#[async_trait]
impl ReconcileLog for Faulty {
    async fn append_reconciled(&self, fence: Option<Fence>, rows: &[ReconcileRow]) -> Result<Fenced<()>> {
        self.inner.append_reconciled(fence, rows).await
    }

    async fn reconciled(&self, before: Option<i64>, limit: u32) -> Result<Vec<ReconcileRow>> {
        self.inner.reconciled(before, limit).await
    }

    async fn adopt_cap(&self, sale: SaleId, version: i64, cap: u32, now: Timestamp) -> Result<Option<u32>> {
        self.inner.adopt_cap(sale, version, cap, now).await
    }

    async fn raise_version(&self, sale: SaleId, version: i64) -> Result<bool> {
        self.inner.raise_version(sale, version).await
    }

    async fn claim_alert(&self, case: &str, now: Timestamp, repeat_after: Duration) -> Result<bool> {
        self.inner.claim_alert(case, now, repeat_after).await
    }

    async fn clear_alert(&self, case: &str) -> Result<()> {
        self.inner.clear_alert(case).await
    }
}

#[async_trait]
impl EventOutbox for Faulty {
    async fn due_events(&self, now: Timestamp, limit: u32) -> Result<Vec<OutboxEntry>> {
        self.inner.due_events(now, limit).await
    }

    async fn waiting_steps(&self, orders: &[OrderId]) -> Result<Vec<WaitingStep>> {
        self.inner.waiting_steps(orders).await
    }

    async fn finish_events(&self, delivery: &EventDelivery) -> Result<()> {
        self.inner.finish_events(delivery).await
    }

    async fn failed_events(&self, limit: u32) -> Result<Vec<OutboxEntry>> {
        self.inner.failed_events(limit).await
    }

    async fn retry_events(&self, order: Option<OrderId>) -> Result<u64> {
        self.inner.retry_events(order).await
    }

    async fn count_events(&self) -> Result<u64> {
        self.inner.count_events().await
    }
}

#[async_trait]
impl AuditLog for Faulty {
    async fn audit(&self, row: &AuditRow) -> Result<()> {
        if self.faults.audits.lock().unwrap().pop_front() == Some(false) {
            return Err(LedgerError::Unavailable("cut".into()));
        }
        self.inner.audit(row).await
    }

    async fn audit_log(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRow>> {
        self.inner.audit_log(filter).await
    }
}

#[async_trait]
impl Ledger for Faulty {
    async fn ping(&self) -> Result<()> {
        self.inner.ping().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

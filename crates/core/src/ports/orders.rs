//! Orders in the ledger: recording, cancelling, quarantine and reading.

use async_trait::async_trait;

use super::{Fence, Fenced, LedgerError, Result};
use crate::clock::Timestamp;
use crate::ids::{Epoch, OrderId, SaleId, UserId};
use crate::order::{Order, OrderEvent, OrderStatus, RejectReason, StepReason};

/// One admitted order on its way into the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    pub order: OrderId,
    pub user: UserId,
    /// The gate's count of admissions at this one. A lower number was admitted earlier.
    pub seq: i64,
    pub at: Timestamp,
}

/// The result of recording one admitted order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOutcome {
    /// This call inserted its row.
    Inserted,
    /// An earlier call inserted its row, and the order is live.
    AlreadyRecorded,
    /// An earlier call inserted its row, and the order has died since. It must not be revived.
    Dead,
    /// Its row is `rejected`. `existing` is the live order that the buyer has instead.
    Rejected { reason: RejectReason, existing: Option<OrderId> },
    /// A row of another sale or user has this id. The order needs a new id, and an operator should investigate.
    IdCollision,
    /// It is in quarantine and has no row. It keeps its mark until an operator retries or discards it, or its
    /// buyer cancels it.
    Quarantined,
}

/// An order that could not be recorded because of its data. It keeps its mark, so its stock stays taken, until an operator
/// retries or discards it, or its buyer cancels it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuarantinedOrder {
    pub sale: SaleId,
    pub epoch: Epoch,
    pub admitted: Admitted,
    /// The database's error message.
    pub error: String,
    pub quarantined_at: Timestamp,
}

/// The result of discarding a quarantined order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardOutcome {
    /// It is in the ledger as `rejected` now, and a [`PendingRelease`] is stored for its mark.
    Done,
    /// It has a row; only its quarantine entry was deleted.
    AlreadyRecorded,
    /// No such order is in quarantine.
    NoSuchOrder,
}

/// The result of a transition of an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransitionOutcome {
    Done(Order),
    /// The user has no such order.
    NoSuchOrder,
    /// The order made this transition before. Nothing was changed.
    Repeated(Order),
    /// The transition is not legal from its status.
    Illegal(OrderStatus),
}

/// What was found when orders were searched whose time to pay has ended.
#[derive(Debug, Default)]
pub struct Expired {
    /// How many orders were cancelled.
    pub orders: u64,
    /// Whether more may be due.
    pub more: bool,
    /// The sales that did not fail, unless what is due of them is all locked.
    pub done: Vec<SaleId>,
    /// The sales with orders that were left out because their rows are locked, as they are while they are paid; with the first of the orders.
    pub locked: Vec<(SaleId, OrderId)>,
    /// The sales whose orders could not be cancelled, for example because another client has locked the row of the sale.
    pub failed: Vec<(SaleId, LedgerError)>,
}

/// A mark that must still be released in the gate: its order is dead in the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingRelease {
    pub order: OrderId,
    pub sale: SaleId,
    pub user: UserId,
    /// Whether the order was live and has ended; otherwise the ledger has never accepted it.
    pub ended: bool,
}

/// An order with everything the ledger stores about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderRow {
    pub order: Order,
    pub live: bool,
    /// Why it is in its status.
    pub reason: Option<StepReason>,
    pub epoch: Epoch,
    pub seq: i64,
}

/// Records orders and moves them through their states.
#[async_trait]
pub trait OrderLedger: Send + Sync {
    /// Records admitted orders of one sale in one transaction. Returns one outcome per order, in the order of the batch.
    /// Idempotent by order id.
    async fn record(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<RecordOutcome>>;

    /// Puts an order that cannot be recorded because of its data into quarantine. If it is there already, only the error is replaced,
    /// also after a rebuild of its sale. Otherwise, if the sale was rebuilt since the order's admission, the order becomes a `rejected` row
    /// instead. If the order has a row by now, that row decides the outcome.
    async fn quarantine(&self, order: &QuarantinedOrder) -> Result<RecordOutcome>;

    /// The orders in quarantine with an id below `before`, newest first.
    async fn quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>>;

    async fn quarantined_order(&self, id: OrderId) -> Result<Option<QuarantinedOrder>>;

    /// The sales with orders in quarantine, and how many each has.
    async fn quarantined_sales(&self) -> Result<Vec<(SaleId, u64)>>;

    /// Records a quarantined order under the sale's current epoch and ends its quarantine, in one transaction. `None` if it is
    /// not in quarantine. If this fails, the order stays in quarantine.
    async fn retry_quarantined(&self, id: OrderId) -> Result<Option<RecordOutcome>>;

    /// Rejects a quarantined order for good, unless it has a row.
    async fn discard_quarantined(&self, id: OrderId) -> Result<DiscardOutcome>;

    /// Cancels the user's own unpaid order, also in quarantine: the stock is returned, and a [`PendingRelease`] is stored.
    async fn cancel(&self, order: OrderId, user: UserId, now: Timestamp) -> Result<TransitionOutcome>;

    /// As [`cancel`](Self::cancel), for an operator, regardless of the owner. One in quarantine is not found.
    async fn cancel_for_operator(&self, order: OrderId, now: Timestamp) -> Result<TransitionOutcome>;

    /// When the time to pay of unpaid orders ends next. The orders may have been paid or cancelled since.
    async fn next_payment_due(&self) -> Result<Option<Timestamp>>;

    /// Cancels unpaid orders whose time to pay has ended, of at most `limit` recorded batches, as [`cancel`](Self::cancel) does. Orders of
    /// the sales in `except` are left out. What it costs depends on what is due, not on how many orders there are. Correct if several
    /// processes call it at once.
    async fn expire_orders(&self, now: Timestamp, limit: u32, except: &[SaleId]) -> Result<Expired>;

    /// Marks still to be released in the gate, of orders above `after`, by rising order, at most `limit`.
    async fn pending_releases(&self, after: Option<OrderId>, limit: u32) -> Result<Vec<PendingRelease>>;

    /// Deletes pending releases whose marks have been released.
    async fn delete_pending_releases(&self, orders: &[OrderId]) -> Result<()>;

    async fn order(&self, id: OrderId) -> Result<Option<Order>>;

    /// The steps of an order, from the one with which it was recorded. Empty if there is no such order.
    async fn order_history(&self, id: OrderId) -> Result<Vec<OrderEvent>>;

    /// The steps of these orders after they were recorded: those of one order together, in sequence.
    async fn steps_of(&self, orders: &[OrderId]) -> Result<Vec<(OrderId, OrderEvent)>>;

    /// The orders with these ids, as far as they exist, in no particular order.
    async fn orders_with(&self, ids: &[OrderId]) -> Result<Vec<Order>>;

    /// The user's live order in a sale.
    async fn live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>>;

    /// The user's orders with an id below `before`, newest first.
    async fn orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>>;

    /// Copies orders of sales that ended before `ended_before` into the index by user, at most `limit`. Returns whether more
    /// are left to copy.
    async fn index_orders(&self, fence: Option<Fence>, ended_before: Timestamp, limit: u32) -> Result<Fenced<bool>>;
}

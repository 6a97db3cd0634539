//! Sales in the ledger.

use async_trait::async_trait;

use super::{CreateOutcome, OrderRow, Result};
use crate::clock::Timestamp;
use crate::ids::{OrderId, SaleId, UserId, VoucherId};
use crate::order::OrderEvent;
use crate::payment::Payment;
use crate::sale::{Sale, SaleStatus, Window, WindowChange, WindowFault};

/// The result of editing a sale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditOutcome {
    Done {
        before: Sale,
        after: Sale,
    },
    /// The same request was carried out before. Nothing was changed.
    Repeated(Sale),
    NoSuchSale,
    Illegal(SaleStatus),
    /// The window cannot be changed like this now.
    IllegalWindow(WindowFault),
    /// The request id was used with other content.
    RequestIdReused,
}

/// What a gate is rebuilt from: a sale and its live orders, read in one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedSale {
    pub sale: Sale,
    pub marks: Vec<(UserId, OrderId)>,
    /// An order of each user whose orders have all ended, in a sale in which they may not buy again; else empty.
    pub ended: Vec<(UserId, OrderId)>,
}

/// Everything the ledger holds about a sale, read in one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaleRecords {
    pub sale: Sale,
    pub orders: Vec<OrderRow>,
    /// The steps of its orders after they were recorded. Those of one order are in sequence.
    pub events: Vec<(OrderId, OrderEvent)>,
    /// The payments of its orders.
    pub payments: Vec<Payment>,
    pub quarantine: Vec<(UserId, OrderId)>,
    pub pending_releases: Vec<OrderId>,
    pub stock_changes: Vec<StockChange>,
    /// By rising version.
    pub edits: Vec<SaleEdit>,
}

/// Stock that was added to a sale after it was created, or taken from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StockChange {
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// When the total was changed. A reduction holds in the gate before that.
    pub done_at: Timestamp,
    /// By how much the total has changed: 0 for a reduction that is not completed.
    pub added: i64,
    /// Whether it raised the version of the sale.
    pub is_edit: bool,
}

/// An edit of a sale's status or window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaleEdit {
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// When the gate was known to have it; `None` while it may not.
    pub applied_at: Option<Timestamp>,
    /// The version of the sale with it.
    pub version: i64,
    pub change: SettingChange,
}

/// What an edit has changed. Both are equal if a request asked for what was there already: then the version has not risen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingChange {
    Status { from: SaleStatus, to: SaleStatus },
    Window { from: Window, to: Window },
}

impl SettingChange {
    pub fn is_change(self) -> bool {
        match self {
            Self::Status { from, to } => from != to,
            Self::Window { from, to } => from != to,
        }
    }
}

/// A sale to be created.
#[derive(Debug, Clone, Copy)]
pub struct SaleDraft {
    pub id: SaleId,
    pub voucher: VoucherId,
    pub stock: u32,
    pub window: Window,
    pub status: SaleStatus,
    /// How long an order may be unpaid; 0 without a limit.
    pub payment_deadline_ms: u32,
    /// Whether a buyer whose order has ended may buy again.
    pub buy_again: bool,
}

/// Reads and edits sales.
#[async_trait]
pub trait SaleLedger: Send + Sync {
    /// The sales that end after `end_after`, or all; newest first.
    async fn sales(&self, end_after: Option<Timestamp>) -> Result<Vec<Sale>>;

    async fn sale(&self, id: SaleId) -> Result<Option<Sale>>;

    /// The ids of sales above `after`, by rising id.
    async fn sale_ids(&self, after: Option<SaleId>, limit: u32) -> Result<Vec<SaleId>>;

    /// The sale and its live orders, read in one snapshot.
    async fn load(&self, id: SaleId) -> Result<Option<LoadedSale>>;

    /// Everything the ledger holds about a sale, including dead orders, read in one snapshot.
    async fn inspect(&self, id: SaleId) -> Result<Option<SaleRecords>>;

    /// The orders of a sale with an id above `after`, including dead ones, by rising id.
    async fn orders_in(&self, sale: SaleId, after: Option<OrderId>, limit: u32) -> Result<Vec<OrderRow>>;

    async fn create_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<CreateOutcome>;

    /// Publishes, pauses, resumes or ends a sale, if that transition is legal. Once per request id, if there is one.
    async fn set_status(
        &self,
        sale: SaleId,
        status: SaleStatus,
        request_id: Option<&str>,
        now: Timestamp,
    ) -> Result<EditOutcome>;

    /// Changes when a sale begins and ends, once per request id. `now` must be the time by which the gate decides.
    async fn set_window(
        &self,
        sale: SaleId,
        change: WindowChange,
        request_id: &str,
        now: Timestamp,
    ) -> Result<EditOutcome>;

    /// Some sales with edits of the status or the window that the gate may not have, at most `limit`.
    async fn sales_with_pending_edits(&self, limit: u32) -> Result<Vec<SaleId>>;

    /// The gate has the edits of a sale up to this version. Idempotent: the first time counts.
    async fn note_applied_edits(&self, sale: SaleId, version: i64, now: Timestamp) -> Result<()>;

    /// Adds stock, once per request id.
    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome>;

    /// Lowers the cap, once per request id. The total stays until the gate has taken the cap
    /// ([`ReconcileLog::adopt_cap`](super::ReconcileLog::adopt_cap)): until then it may admit orders above it.
    async fn reduce(&self, sale: SaleId, remove: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome>;
}

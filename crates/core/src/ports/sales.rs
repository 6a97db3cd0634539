//! Sales in the ledger.

use async_trait::async_trait;

use super::{CreateOutcome, OrderRow, Result};
use crate::clock::Timestamp;
use crate::ids::{OrderId, SaleId, UserId, VoucherId};
use crate::sale::{Sale, SaleStatus, Window};

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
    /// The request id was used with other content.
    RequestIdReused,
}

/// What a gate is rebuilt from: a sale and its live orders, read in one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedSale {
    pub sale: Sale,
    pub marks: Vec<(UserId, OrderId)>,
}

/// Everything the ledger holds about a sale, read in one snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaleRecords {
    pub sale: Sale,
    pub orders: Vec<OrderRow>,
    pub quarantine: Vec<(UserId, OrderId)>,
    pub pending_releases: Vec<OrderId>,
    pub stock_changes: Vec<StockChange>,
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

/// A sale to be created.
#[derive(Debug, Clone, Copy)]
pub struct SaleDraft {
    pub id: SaleId,
    pub voucher: VoucherId,
    pub stock: u32,
    pub window: Window,
    pub status: SaleStatus,
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

    /// Publishes, pauses, resumes or ends a sale, if that transition is legal.
    async fn set_status(&self, sale: SaleId, status: SaleStatus) -> Result<EditOutcome>;

    /// Adds stock, once per request id.
    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome>;

    /// Lowers the cap, once per request id. The total stays until the gate has taken the cap
    /// ([`ReconcileLog::adopt_cap`](super::ReconcileLog::adopt_cap)): until then it may admit orders above it.
    async fn reduce(&self, sale: SaleId, remove: u32, request_id: &str, now: Timestamp) -> Result<EditOutcome>;
}

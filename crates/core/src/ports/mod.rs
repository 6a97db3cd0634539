//! The interfaces between the engine and what it is built on.
//!
//! - [`gate`]: decides who may buy
//! - [`Ledger`]: stores sales and orders, whichever database it is written for; made of [`OrderLedger`], [`PaymentLedger`], [`SaleLedger`],
//!   [`EventOutbox`], [`GateRecords`], [`QueueRecords`], [`ReconcileLog`], [`WorkerLeases`] and [`AuditLog`], so that a component asks for only what it uses
//! - [`Catalogue`]: shops and vouchers; [`Accounts`]: users and sessions
//!
//! Scheduled work is called with a [`Fence`] where several processes share a ledger.
//!
//! Every transaction that changes `live` or `sold` locks the sale's row first. Whether a failed call may be retried is in the
//! type of its error ([`LedgerError`]). A result that the caller must act on is a value, not an error.

mod accounts;
mod audit;
mod catalogue;
mod event_outbox;
mod fence;
pub mod gate;
mod gate_record;
mod leases;
mod orders;
mod payments;
mod queue;
mod reconcile;
mod sales;

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

pub use accounts::{
    Account, Accounts, Challenge, ChallengeId, ChallengeSelector, Disabled, LogInOutcome, Session, SessionId,
};
pub use audit::{AuditFilter, AuditLog, AuditRow};
pub use catalogue::{Catalogue, ReplaceOutcome, ShopFilter, ShopPage};
pub use event_outbox::{EventDelivery, EventOutbox, HeldEvent, OutboxEntry, OutgoingEvent, RejectedEvent, WaitingStep};
pub use fence::{Fence, Fenced, ScheduledWork};
pub use gate::{Decision, Gate, GateError, Snapshot};
pub use gate_record::{ClaimOutcome, GateRecord, GateRecords};
pub use leases::WorkerLeases;
pub use orders::{
    Admitted, DiscardOutcome, Expired, OrderLedger, OrderRow, PendingRelease, QuarantinedOrder, RecordOutcome,
    TransitionOutcome,
};
pub use payments::{MAX_REDEEM_TRIES, PaymentLedger, PaymentOutcome};
pub use queue::{ParkedMessage, QueueClaim, QueueRecords, QueueSettings};
pub use reconcile::{ReconcileLog, ReconcileRow};
pub use sales::{EditOutcome, LoadedSale, SaleDraft, SaleEdit, SaleLedger, SaleRecords, SettingChange, StockChange};

type Source = Box<dyn StdError + Send + Sync>;

/// Why a call of the ledger failed.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Not done: another transaction was in the way. The same call may succeed at once.
    #[error("another transaction was in the way")]
    Conflict(#[source] Source),
    /// Not done: the database could not be reached, or rolled back. The same call may succeed later.
    #[error("the ledger is not available")]
    Unavailable(#[source] Source),
    /// Possibly done: a commit was not answered. Repeating the call with the same ids finds out.
    #[error("the ledger did not answer whether it committed")]
    Unknown(#[source] Source),
    /// Not done, and the same call will fail again.
    #[error("the ledger rejected the data")]
    Poison(#[source] Source),
}

pub type Result<T> = std::result::Result<T, LedgerError>;

/// The result of creating a row that refers to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateOutcome {
    Created,
    /// The row it refers to does not exist.
    ParentMissing,
    AlreadyExists,
}

/// The record of sales and orders.
#[async_trait]
pub trait Ledger:
    OrderLedger
    + PaymentLedger
    + SaleLedger
    + EventOutbox
    + GateRecords
    + QueueRecords
    + ReconcileLog
    + WorkerLeases
    + AuditLog
    + fmt::Debug
{
    /// Checks that the database answers and accepts writes.
    async fn ping(&self) -> Result<()>;

    /// Closes the connections.
    async fn close(&self);
}

/// The stores of one database.
#[derive(Debug, Clone)]
pub struct Stores {
    pub ledger: Arc<dyn Ledger>,
    pub catalogue: Arc<dyn Catalogue>,
    pub accounts: Arc<dyn Accounts>,
}

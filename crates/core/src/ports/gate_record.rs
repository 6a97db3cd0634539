//! The ledger's record of a gate on a server: which incarnation of it is valid, and which sales are open in it.
//!
//! A rebuild replaces the incarnation, so that whatever the gate held before is no longer used: a sale that was opened under another one is
//! closing. Then every sale gets a new epoch, is loaded into the gate, and is marked as open.

use async_trait::async_trait;

use super::{LoadedSale, Result};
use crate::clock::Timestamp;
use crate::ids::{Epoch, SaleId};

/// What the ledger knows about its gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateRecord {
    /// Names this ledger, so that two installations on one server do not meet.
    pub ledger_id: String,
    /// Rises with every rebuild.
    pub incarnation: u64,
    /// The replication id of the server on which the incarnation was opened; empty if it is not known. A server with another one has
    /// another history, even if it has the scripts of the incarnation.
    pub replication_id: String,
}

/// The result of claiming a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimOutcome {
    Claimed,
    /// A process of this tier runs on the ledger.
    OtherTier(String),
    /// Processes run on the ledger that write events, and this one does not, or the reverse.
    OtherEvents,
    /// This tier was the last one, which must not be followed by the claimed one.
    After(String),
}

#[async_trait]
pub trait GateRecords: Send + Sync {
    /// The record of the gate. `new_id` becomes the ledger's id if it has none.
    async fn gate_record(&self, new_id: &str) -> Result<GateRecord>;

    /// Records the tier of the process that holds a worker number as `holder`, and whether it writes events, unless a process of another
    /// tier holds one, or one that differs in the events (its orders would have none), or the last tier was one of `not_after`. A change of
    /// the tier replaces the incarnation, because the gate of the earlier time is out of date.
    async fn claim_tier(&self, holder: &str, tier: &str, not_after: &[&str]) -> Result<ClaimOutcome>;

    /// Begins a rebuild on the server with this replication id: replaces the incarnation `from` by the next one, which is returned. Sales
    /// that were open are closing from then on. No row of a sale is written, so that a locked one holds up no other. `None` if the incarnation is another by now.
    async fn begin_rebuild(&self, from: u64, replication_id: &str) -> Result<Option<u64>>;

    /// Gives a sale the epoch after `epoch`, marks it as loading, and reads its live orders, in one transaction. `None` if its epoch or the
    /// incarnation is another by now, or there is no such sale. [`LedgerError::Conflict`](super::LedgerError::Conflict) if its row stays locked.
    async fn begin_load(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<Option<LoadedSale>>;

    /// Marks a sale that was loaded as open under this incarnation. `false` if it is not loading under this epoch, or the incarnation is
    /// another by now.
    async fn finish_load(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<bool>;

    /// The database's clock.
    async fn now(&self) -> Result<Timestamp>;
}

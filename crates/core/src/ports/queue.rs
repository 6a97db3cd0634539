//! The ledger's record of the queue between gate and ledger: what all processes must agree on, and which markers have come through.
//!
//! A rebuild of the gate sends a marker through each partition of the queue. The consumer of a partition reports its marker here, after
//! everything before it is recorded. The report is in the ledger, like the orders that it speaks of, because Redis may be what was lost.

use async_trait::async_trait;

use super::Result;
use crate::SaleId;

/// What all processes of an installation must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueSettings {
    /// Which queue it is.
    pub kind: String,
    /// Into how many partitions it is divided; 0 if it is not.
    pub partitions: u16,
    /// How long after the beginning of its admission an order may be confirmed. A rebuild waits for this time.
    pub accept_within_ms: u64,
}

/// The result of claiming settings of the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueClaim {
    Claimed,
    /// Other processes run with these settings.
    InUse(QueueSettings),
    /// The queue was made with these partitions, and may hold messages in them.
    OtherPartitions(u16),
}

/// A message of the queue that is kept in the ledger, because its orders cannot be recorded for now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedMessage {
    /// A digest of the payload: the same message is kept once.
    pub id: [u8; 32],
    pub sale: SaleId,
    pub payload: Vec<u8>,
}

#[async_trait]
pub trait QueueRecords: Send + Sync {
    /// Records the settings of the process that holds a worker number as `holder`, unless other processes run with others. Another
    /// queue replaces the incarnation of the gate, so that a rebuild records what is left in the former one. The number of
    /// partitions changes only together with the queue.
    async fn claim_queue(&self, holder: &str, settings: &QueueSettings) -> Result<QueueClaim>;

    /// Reports that the marker of this incarnation has come through a partition: everything before it is recorded. A marker of an incarnation
    /// that has not begun is ignored.
    async fn pass_marker(&self, partition: u16, incarnation: u64) -> Result<()>;

    /// Through how many partitions the marker of this incarnation, or of a later one, has come.
    async fn passed_markers(&self, incarnation: u64) -> Result<u16>;

    /// Keeps messages, all of them or none, without touching their sales. Returns `false`, and keeps none, if there would be more than
    /// `limit` messages; processes that do this at the same time may exceed it.
    async fn park(&self, messages: &[ParkedMessage], limit: u64) -> Result<bool>;

    /// The sales with parked messages, and how many each has.
    async fn parked_sales(&self) -> Result<Vec<(SaleId, u64)>>;

    /// The parked messages of a sale with an id above `after`, by rising id, at most `limit`.
    async fn parked(&self, sale: SaleId, after: Option<[u8; 32]>, limit: u32) -> Result<Vec<ParkedMessage>>;

    /// Deletes parked messages, whose orders are recorded.
    async fn unpark(&self, messages: &[ParkedMessage]) -> Result<()>;
}

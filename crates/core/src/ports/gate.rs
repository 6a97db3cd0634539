//! The gate: decides who may buy, from marks (which user holds which order) and a cap.
//!
//! There is no stock counter: what remains is the cap less the marks. A release deletes one mark, if it still belongs to that
//! order, so that stock cannot be returned twice.

use std::fmt;

use async_trait::async_trait;

use super::LoadedSale;
use crate::admission::Admission;
use crate::clock::Timestamp;
use crate::ids::{Epoch, OrderId, SaleId, UserId};
use crate::money::Money;
use crate::sale::{Sale, SaleStatus, Window};

/// Why a gate did not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// The gate has lost its state, or was rebuilt by another node. Nothing was done. It must be rebuilt from the ledger.
    #[error("the gate has lost its state")]
    Lost,
    /// What the gate has stored is damaged. It must be rebuilt from the ledger, and what the call did before it failed is not known.
    #[error("the gate is damaged")]
    Damaged,
    /// A bound is reached. Nothing was done.
    #[error("the gate is busy")]
    Busy,
    /// The sale is not open in the gate: it is being loaded, or the gate is being rebuilt. Nothing was done.
    #[error("the sale is not open in the gate yet")]
    NotOpen,
    /// The call was not sent. Nothing was done.
    #[error("the gate cannot be reached")]
    NotSent,
    /// The call was sent and not answered: it may have been carried out. It must not be sent again; the outbox settles it.
    #[error("the gate did not answer")]
    Unanswered,
}

impl GateError {
    /// Whether the gate must be rebuilt from the ledger.
    pub const fn is_loss(self) -> bool {
        matches!(self, Self::Lost | Self::Damaged)
    }
}

/// A gate's decision about one request to buy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    pub admission: Admission,
    pub epoch: Epoch,
    /// Rises within an epoch whenever stock may have been returned or added. A sale that is sold out stays sold out while the
    /// pair (epoch, generation) is the same.
    pub generation: u64,
    /// The number of admissions so far.
    pub seq: i64,
    pub price: Money,
    /// The gate's time of the decision.
    pub at: Timestamp,
}

/// One request to buy: an order for `user` under the id `order`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmitRequest {
    pub user: UserId,
    pub order: OrderId,
}

/// A mark to be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    pub user: UserId,
    pub order: OrderId,
    /// The live order that the ledger found instead; the mark is set to it.
    pub existing: Option<OrderId>,
    /// Whether the order was live in the ledger and has ended. In a sale in which nobody may buy again, the gate remembers it, and answers
    /// its user with [`Admission::AlreadyHas`].
    pub ended: bool,
}

/// The state of one sale in the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshot {
    pub version: i64,
    pub status: SaleStatus,
    pub window: Window,
    pub cap: u32,
    pub marks: u32,
    /// Marks whose orders are known to be in the ledger.
    pub settled: u32,
    /// Admitted orders in the outbox; `None` for a gate without one.
    pub outbox: Option<u32>,
}

impl Snapshot {
    pub const fn remaining(&self) -> u32 {
        self.cap.saturating_sub(self.marks)
    }
}

/// A gate, in memory or on a server. `None` in a result means that the gate has no such sale.
#[async_trait]
pub trait Gate: Send + Sync + fmt::Debug {
    /// Decides about requests of one sale, in their order. Idempotent by order id: the same request again is admitted again and
    /// takes no further stock.
    async fn admit(
        &self,
        sale: SaleId,
        requests: &[AdmitRequest],
        now: Timestamp,
    ) -> Result<Option<Vec<Decision>>, GateError>;

    /// Releases marks that still belong to their orders. Returns which did. A gate on a server that does not have the sale answers
    /// [`GateError::NotOpen`], because it may be about to load the marks.
    async fn release(&self, sale: SaleId, releases: &[Release]) -> Result<Vec<bool>, GateError>;

    /// Applies the sale's settings if their version is higher than the gate's. The cap is never set below the number of marks;
    /// the resulting cap is returned. A gate on a server that does not have the sale answers [`GateError::NotOpen`].
    async fn edit(&self, sale: &Sale) -> Result<Option<u32>, GateError>;

    /// Opens the sale with the marks that the ledger has, unless it is open already.
    async fn open(&self, loaded: LoadedSale) -> Result<(), GateError>;

    async fn snapshot(&self, sale: SaleId) -> Result<Option<Snapshot>, GateError>;

    /// The snapshot, with a digest over the marks of the same moment.
    async fn digest(&self, sale: SaleId) -> Result<Option<(Snapshot, u64)>, GateError>;

    /// Every mark of the sale, in no particular order.
    async fn marks(&self, sale: SaleId) -> Result<Option<Vec<(UserId, OrderId)>>, GateError>;
}

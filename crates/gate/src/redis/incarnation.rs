//! The incarnation of the gate that the ledger calls valid, and the sales that this node knows as open under it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

use metrics::gauge;
use parking_lot::RwLock;
use stampede_core::ports::{GateError, GateRecord};
use stampede_core::{Epoch, Sale, SaleId};

use super::RedisGate;
use super::scripts::Scripts;

/// What this node knows about a sale that is open in the gate.
#[derive(Debug)]
pub(super) struct OpenSale {
    pub(super) epoch: Epoch,
    /// The highest sequence number that this node has seen. A gate with a lower one has lost admissions.
    pub(super) seen_seq: AtomicI64,
    /// What was left at the last call of this node.
    pub(super) remaining: AtomicU32,
    /// Whether the outbox may hold entries, as far as this node knows.
    pub(super) has_entries: AtomicBool,
}

/// The scripts of one incarnation, and the sales that are open under it.
#[derive(Debug)]
pub(super) struct Incarnation {
    pub(super) number: u64,
    /// The replication id of the server on which it was opened; empty if any server will do.
    pub(super) replication_id: String,
    /// The connection whose server was found to have this replication id.
    pub(super) verified_connection: AtomicU64,
    pub(super) scripts: Scripts,
    sales: RwLock<HashMap<SaleId, Arc<OpenSale>>>,
}

impl Incarnation {
    pub(super) fn new(record: &GateRecord) -> Arc<Self> {
        gauge!("stampede_gate_incarnation").set(u32::try_from(record.incarnation).unwrap_or(u32::MAX));
        Arc::new(Self {
            number: record.incarnation,
            replication_id: record.replication_id.clone(),
            // Connections are counted from 1.
            verified_connection: AtomicU64::new(0),
            scripts: Scripts::new(&record.ledger_id, record.incarnation),
            sales: RwLock::default(),
        })
    }

    pub(super) fn find(&self, sale: SaleId) -> Option<Arc<OpenSale>> {
        self.sales.read().get(&sale).cloned()
    }

    pub(super) fn adopt(&self, sale: SaleId, epoch: Epoch, remaining: u32) {
        let mut sales = self.sales.write();
        if sales.get(&sale).is_none_or(|open| open.epoch < epoch) {
            let (seen_seq, remaining) = (AtomicI64::new(0), AtomicU32::new(remaining));
            sales.insert(sale, Arc::new(OpenSale { epoch, seen_seq, remaining, has_entries: AtomicBool::new(true) }));
        }
    }
}

impl RedisGate {
    pub(super) fn current(&self) -> Arc<Incarnation> {
        self.current.read().clone()
    }

    pub fn incarnation(&self) -> u64 {
        self.current.read().number
    }

    /// Replaces an older incarnation. No sale is open under the new one until it is adopted.
    pub fn set_incarnation(&self, record: &GateRecord) {
        let mut current = self.current.write();
        if current.number < record.incarnation {
            *current = Incarnation::new(record);
        }
    }

    /// Makes requests for this sale go to the gate, under the epoch that the ledger calls open.
    pub fn adopt(&self, sale: &Sale) {
        self.current().adopt(sale.id, sale.epoch, sale.cap.saturating_sub(sale.sold));
    }

    /// The epoch under which this node sends requests for this sale to the gate, and the incarnation.
    pub fn opened_as(&self, sale: SaleId) -> Option<(u64, Epoch)> {
        let current = self.current();
        current.find(sale).map(|open| (current.number, open.epoch))
    }

    /// The sales that this node sends requests for.
    pub fn sales(&self) -> Vec<SaleId> {
        self.current().sales.read().keys().copied().collect()
    }

    /// The sales whose outbox may hold entries: those of which this node has admitted orders since the last snapshot, or the snapshot
    /// found entries.
    pub fn sales_with_entries(&self) -> Vec<SaleId> {
        let current = self.current();
        let sales = current.sales.read();
        let with_entries = sales.iter().filter(|(_, open)| open.has_entries.load(Ordering::Relaxed));
        with_entries.map(|(sale, _)| *sale).collect()
    }

    /// What was left of the sale at the last call of this node.
    pub fn remaining(&self, sale: SaleId) -> Option<u32> {
        self.current().find(sale).map(|open| open.remaining.load(Ordering::Relaxed))
    }

    /// Removes a sale that is over: from this node, and from Redis once its outbox is empty. Returns whether it is gone.
    pub async fn remove(&self, sale: SaleId) -> Result<bool, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(true) };
        let is_removed = self.remove_keys(&current, sale, open.epoch.0.to_string()).await?;
        if is_removed {
            current.sales.write().remove(&sale);
        }
        Ok(is_removed)
    }

    /// Sends no more requests for this sale. Its keys stay.
    pub fn forget(&self, sale: SaleId) {
        self.current().sales.write().remove(&sale);
    }

    /// Removes a sale that was closed and that this node does not know as open, once its outbox is empty. Returns whether it is gone.
    pub async fn remove_closed(&self, sale: SaleId) -> Result<bool, GateError> {
        let mut command = redis::cmd("HGET");
        command.arg(self.key(sale, "sale")).arg("epoch");
        // A rebuild that was not completed may have raised the epoch in the ledger only.
        let epoch: Option<String> = self.send(command).await?;
        self.remove_keys(&self.current(), sale, epoch.unwrap_or_default()).await
    }

    async fn remove_keys(&self, current: &Incarnation, sale: SaleId, epoch: String) -> Result<bool, GateError> {
        let removed: i64 = self.call(current, &current.scripts.remove, &self.sale_keys(sale), &[epoch]).await?;
        Ok(removed == 1)
    }

    /// Whether Redis has keys of any of these sales, of which there must be one.
    pub async fn has_keys(&self, sales: &[SaleId]) -> Result<bool, GateError> {
        let mut command = redis::cmd("EXISTS");
        for &sale in sales {
            command.arg(&self.sale_keys(sale));
        }
        let found: i64 = self.send(command).await?;
        Ok(found > 0)
    }
}

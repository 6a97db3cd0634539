//! Whether users without an order can buy, and who has one: what nodes remember to refuse without asking.

use std::sync::atomic::Ordering;

use stampede_core::ports::{GateError, Snapshot};
use stampede_core::{Epoch, SaleId, SaleStatus, Timestamp, UserId, Window};

use super::RedisGate;

/// What decides whether a user without an order can buy, in one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Availability {
    pub epoch: Epoch,
    /// Rises whenever stock may have come back, and with every edit.
    pub generation: u64,
    pub marks: u32,
    pub remaining: u32,
    pub status: SaleStatus,
    pub window: Window,
    /// The time by which the gate decides.
    pub now: Timestamp,
}

impl RedisGate {
    /// The snapshot, with the generation and the time of Redis of the same moment.
    pub(super) async fn snapshot_with_generation(
        &self,
        sale: SaleId,
    ) -> Result<Option<(Snapshot, Epoch, u64, Timestamp)>, GateError> {
        let current = self.current();
        let Some(open) = current.find(sale) else { return Ok(None) };
        let keys = self.sale_keys(sale);
        // Read before the call: an admission that is answered during the call raises it.
        let seen_seq = open.seen_seq.load(Ordering::Relaxed);
        type Reply = (i64, String, i64, i64, u32, u64, i64, u32, u32, u32, i64);
        let (version, state, begin, end, cap, generation, seq, marks, entries, pending, now): Reply =
            self.call(&current, &current.scripts.snapshot, &keys, &[open.epoch.0.to_string()]).await?;
        if seq < seen_seq {
            return Err(GateError::Lost);
        }
        let status = SaleStatus::parse(&state).ok_or(GateError::Lost)?;
        let window = Window { begin: Timestamp::from_ms(begin), end: Timestamp::from_ms(end) };
        let (settled, outbox) = (marks.saturating_sub(pending), Some(pending.max(entries)));
        let snapshot = Snapshot { version, status, window, cap, marks, settled, outbox };
        open.remaining.store(snapshot.remaining(), Ordering::Relaxed);
        open.has_entries.store(entries > 0, Ordering::Relaxed);
        Ok(Some((snapshot, open.epoch, generation, Timestamp::from_ms(now))))
    }

    /// Whether the sale is available; `None` if this node does not know it as open.
    ///
    /// # Errors
    /// [`GateError::Lost`] if Redis has lost a part of the sale.
    pub async fn availability(&self, sale: SaleId) -> Result<Option<Availability>, GateError> {
        let Some((snapshot, epoch, generation, now)) = self.snapshot_with_generation(sale).await? else {
            return Ok(None);
        };
        let (marks, remaining) = (snapshot.marks, snapshot.remaining());
        let (status, window) = (snapshot.status, snapshot.window);
        Ok(Some(Availability { epoch, generation, marks, remaining, status, window, now }))
    }

    /// Some users with a mark, and where to read on; 0 at the end. A user who has a mark from the first to the last of these calls is
    /// read at least once.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub async fn buyers(&self, sale: SaleId, cursor: u64) -> Result<(u64, Vec<UserId>), GateError> {
        let (next, fields) = self.scan_marks(sale, cursor).await?;
        // `#epoch` is no user.
        Ok((next, fields.iter().filter_map(|(user, _)| user.parse().ok()).collect()))
    }
}

//! Whether users without an order can buy, and who has one: what nodes remember to refuse without asking.

use stampede_core::ports::GateError;
use stampede_core::{Epoch, SaleId, SaleStatus, Timestamp, UserId, Window};

use super::RedisGate;

/// Users that are read with one command.
const PAGE: usize = 1000;

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
        let mut command = redis::cmd("HSCAN");
        command.arg(self.key(sale, "live")).arg(cursor).arg("COUNT").arg(PAGE);
        let (next, fields): (String, Vec<(String, String)>) = self.send(command).await?;
        let next = next.parse().map_err(|_| GateError::Unanswered)?;
        // `#epoch` is no user.
        Ok((next, fields.iter().filter_map(|(user, _)| user.parse().ok()).collect()))
    }
}

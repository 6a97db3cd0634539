//! Whether a sale is sold out, and to whom: what nodes remember to refuse without asking.

use std::time::Duration;

use stampede_core::ports::{GateError, Snapshot};
use stampede_core::{Epoch, SaleId, SaleStatus, UserId};

use super::RedisGate;

/// Users that are read with one command.
const PAGE: usize = 1000;

/// How full a sale is in one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fullness {
    pub epoch: Epoch,
    /// Rises whenever stock may have come back.
    pub generation: u64,
    pub marks: u32,
    /// Whether buyers are refused because nothing is left, and for how long at most: afterwards the sale is over. `None` if something is
    /// left, or the sale is not on.
    pub sold_out_for: Option<Duration>,
}

impl RedisGate {
    /// How full the sale is; `None` if this node does not know it as open.
    ///
    /// # Errors
    /// [`GateError::Lost`] if Redis has lost a part of the sale.
    pub async fn fullness(&self, sale: SaleId) -> Result<Option<Fullness>, GateError> {
        let Some((snapshot, epoch, generation, now)) = self.snapshot_with_generation(sale).await? else {
            return Ok(None);
        };
        let Snapshot { status, window, marks, .. } = snapshot;
        let is_on = status == SaleStatus::OnSale && window.begin <= now && now < window.end;
        let left = Duration::from_millis(u64::try_from(window.end.ms() - now.ms()).unwrap_or(0));
        let sold_out_for = (is_on && snapshot.remaining() == 0).then_some(left);
        Ok(Some(Fullness { epoch, generation, marks, sold_out_for }))
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

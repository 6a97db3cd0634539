//! Marks: reading them, and loading them before a sale is opened.

use futures_util::{StreamExt as _, TryStreamExt as _};
use stampede_core::ports::GateError;
use stampede_core::{Epoch, OrderId, SaleId, UserId};

use super::RedisGate;

/// The field of the marks' hash that holds their epoch.
const EPOCH_FIELD: &str = "#epoch";
/// Marks that are read with one command.
const PAGE: usize = 1000;
/// Marks that are loaded with one command.
const LOAD_BATCH: usize = 1000;
/// Commands that load marks at once, so that Redis does not wait for the next one.
const CONCURRENT_LOADS: usize = 4;
/// Loaded marks that no `open` has used are deleted after this time.
const LOAD_TTL_S: u32 = 3600;

impl RedisGate {
    /// The order for which the user holds a mark.
    ///
    /// # Errors
    /// [`GateError::NotOpen`] if this node does not know the sale as open, [`GateError::Lost`] if Redis has lost its marks.
    pub async fn mark(&self, sale: SaleId, user: UserId) -> Result<Option<OrderId>, GateError> {
        let open = self.current().find(sale).ok_or(GateError::NotOpen)?;
        let mut command = redis::cmd("HMGET");
        command.arg(self.key(sale, "live")).arg(EPOCH_FIELD).arg(user.to_string());
        let (epoch, order): (Option<i64>, Option<String>) = self.send(command).await?;
        if epoch != Some(open.epoch.0) {
            return Err(GateError::Lost);
        }
        order.map(|order| order.parse().map_err(|_| GateError::Lost)).transpose()
    }

    /// Every mark that Redis holds for the sale, by user, with their epoch; `None` if there are none. Also for a sale that is closed. Read in
    /// pages: of a sale that is open, a mark that is set or released meanwhile may be missing.
    ///
    /// # Errors
    /// [`GateError::Lost`] if the sale was opened under another epoch meanwhile.
    pub async fn surviving_marks(&self, sale: SaleId) -> Result<Option<(Epoch, Vec<(UserId, OrderId)>)>, GateError> {
        let Some(epoch) = self.marks_epoch(sale).await? else { return Ok(None) };
        let (mut marks, mut unreadable, mut cursor) = (Vec::new(), 0, 0);
        loop {
            let (next, fields) = self.scan_marks(sale, cursor).await?;
            for (user, order) in fields.iter().filter(|(user, _)| user != EPOCH_FIELD) {
                match (user.parse(), order.parse()) {
                    (Ok(user), Ok(order)) => marks.push((user, order)),
                    _ => unreadable += 1,
                }
            }
            if next == 0 {
                break;
            }
            cursor = next;
        }
        if self.marks_epoch(sale).await? != Some(epoch) {
            return Err(GateError::Lost);
        }
        if unreadable > 0 {
            tracing::error!(%sale, marks = unreadable, "marks in Redis cannot be read and are ignored; the gate did not write them");
        }
        // A page may repeat some of an earlier one.
        marks.sort_unstable();
        marks.dedup_by_key(|(user, _)| *user);
        Ok(Some((epoch, marks)))
    }

    /// The epoch of the marks.
    async fn marks_epoch(&self, sale: SaleId) -> Result<Option<Epoch>, GateError> {
        let mut command = redis::cmd("HGET");
        command.arg(self.key(sale, "live")).arg(EPOCH_FIELD);
        let epoch: Option<String> = self.send(command).await?;
        Ok(epoch.and_then(|epoch| epoch.parse().ok()).map(Epoch))
    }

    /// Some marks as they are in Redis, and where to read on; 0 at the end. A mark that exists from the first to the last of these calls is
    /// read at least once.
    pub(super) async fn scan_marks(
        &self,
        sale: SaleId,
        cursor: u64,
    ) -> Result<(u64, Vec<(String, String)>), GateError> {
        let mut command = redis::cmd("HSCAN");
        command.arg(self.key(sale, "live")).arg(cursor).arg("COUNT").arg(PAGE);
        let (next, fields): (String, Vec<(String, String)>) = self.send(command).await?;
        Ok((next.parse().map_err(|_| GateError::Unanswered)?, fields))
    }

    /// Loads marks under a key of their own, to be renamed by `open`.
    pub(super) async fn load(&self, key: &str, epoch: Epoch, marks: &[(UserId, OrderId)]) -> Result<(), GateError> {
        let mut delete = redis::cmd("UNLINK");
        delete.arg(key);
        let _deleted: i64 = self.send(delete).await?;
        let mut first = redis::cmd("HSET");
        first.arg(key).arg(EPOCH_FIELD).arg(epoch.0);
        let _added: i64 = self.send(first).await?;
        // At once, in case this node dies while it loads. `open` makes the key permanent.
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(key).arg(LOAD_TTL_S);
        let _set: i64 = self.send(expire).await?;
        let chunk = |chunk: &[(UserId, OrderId)]| {
            let mut command = redis::cmd("HSET");
            command.arg(key);
            for (user, order) in chunk {
                command.arg(user.get()).arg(order.get());
            }
            self.send::<i64>(command)
        };
        let chunks = futures_util::stream::iter(marks.chunks(LOAD_BATCH).map(chunk));
        chunks.buffer_unordered(CONCURRENT_LOADS).try_for_each(|_added| std::future::ready(Ok(()))).await
    }
}

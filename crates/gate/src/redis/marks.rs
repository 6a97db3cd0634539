//! Marks: reading them, and loading them before a sale is opened.

use futures_util::{StreamExt as _, TryStreamExt as _};
use stampede_core::ports::GateError;
use stampede_core::{Epoch, OrderId, SaleId, UserId};

use super::RedisGate;

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
        command.arg(self.key(sale, "live")).arg("#epoch").arg(user.to_string());
        let (epoch, order): (Option<i64>, Option<String>) = self.send(command).await?;
        if epoch != Some(open.epoch.0) {
            return Err(GateError::Lost);
        }
        order.map(|order| order.parse().map_err(|_| GateError::Lost)).transpose()
    }

    /// Every mark that Redis holds for the sale, with their epoch; `None` if there are none. Also for a sale that is closed.
    pub async fn surviving_marks(&self, sale: SaleId) -> Result<Option<(Epoch, Vec<(UserId, OrderId)>)>, GateError> {
        let mut command = redis::cmd("HGETALL");
        command.arg(self.key(sale, "live"));
        let fields: Vec<(String, String)> = self.send(command).await?;
        let epoch = fields.iter().find(|(user, _)| user == "#epoch").and_then(|(_, epoch)| epoch.parse().ok());
        let Some(epoch) = epoch else { return Ok(None) };
        let marks = fields.iter().filter(|(user, _)| user != "#epoch");
        let parse = |(user, order): &(String, String)| Some((user.parse().ok()?, order.parse().ok()?));
        let (all, marks) = (fields.len() - 1, marks.filter_map(parse).collect::<Vec<_>>());
        if marks.len() < all {
            tracing::error!(%sale, marks = all - marks.len(), "marks in Redis cannot be read and are ignored; the gate did not write them");
        }
        Ok(Some((Epoch(epoch), marks)))
    }

    /// Loads marks under a key of their own, to be renamed by `open`.
    pub(super) async fn load(&self, key: &str, epoch: Epoch, marks: &[(UserId, OrderId)]) -> Result<(), GateError> {
        let mut delete = redis::cmd("DEL");
        delete.arg(key);
        let _deleted: i64 = self.send(delete).await?;
        let mut first = redis::cmd("HSET");
        first.arg(key).arg("#epoch").arg(epoch.0);
        let _added: i64 = self.send(first).await?;
        let chunk = |chunk: &[(UserId, OrderId)]| {
            let mut command = redis::cmd("HSET");
            command.arg(key);
            for (user, order) in chunk {
                command.arg(user.get()).arg(order.get());
            }
            self.send::<i64>(command)
        };
        let chunks = futures_util::stream::iter(marks.chunks(LOAD_BATCH).map(chunk));
        chunks.buffer_unordered(CONCURRENT_LOADS).try_for_each(|_added| std::future::ready(Ok(()))).await?;
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(key).arg(LOAD_TTL_S);
        let _set: i64 = self.send(expire).await?;
        Ok(())
    }
}

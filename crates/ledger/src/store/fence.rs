//! Refuses scheduled work of a process that has lost its lock.

use stampede_core::ports::{Fence, Result};

use super::{Store, unreadable};
use crate::db::{Tx, args};

impl Store {
    /// Whether the work may be done in this transaction, which then holds the work's row until it ends.
    pub(super) async fn check_fence(&self, tx: &mut Tx, fence: Option<Fence>) -> Result<bool> {
        let Some(Fence { work, token }) = fence else { return Ok(true) };
        let token = i64::try_from(token).map_err(|_| unreadable("a fencing token"))?;
        let sql = format!("SELECT token FROM fence WHERE work = ?{}", self.db.dialect().for_update());
        let row = tx.row(&sql, args![work.as_str()]).await?;
        let highest = row.ok_or_else(|| unreadable("a fencing token"))?.int(0)?;
        if highest < token {
            tx.execute("UPDATE fence SET token = ? WHERE work = ?", args![token, work.as_str()]).await?;
        }
        Ok(highest <= token)
    }
}

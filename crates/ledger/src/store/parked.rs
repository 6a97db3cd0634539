//! Messages of the queue whose orders cannot be recorded for now.
//!
//! No statement here touches the sale or its orders: what keeps them from being recorded, such as a lock, must not keep the messages from
//! being stored.

use stampede_core::SaleId;
use stampede_core::ports::{ParkedMessage, Result};

use super::{Store, unreadable};
use crate::db::{Row, args};

const UNREADABLE: &str = "a parked message";

fn read(row: &Row) -> Result<ParkedMessage> {
    Ok(ParkedMessage {
        id: row.bytes(0)?.try_into().map_err(|_| unreadable(UNREADABLE))?,
        sale: SaleId::new(row.int(1)?).map_err(|_| unreadable(UNREADABLE))?,
        payload: row.bytes(2)?,
    })
}

impl Store {
    pub(super) async fn store_parked(&self, messages: &[ParkedMessage], limit: u64) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let counted = tx.row("SELECT COUNT(*) FROM parked_message", &[]).await?;
        let bad = || unreadable("the number of parked messages");
        let stored = u64::try_from(counted.ok_or_else(bad)?.int(0)?).map_err(|_| bad())?;
        if stored + messages.len() as u64 > limit {
            tx.roll_back().await?;
            return Ok(false);
        }
        let insert = "INSERT INTO parked_message (id, sale_id, payload) VALUES (?, ?, ?)";
        let sql = format!("{insert}{}", self.db.dialect().on_conflict_do_nothing("id"));
        for ParkedMessage { id, sale, payload } in messages {
            tx.execute(&sql, args![&id[..], sale.get(), payload.as_slice()]).await?;
        }
        tx.commit().await?;
        Ok(true)
    }

    pub(super) async fn count_parked(&self) -> Result<Vec<(SaleId, u64)>> {
        let sql = "SELECT sale_id, COUNT(*) FROM parked_message GROUP BY sale_id ORDER BY sale_id";
        let bad = || unreadable(UNREADABLE);
        let of_sale = |row: &Row| -> Result<(SaleId, u64)> {
            let sale = SaleId::new(row.int(0)?).map_err(|_| bad())?;
            Ok((sale, u64::try_from(row.int(1)?).map_err(|_| bad())?))
        };
        self.db.rows(sql, &[]).await?.iter().map(of_sale).collect()
    }

    pub(super) async fn read_parked(
        &self,
        sale: SaleId,
        after: Option<[u8; 32]>,
        limit: u32,
    ) -> Result<Vec<ParkedMessage>> {
        let sql = "SELECT id, sale_id, payload FROM parked_message WHERE sale_id = ? AND id > ? ORDER BY id LIMIT ?";
        let after = after.as_ref().map_or(&[][..], |id| id);
        self.db.rows(sql, args![sale.get(), after, limit]).await?.iter().map(read).collect()
    }

    pub(super) async fn delete_parked(&self, messages: &[ParkedMessage]) -> Result<()> {
        let mut tx = self.db.begin().await?;
        for message in messages {
            // Another process may have deleted it.
            tx.execute("DELETE FROM parked_message WHERE id = ?", args![&message.id[..]]).await?;
        }
        tx.commit().await
    }
}

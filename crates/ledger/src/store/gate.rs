//! The record of a gate on a server: incarnation, tier, and the phases of sales.

use stampede_core::ports::{ClaimOutcome, GateRecord, LedgerError, LoadedSale, Result};
use stampede_core::{Epoch, SaleId, SalePhase, Timestamp};

use super::sales::read_marks;
use super::{Store, unreadable};
use crate::db::{Tx, args};

/// Reads the incarnation.
async fn incarnation(tx: &mut Tx, lock: &str) -> Result<i64> {
    let row = tx.row(&format!("SELECT incarnation FROM gate WHERE id = 1{lock}"), &[]).await?;
    row.ok_or_else(|| unreadable("the record of the gate"))?.int(0)
}

/// The database's integers are signed.
pub(super) fn signed(number: u64) -> Result<i64> {
    i64::try_from(number).map_err(|_| unreadable("a number of the gate or the queue"))
}

impl Store {
    pub(super) async fn read_gate_record(&self, new_id: &str) -> Result<GateRecord> {
        self.db.execute("UPDATE gate SET ledger_id = ? WHERE ledger_id = ''", args![new_id]).await?;
        let row = self.db.row("SELECT ledger_id, incarnation, replication_id FROM gate WHERE id = 1", &[]).await?;
        let bad = || unreadable("the record of the gate");
        let row = row.ok_or_else(bad)?;
        let incarnation = u64::try_from(row.int(1)?).map_err(|_| bad())?;
        Ok(GateRecord { ledger_id: row.text(0)?, incarnation, replication_id: row.text(2)? })
    }

    pub(super) async fn set_tier(&self, holder: &str, tier: &str) -> Result<ClaimOutcome> {
        let mut tx = self.db.begin().await?;
        // Locked like a lease, so that two processes of different tiers cannot both find no other.
        self.lock_leases(&mut tx).await?;
        let now_ms = self.now_ms(&mut tx).await?;
        let other = "SELECT tier FROM worker_lease WHERE until_ms > ? AND holder NOT IN ('', ?) AND tier NOT IN ('', ?) LIMIT 1";
        if let Some(other) = tx.row(other, args![now_ms, holder, tier]).await? {
            let other = other.text(0)?;
            tx.roll_back().await?;
            return Ok(ClaimOutcome::OtherTier(other));
        }
        tx.execute("UPDATE worker_lease SET tier = ? WHERE holder = ?", args![tier, holder]).await?;
        let update =
            "UPDATE gate SET tier = ?, incarnation = incarnation + 1, replication_id = '' WHERE id = 1 AND tier <> ?";
        tx.execute(update, args![tier, tier]).await?;
        tx.commit().await?;
        Ok(ClaimOutcome::Claimed)
    }

    pub(super) async fn replace_incarnation(
        &self,
        from: u64,
        replication_id: &str,
        end_after: Timestamp,
    ) -> Result<Option<u64>> {
        let (from_signed, next) = (signed(from)?, from + 1);
        let mut tx = self.db.begin().await?;
        let lock = self.db.dialect().for_update();
        if incarnation(&mut tx, lock).await? != from_signed {
            tx.roll_back().await?;
            return Ok(None);
        }
        let update = "UPDATE gate SET incarnation = ?, replication_id = ? WHERE id = 1";
        tx.execute(update, args![signed(next)?, replication_id]).await?;
        let update = "UPDATE sale SET phase = ? WHERE end_at > ?";
        tx.execute(update, args![SalePhase::Closing.as_str(), end_after.ms()]).await?;
        tx.commit().await?;
        Ok(Some(next))
    }

    pub(super) async fn load_under_next_epoch(&self, id: SaleId, expected: u64) -> Result<Option<LoadedSale>> {
        let mut tx = self.db.begin().await?;
        let sale = self.locked(&mut tx, id).await?;
        // Read under the lock: a rebuild that began earlier has changed the sale's row, so its incarnation is visible here.
        let is_current = incarnation(&mut tx, "").await? == signed(expected)?;
        let Some(mut sale) = sale.filter(|_| is_current) else {
            tx.roll_back().await?;
            return Ok(None);
        };
        (sale.epoch, sale.phase) = (Epoch(sale.epoch.0 + 1), SalePhase::Loading);
        let update = "UPDATE sale SET epoch = ?, phase = ? WHERE id = ?";
        tx.execute(update, args![sale.epoch.0, sale.phase.as_str(), id.get()]).await?;
        // Under the lock of the sale's row no order of it changes.
        let marks = read_marks(&mut tx, id, sale.sold).await?;
        tx.commit().await?;
        Ok(Some(LoadedSale { sale, marks }))
    }

    pub(super) async fn open_loaded(&self, id: SaleId, epoch: Epoch, expected: u64) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let is_loading =
            self.locked(&mut tx, id).await?.is_some_and(|sale| (sale.epoch, sale.phase) == (epoch, SalePhase::Loading));
        if !is_loading || incarnation(&mut tx, "").await? != signed(expected)? {
            tx.roll_back().await?;
            return Ok(false);
        }
        tx.execute("UPDATE sale SET phase = ? WHERE id = ?", args![SalePhase::Open.as_str(), id.get()]).await?;
        tx.commit().await?;
        Ok(true)
    }

    pub(super) async fn read_clock(&self) -> Result<Timestamp> {
        let row = self.db.row(self.db.dialect().now_ms(), &[]).await?;
        let row = row.ok_or_else(|| LedgerError::Poison("the database has no clock".into()))?;
        Ok(Timestamp::from_ms(row.int(0)?))
    }
}

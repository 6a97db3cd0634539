//! The record of a gate on a server: incarnation, tier, and the phases of sales.

use stampede_core::ports::{ClaimOutcome, GateRecord, LedgerError, LoadedSale, Result};
use stampede_core::{Epoch, SaleId, SalePhase, Timestamp};

use super::sales::{read_ended, read_marks};
use super::{Store, unreadable};
use crate::db::{Tx, args};

/// The name of the row with whether the processes that run write events. Like the lock of the leases it is no secret, but lies in that table.
const EVENTS: &str = "writes_events";

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
        let record = self.find_gate_record().await?;
        if !record.ledger_id.is_empty() || new_id.is_empty() {
            return Ok(record);
        }
        // Of several processes that start at the same time, one sets it.
        self.db.execute("UPDATE gate SET ledger_id = ? WHERE ledger_id = ''", args![new_id]).await?;
        self.find_gate_record().await
    }

    async fn find_gate_record(&self) -> Result<GateRecord> {
        let row = self.db.row("SELECT ledger_id, incarnation, replication_id FROM gate WHERE id = 1", &[]).await?;
        let bad = || unreadable("the record of the gate");
        let row = row.ok_or_else(bad)?;
        let incarnation = u64::try_from(row.int(1)?).map_err(|_| bad())?;
        Ok(GateRecord { ledger_id: row.text(0)?, incarnation, replication_id: row.text(2)? })
    }

    pub(super) async fn set_tier(&self, holder: &str, tier: &str, not_after: &[&str]) -> Result<ClaimOutcome> {
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
        if !self.claim_events(&mut tx, holder, now_ms).await? {
            tx.roll_back().await?;
            return Ok(ClaimOutcome::OtherEvents);
        }
        let last = tx.row("SELECT tier FROM gate WHERE id = 1", &[]).await?;
        let last = last.ok_or_else(|| unreadable("the record of the gate"))?.text(0)?;
        if not_after.contains(&last.as_str()) {
            tx.roll_back().await?;
            return Ok(ClaimOutcome::After(last));
        }
        tx.execute("UPDATE worker_lease SET tier = ? WHERE holder = ?", args![tier, holder]).await?;
        let update =
            "UPDATE gate SET tier = ?, incarnation = incarnation + 1, replication_id = '' WHERE id = 1 AND tier <> ?";
        tx.execute(update, args![tier, tier]).await?;
        tx.commit().await?;
        Ok(ClaimOutcome::Claimed)
    }

    /// Records whether this process writes events; `false` if processes run that do otherwise. The leases are locked.
    async fn claim_events(&self, tx: &mut Tx, holder: &str, now_ms: i64) -> Result<bool> {
        let stored = tx.row("SELECT value FROM secret WHERE name = ?", args![EVENTS]).await?;
        let stored = stored.map(|row| row.bytes(0)).transpose()?;
        let own = [u8::from(self.config.writes_events)];
        if stored.as_deref() == Some(&own[..]) {
            return Ok(true);
        }
        let other =
            "SELECT worker FROM worker_lease WHERE until_ms > ? AND holder NOT IN ('', ?) AND tier <> '' LIMIT 1";
        if stored.is_some() && tx.row(other, args![now_ms, holder]).await?.is_some() {
            return Ok(false);
        }
        let update = self.db.dialect().on_conflict_update("name", &["value"]);
        let insert = format!("INSERT INTO secret (name, value) VALUES (?, ?){update}");
        tx.execute(&insert, args![EVENTS, &own[..]]).await?;
        Ok(true)
    }

    pub(super) async fn replace_incarnation(&self, from: u64, replication_id: &str) -> Result<Option<u64>> {
        let (from_signed, next) = (signed(from)?, from + 1);
        let mut tx = self.db.begin().await?;
        let lock = self.db.dialect().for_update();
        if incarnation(&mut tx, lock).await? != from_signed {
            tx.roll_back().await?;
            return Ok(None);
        }
        let update = "UPDATE gate SET incarnation = ?, replication_id = ? WHERE id = 1";
        tx.execute(update, args![signed(next)?, replication_id]).await?;
        tx.commit().await?;
        Ok(Some(next))
    }

    pub(super) async fn load_under_next_epoch(
        &self,
        id: SaleId,
        epoch: Epoch,
        expected: u64,
    ) -> Result<Option<LoadedSale>> {
        let mut tx = self.db.begin().await?;
        let sale = self.locked(&mut tx, id).await?;
        // The lock keeps another rebuild from beginning before this transaction has ended. After the sale's row, so that a transaction that
        // waits for that one holds up no rebuild.
        let is_current = incarnation(&mut tx, self.db.dialect().for_share()).await? == signed(expected)?;
        let Some(mut sale) = sale.filter(|sale| is_current && sale.epoch == epoch) else {
            tx.roll_back().await?;
            return Ok(None);
        };
        (sale.epoch, sale.phase) = (Epoch(epoch.0 + 1), SalePhase::Loading);
        let update = "UPDATE sale SET epoch = ?, phase = ? WHERE id = ?";
        tx.execute(update, args![sale.epoch.0, sale.phase.as_str(), id.get()]).await?;
        // Under the lock of the sale's row no order of it changes.
        let (marks, ended) = (read_marks(&mut tx, id, sale.sold).await?, read_ended(&mut tx, &sale).await?);
        tx.commit().await?;
        Ok(Some(LoadedSale { sale, marks, ended }))
    }

    pub(super) async fn open_loaded(&self, id: SaleId, epoch: Epoch, expected: u64) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        // Needs no lock of the gate's record: if another rebuild begins before the commit, the sale is closing under its incarnation.
        let update = "UPDATE sale SET phase = ?, incarnation = ? WHERE id = ? AND epoch = ? AND phase = ?
                      AND (SELECT incarnation FROM gate WHERE id = 1) = ?";
        let (open, loading) = (SalePhase::Open.as_str(), SalePhase::Loading.as_str());
        let expected = signed(expected)?;
        let opened = tx.execute(update, args![open, expected, id.get(), epoch.0, loading, expected]).await?;
        if opened == 0 {
            tx.roll_back().await?;
            return Ok(false);
        }
        tx.commit().await?;
        Ok(true)
    }

    pub(super) async fn read_clock(&self) -> Result<Timestamp> {
        let row = self.db.row(self.db.dialect().now_ms(), &[]).await?;
        let row = row.ok_or_else(|| LedgerError::Poison("the database has no clock".into()))?;
        Ok(Timestamp::from_ms(row.int(0)?))
    }
}

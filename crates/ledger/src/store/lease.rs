//! Leases of worker numbers for the id generator, by the database's clock. Two time ranges of one worker never overlap.

use std::time::Duration;

use stampede_core::Timestamp;
use stampede_core::ids::{Lease, MAX_WORKERS, WorkerId};
use stampede_core::ports::{LedgerError, Result};

use super::Store;
use crate::db::{Tx, args};

/// The name of the row that exists once ids were made from a counter. Like the lock of the leases it is no secret, but lies in that table.
const COUNTER_IDS: &str = "counter_ids";

impl Store {
    pub(super) async fn grant_lease(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        not_before: Timestamp,
        span: Duration,
    ) -> Result<Lease> {
        let mut tx = self.db.begin().await?;
        self.lock_leases(&mut tx).await?;
        let now_ms = self.now_ms(&mut tx).await?;
        let start = Timestamp::from_ms(now_ms.max(not_before.ms()));
        let renewed = match worker {
            Some(worker) => renew(&mut tx, holder, worker, start.plus(span)).await?,
            None => None,
        };
        let lease = match renewed {
            Some(lease) => lease,
            None => grant(&mut tx, holder, now_ms, start, span).await?,
        };
        tx.commit().await?;
        Ok(lease)
    }

    /// Locks a row that every lease locks, so that they are serialized.
    pub(super) async fn lock_leases(&self, tx: &mut Tx) -> Result<()> {
        let lock = self.db.dialect().for_update();
        tx.rows(&format!("SELECT name FROM secret WHERE name = 'lease_lock'{lock}"), &[]).await?;
        Ok(())
    }

    pub(super) async fn now_ms(&self, tx: &mut Tx) -> Result<i64> {
        let row = tx.row(self.db.dialect().now_ms(), &[]).await?;
        row.ok_or_else(|| LedgerError::Poison("the database has no clock".into()))?.int(0)
    }

    pub(super) async fn find_other_worker(&self, holder: &str) -> Result<bool> {
        let now_ms = self.read_clock().await?.ms();
        let sql = "SELECT worker FROM worker_lease WHERE until_ms > ? AND holder NOT IN ('', ?) LIMIT 1";
        Ok(self.db.row(sql, args![now_ms, holder]).await?.is_some())
    }

    /// Notes that there are ids of [`IdKind::Counter`](stampede_core::ids::IdKind::Counter).
    pub(super) async fn note_counter_ids(&self) -> Result<()> {
        let insert = format!(
            "INSERT INTO secret (name, value) VALUES (?, ?){}",
            self.db.dialect().on_conflict_do_nothing("name")
        );
        self.db.execute(&insert, args![COUNTER_IDS, &b""[..]]).await
    }

    pub(super) async fn has_only_snowflakes(&self) -> Result<bool> {
        let row = self.db.row("SELECT name FROM secret WHERE name = ?", args![COUNTER_IDS]).await?;
        Ok(row.is_none())
    }

    pub(super) async fn end_lease(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()> {
        let sql = "UPDATE worker_lease SET until_ms = CASE WHEN until_ms < ? THEN until_ms ELSE ? END, holder = ''
                   WHERE worker = ? AND holder = ?";
        self.db.execute(sql, args![unused_from.ms(), unused_from.ms(), worker.0, holder]).await
    }
}

/// Returns `None` if another holder has the worker number.
async fn renew(tx: &mut Tx, holder: &str, worker: WorkerId, until: Timestamp) -> Result<Option<Lease>> {
    let sql = "SELECT from_ms, until_ms FROM worker_lease WHERE worker = ? AND holder = ?";
    let Some(row) = tx.row(sql, args![worker.0, holder]).await? else { return Ok(None) };
    let (from, until) = (Timestamp::from_ms(row.int(0)?), until.max(Timestamp::from_ms(row.int(1)?)));
    tx.execute("UPDATE worker_lease SET until_ms = ? WHERE worker = ?", args![until.ms(), worker.0]).await?;
    Ok(Some(Lease { worker, from, until }))
}

/// Grants the lowest worker number whose lease has ended, or a new one.
async fn grant(tx: &mut Tx, holder: &str, now_ms: i64, start: Timestamp, span: Duration) -> Result<Lease> {
    let free = "SELECT worker, until_ms FROM worker_lease WHERE until_ms <= ? ORDER BY worker LIMIT 1";
    let free = tx.row(free, args![now_ms]).await?;
    let (worker, ended_ms) = match &free {
        Some(row) => (row.int(0)?, row.int(1)?),
        None => match tx.row("SELECT worker FROM worker_lease ORDER BY worker DESC LIMIT 1", &[]).await? {
            Some(row) => (row.int(0)? + 1, 0),
            None => (0, 0),
        },
    };
    let worker = u16::try_from(worker).ok().filter(|&worker| worker < MAX_WORKERS);
    let worker = worker.ok_or_else(|| LedgerError::Unavailable("all worker numbers are leased".into()))?;
    let from = start.max(Timestamp::from_ms(ended_ms));
    let until = from.plus(span);
    let sql = match free {
        Some(_) => "UPDATE worker_lease SET holder = ?, from_ms = ?, until_ms = ?, tier = '' WHERE worker = ?",
        None => "INSERT INTO worker_lease (holder, from_ms, until_ms, worker) VALUES (?, ?, ?, ?)",
    };
    tx.execute(sql, args![holder, from.ms(), until.ms(), worker]).await?;
    Ok(Lease { worker: WorkerId(worker), from, until })
}

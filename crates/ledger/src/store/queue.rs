//! The record of the queue between gate and ledger: settings that all processes share, and markers of rebuilds.

use stampede_core::ports::{QueueClaim, QueueSettings, Result};

use super::gate::signed;
use super::{Store, unreadable};
use crate::db::{Tx, args};

async fn read_settings(tx: &mut Tx) -> Result<QueueSettings> {
    let sql = "SELECT queue_kind, queue_partitions, queue_accept_within_ms FROM gate WHERE id = 1";
    let bad = || unreadable("the record of the queue");
    let row = tx.row(sql, &[]).await?.ok_or_else(bad)?;
    Ok(QueueSettings {
        kind: row.text(0)?,
        partitions: u16::try_from(row.int(1)?).map_err(|_| bad())?,
        accept_within_ms: u64::try_from(row.int(2)?).map_err(|_| bad())?,
    })
}

impl Store {
    pub(super) async fn set_queue(&self, holder: &str, settings: &QueueSettings) -> Result<QueueClaim> {
        let mut tx = self.db.begin().await?;
        // Locked like a lease, so that two processes with different settings cannot both find no other.
        self.lock_leases(&mut tx).await?;
        let stored = read_settings(&mut tx).await?;
        if stored == *settings {
            tx.roll_back().await?;
            return Ok(QueueClaim::Claimed);
        }
        let QueueSettings { kind, partitions, accept_within_ms } = settings;
        let now_ms = self.now_ms(&mut tx).await?;
        let other =
            "SELECT worker FROM worker_lease WHERE until_ms > ? AND holder NOT IN ('', ?) AND tier <> '' LIMIT 1";
        let refused = if stored.kind == *kind && stored.partitions != *partitions {
            Some(QueueClaim::OtherPartitions(stored.partitions))
        } else if !stored.kind.is_empty() && tx.row(other, args![now_ms, holder]).await?.is_some() {
            Some(QueueClaim::InUse(stored.clone()))
        } else {
            None
        };
        if let Some(refused) = refused {
            tx.roll_back().await?;
            return Ok(refused);
        }
        let update = "UPDATE gate SET queue_kind = ?, queue_partitions = ?, queue_accept_within_ms = ? WHERE id = 1";
        tx.execute(update, args![kind.as_str(), *partitions, signed(*accept_within_ms)?]).await?;
        if stored.kind != *kind {
            tx.execute("DELETE FROM queue_marker", &[]).await?;
            for partition in 0..*partitions {
                let insert = "INSERT INTO queue_marker (queue_partition, incarnation) VALUES (?, 0)";
                tx.execute_on(1, insert, args![partition]).await?;
            }
        }
        if !stored.kind.is_empty() && stored.kind != *kind {
            tx.execute("UPDATE gate SET incarnation = incarnation + 1, replication_id = '' WHERE id = 1", &[]).await?;
        }
        tx.commit().await?;
        Ok(QueueClaim::Claimed)
    }

    pub(super) async fn note_marker(&self, partition: u16, incarnation: u64) -> Result<()> {
        let incarnation = signed(incarnation)?;
        // A marker that is delivered twice does not replace that of a later rebuild. One of an incarnation that has not begun is no marker of
        // a rebuild, and would pass for those of all rebuilds up to it.
        let sql = "UPDATE queue_marker SET incarnation = ? WHERE queue_partition = ? AND incarnation < ?
            AND EXISTS (SELECT 1 FROM gate WHERE id = 1 AND gate.incarnation >= ?)";
        self.db.execute(sql, args![incarnation, partition, incarnation, incarnation]).await
    }

    pub(super) async fn count_markers(&self, incarnation: u64) -> Result<u16> {
        let sql = "SELECT COUNT(*) FROM queue_marker WHERE incarnation >= ?";
        let bad = || unreadable("the markers of the queue");
        let row = self.db.row(sql, args![signed(incarnation)?]).await?.ok_or_else(bad)?;
        u16::try_from(row.int(0)?).map_err(|_| bad())
    }
}

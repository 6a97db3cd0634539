//! Worker numbers for the id maker. The ledger's clock grants; no two ranges of one worker overlap.

use std::time::Duration;

use sqlx::Row as _;
use stampede_core::Timestamp;
use stampede_core::ids::{Lease, MAX_WORKERS, WorkerId};
use stampede_core::ports::{LedgerError, Result};

use super::{Sqlite, commit};
use crate::failed;

const NOW_MS: &str = "SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)";

pub(super) async fn lease_worker(
    db: &Sqlite,
    holder: &str,
    worker: Option<WorkerId>,
    not_before: Timestamp,
    span: Duration,
) -> Result<Lease> {
    let mut tx = db.begin().await?;
    let now_ms: i64 = sqlx::query_scalar(NOW_MS).fetch_one(&mut *tx).await.map_err(failed)?;
    let start = Timestamp::from_ms(now_ms.max(not_before.ms()));

    if let Some(worker) = worker {
        let renewed = sqlx::query(
            "UPDATE worker_lease SET until_ms = MAX(until_ms, ?3) WHERE worker = ?1 AND holder = ?2
             RETURNING from_ms, until_ms",
        )
        .bind(worker.0)
        .bind(holder)
        .bind(start.plus(span).ms())
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?;
        if let Some(row) = renewed {
            commit(tx).await?;
            let (from, until) = (Timestamp::from_ms(row.get(0)), Timestamp::from_ms(row.get(1)));
            return Ok(Lease { worker, from, until });
        }
    }

    let free = sqlx::query("SELECT worker, until_ms FROM worker_lease WHERE until_ms <= ?1 ORDER BY worker LIMIT 1")
        .bind(now_ms)
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed)?;
    let (worker, ended_ms): (i64, i64) = match free {
        Some(row) => (row.get(0), row.get(1)),
        None => {
            let next = sqlx::query_scalar("SELECT COALESCE(MAX(worker) + 1, 0) FROM worker_lease")
                .fetch_one(&mut *tx)
                .await
                .map_err(failed)?;
            (next, 0)
        }
    };
    let worker = u16::try_from(worker).ok().filter(|&worker| worker < MAX_WORKERS);
    let worker = worker.ok_or_else(|| LedgerError::Unavailable("all worker numbers are leased".into()))?;
    let from = start.max(Timestamp::from_ms(ended_ms));
    let until = from.plus(span);
    sqlx::query("REPLACE INTO worker_lease (worker, holder, from_ms, until_ms) VALUES (?1, ?2, ?3, ?4)")
        .bind(worker)
        .bind(holder)
        .bind(from.ms())
        .bind(until.ms())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    commit(tx).await?;
    Ok(Lease { worker: WorkerId(worker), from, until })
}

pub(super) async fn return_worker(db: &Sqlite, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()> {
    sqlx::query("UPDATE worker_lease SET until_ms = MIN(until_ms, ?3), holder = '' WHERE worker = ?1 AND holder = ?2")
        .bind(worker.0)
        .bind(holder)
        .bind(unused_from.ms())
        .execute(&db.writer)
        .await
        .map_err(failed)?;
    Ok(())
}

//! MySQL and MariaDB: InnoDB, READ COMMITTED, strict mode, the log flushed at each commit.

mod audit_triggers;

use std::str::FromStr as _;
use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlPool, MySqlPoolOptions};
use sqlx::{Executor as _, Row as _};

use crate::db::{ACQUIRE_TIMEOUT, Pool, check_released};
use crate::{APPLIED, OpenError, check_version, migrator};

/// The number of connections for writing, and the same number for reading.
const CONNECTIONS: u32 = 12;
/// Shorter than the server's timeout of idle connections.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

const MIGRATIONS: [(&str, &str); 4] = [
    ("initial", include_str!("migrations/0001_initial.sql")),
    ("gate", include_str!("migrations/0002_gate.sql")),
    ("fence", include_str!("migrations/0003_fence.sql")),
    ("reconcile", include_str!("migrations/0004_reconcile.sql")),
];

/// Settings of every connection. A node that is suspended or disconnected during a transaction must not lock the sale's row for long, so the
/// server closes a connection after this many idle seconds.
const SESSION: [&str; 2] = [
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION wait_timeout = 20, innodb_lock_wait_timeout = 5, time_zone = '+00:00', \
     sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO'",
];

/// Additional settings of read-only connections.
const READ_ONLY: &str = "SET SESSION TRANSACTION READ ONLY";

fn options(url: &str) -> Result<MySqlConnectOptions, OpenError> {
    Ok(MySqlConnectOptions::from_str(url).map_err(OpenError::Open)?.charset("utf8mb4"))
}

fn pool(read_only: bool) -> MySqlPoolOptions {
    MySqlPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .idle_timeout(IDLE_TIMEOUT)
        .after_connect(move |connection, _| {
            Box::pin(async move {
                for setting in SESSION.into_iter().chain(read_only.then_some(READ_ONLY)) {
                    connection.execute(setting).await?;
                }
                Ok(())
            })
        })
        .after_release(|connection, _| Box::pin(check_released(connection.execute("ROLLBACK"))))
}

/// Opens the database read-only, with or without running servers.
pub(crate) async fn open_read_only(url: &str) -> Result<Pool, OpenError> {
    let readers = pool(true).connect_with(options(url)?).await.map_err(OpenError::Open)?;
    check_version(sqlx::query_as(APPLIED).fetch_all(&readers).await, &migrator(&MIGRATIONS))?;
    Ok(Pool::MySql { writer: readers.clone(), readers })
}

pub(crate) async fn open(url: &str) -> Result<Pool, OpenError> {
    let options = options(url)?;
    let pool = || pool(false);
    let writer = pool().connect_with(options.clone()).await.map_err(OpenError::Open)?;
    check_durable(&writer).await?;
    migrate(&writer).await?;
    let readers = pool().connect_with(options).await.map_err(OpenError::Open)?;
    Ok(Pool::MySql { writer, readers })
}

/// Migrates while holding a lock, one node at a time. sqlx's own lock is not used: it waits without a limit, which MariaDB interprets as not
/// waiting at all.
async fn migrate(pool: &MySqlPool) -> Result<(), OpenError> {
    let mut connection = pool.acquire().await.map_err(OpenError::Open)?;
    let locked: Option<i64> =
        sqlx::query_scalar("SELECT CAST(GET_LOCK(CONCAT('stampede-', DATABASE()), 60) AS SIGNED)")
            .fetch_one(&mut *connection)
            .await
            .map_err(OpenError::Open)?;
    if locked != Some(1) {
        return Err(OpenError::Open(sqlx::Error::Protocol("another node has been migrating for too long".into())));
    }
    // The connection is closed in any case, which releases the lock.
    connection.close_on_drop();
    let mut migrator = migrator(&MIGRATIONS);
    migrator.set_locking(false);
    migrator.run(pool).await?;
    audit_triggers::create(pool).await
}

/// Checks that a committed transaction survives a power failure.
///
/// InnoDB's log must be flushed at each commit. With a binary log a commit is two-phase: recovery rolls back prepared transactions that are
/// not in the binary log. So the binary log must be flushed at each commit too, or InnoDB's log both at prepare and at commit, which is
/// MariaDB's setting 3.
async fn check_durable(pool: &MySqlPool) -> Result<(), OpenError> {
    let row = sqlx::query(
        "SELECT CAST(@@innodb_flush_log_at_trx_commit AS SIGNED), CAST(@@log_bin AS SIGNED), CAST(@@sync_binlog AS SIGNED)",
    )
    .fetch_one(pool)
    .await
    .map_err(OpenError::Open)?;
    let [flush, log_bin, sync_binlog]: [i64; 3] = std::array::from_fn(|column| row.get(column));
    if !matches!(flush, 1 | 3) {
        return Err(OpenError::NotDurable(format!("innodb_flush_log_at_trx_commit is {flush}, not 1")));
    }
    if log_bin == 1 && sync_binlog != 1 && flush != 3 {
        return Err(OpenError::NotDurable(format!(
            "the server writes a binary log and sync_binlog is {sync_binlog}, not 1: a crash would undo commits"
        )));
    }
    Ok(())
}

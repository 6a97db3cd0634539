//! MySQL and MariaDB: InnoDB, READ COMMITTED, strict mode, the log flushed at each commit.

mod audit_triggers;
mod recorder;

use std::collections::HashMap;
use std::str::FromStr as _;
use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlPool, MySqlPoolOptions, MySqlRow};
use sqlx::{Executor as _, Row as _};

pub(crate) use self::recorder::record;
use crate::db::{ACQUIRE_TIMEOUT, MAX_LIFETIME, Pool, Use, check_released};
use crate::{APPLIED, OpenError, check_version, migrator};

/// The number of connections for writing, and the same number for reading.
const CONNECTIONS: u32 = 12;
/// Shorter than the server's timeout of idle connections.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

const MIGRATIONS: [(&str, &str); 16] = [
    ("initial", include_str!("migrations/0001_initial.sql")),
    ("gate", include_str!("migrations/0002_gate.sql")),
    ("fence", include_str!("migrations/0003_fence.sql")),
    ("reconcile", include_str!("migrations/0004_reconcile.sql")),
    ("recovery", include_str!("migrations/0005_recovery.sql")),
    ("queue", include_str!("migrations/0006_queue.sql")),
    ("sale incarnation", include_str!("migrations/0007_sale_incarnation.sql")),
    ("parked messages", include_str!("migrations/0008_parked_messages.sql")),
    ("order events", include_str!("migrations/0009_order_events.sql")),
    ("payment deadline", include_str!("migrations/0010_payment_deadline.sql")),
    ("payment", include_str!("migrations/0011_payment.sql")),
    ("refunds", include_str!("migrations/0012_refunds.sql")),
    ("event outbox", include_str!("migrations/0013_event_outbox.sql")),
    ("buy again", include_str!("migrations/0014_buy_again.sql")),
    ("sale edits", include_str!("migrations/0015_sale_edits.sql")),
    ("late payments", include_str!("migrations/0016_late_payments.sql")),
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

/// The variable has different names in MariaDB and MySQL. Each of them executes one of the two comments.
const ROLL_BACK_AND_CHECK: &str =
    "ROLLBACK; SELECT CAST(/*M! @@tx_read_only */ /*!50720 @@transaction_read_only */ AS SIGNED)";

/// Returns `false` if the connection is for writing and cannot write.
async fn roll_back(connection: &mut MySqlConnection, purpose: Use) -> sqlx::Result<bool> {
    if purpose != Use::Write {
        return connection.execute("ROLLBACK").await.map(|_| true);
    }
    // One round trip.
    let row = connection.fetch_one(ROLL_BACK_AND_CHECK).await?;
    Ok(row.try_get::<i64, _>(0)? == 0)
}

fn pool(purpose: Use) -> MySqlPoolOptions {
    MySqlPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .idle_timeout(IDLE_TIMEOUT)
        .max_lifetime(MAX_LIFETIME)
        .after_connect(move |connection, _| {
            Box::pin(async move {
                for setting in SESSION.into_iter().chain((purpose == Use::Inspect).then_some(READ_ONLY)) {
                    connection.execute(setting).await?;
                }
                Ok(())
            })
        })
        .after_release(move |connection, _| Box::pin(check_released(roll_back(connection, purpose))))
}

/// Opens the database read-only, with or without running servers.
pub(crate) async fn open_read_only(url: &str) -> Result<Pool, OpenError> {
    let readers = pool(Use::Inspect).connect_with(options(url)?).await.map_err(OpenError::Open)?;
    check_version(sqlx::query_as(APPLIED).fetch_all(&readers).await, &migrator(&MIGRATIONS))?;
    Ok(Pool::MySql { writer: readers.clone(), readers })
}

pub(crate) async fn open(url: &str) -> Result<Pool, OpenError> {
    let options = options(url)?;
    let writer = pool(Use::Write).connect_with(options.clone()).await.map_err(OpenError::Open)?;
    check_durable(&writer).await?;
    migrate(&writer).await?;
    let readers = pool(Use::Read).connect_with(options).await.map_err(OpenError::Open)?;
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
/// MariaDB's setting 3. The log alone does not repair a page that was written in part; the doublewrite buffer does.
async fn check_durable(pool: &MySqlPool) -> Result<(), OpenError> {
    let show =
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('innodb_flush_log_at_trx_commit', 'log_bin', 'sync_binlog',
        'innodb_doublewrite', 'innodb_flush_method')";
    let rows = sqlx::raw_sql(show).fetch_all(pool).await.map_err(OpenError::Open)?;
    let pair = |row: &MySqlRow| Ok((row.try_get(0)?, row.try_get(1)?));
    let settings: HashMap<String, String> =
        rows.iter().map(pair).collect::<sqlx::Result<_>>().map_err(OpenError::Open)?;
    let value = |name: &str| settings.get(name).map_or("", String::as_str);
    let flush = value("innodb_flush_log_at_trx_commit");
    if !matches!(flush, "1" | "3") {
        return Err(OpenError::NotDurable(format!("innodb_flush_log_at_trx_commit is {flush}, not 1")));
    }
    let sync_binlog = value("sync_binlog");
    if value("log_bin") == "ON" && sync_binlog != "1" && flush != "3" {
        return Err(OpenError::NotDurable(format!(
            "the server writes a binary log and sync_binlog is {sync_binlog}, not 1: a crash would undo commits"
        )));
    }
    for (name, bad) in
        [("innodb_doublewrite", &["OFF", "DETECT_ONLY"] as &[_]), ("innodb_flush_method", &["nosync", "littlesync"])]
    {
        if bad.iter().any(|bad| value(name).eq_ignore_ascii_case(bad)) {
            return Err(OpenError::NotDurable(format!("{name} is {}", value(name))));
        }
    }
    Ok(())
}

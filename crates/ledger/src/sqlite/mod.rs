//! Embedded SQLite: WAL, `synchronous=FULL`, two write connections that alternate, a pool of read connections.

mod recorder;
mod writer;

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use sqlx::migrate::Migrator;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{ConnectOptions as _, SqliteConnection};
use stampede_core::failpoint;

use crate::db::{ACQUIRE_TIMEOUT, Pool};
use crate::{APPLIED, OpenError, check_version, migrator};

pub(crate) use recorder::Recorder;
pub(crate) use writer::{Writer, WriterGuard};

const READERS: u32 = 4;

/// Settings of every connection.
const SETTINGS: [(&str, &str); 4] = [
    // Index pages change repeatedly during a sale: they stay in the cache and are checkpointed once for many commits. The cache is not
    // larger, because SQLite often scans all of it at the end of a transaction.
    ("cache_size", "-8192"),
    ("temp_store", "MEMORY"),
    ("wal_autocheckpoint", "8192"),
    ("foreign_keys", "ON"),
];

/// The value of `PRAGMA synchronous`: 2 is FULL.
fn synchronous() -> i64 {
    if failpoint::planted("sync-off") { 0 } else { 2 }
}

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

fn migrations() -> Migrator {
    let mut migrations = MIGRATIONS;
    if failpoint::planted("skip-duplicate") {
        for (_, sql) in &mut migrations {
            *sql = sql.replace("UNIQUE (sale_id, user_id, live),", "").leak();
        }
    }
    migrator(&migrations)
}

pub(crate) async fn open(path: &Path) -> Result<Pool, OpenError> {
    let mut options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .busy_timeout(ACQUIRE_TIMEOUT)
        .pragma("synchronous", synchronous().to_string());
    for (name, value) in SETTINGS {
        options = options.pragma(name, value);
    }
    make_private(path)?;
    let pool =
        SqlitePoolOptions::new().max_connections(1).connect_with(options.clone()).await.map_err(OpenError::Open)?;
    migrations().run(&pool).await?;
    pool.close().await;
    let mut connection = options.connect().await.map_err(OpenError::Open)?;
    check_durable(&mut connection).await?;
    let writer = Writer::new(options.clone(), connection);
    let recorder = Recorder::start(path).map_err(|error| OpenError::Open(sqlx::Error::Configuration(error)))?;
    let readers = SqlitePoolOptions::new()
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .test_before_acquire(false)
        // All connections are opened at the start and stay open, because each has a thread.
        .min_connections(READERS)
        .max_connections(READERS)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect_with(options.read_only(true));
    let readers = readers.await.map_err(OpenError::Open)?;
    let all = (0..READERS).map(|_| readers.acquire());
    futures_util::future::try_join_all(all).await.map_err(OpenError::Open)?;
    Ok(Pool::Sqlite { writer, recorder, readers })
}

/// Opens the database read-only, with or without a running server.
pub(crate) async fn open_read_only(path: &Path) -> Result<Pool, OpenError> {
    let options = SqliteConnectOptions::new().filename(path).read_only(true).busy_timeout(ACQUIRE_TIMEOUT);
    let readers = SqlitePoolOptions::new().acquire_timeout(ACQUIRE_TIMEOUT).max_connections(READERS);
    let readers = readers.connect_with(options.clone()).await.map_err(OpenError::Open)?;
    check_version(sqlx::query_as(APPLIED).fetch_all(&readers).await, &migrations())?;
    let connection = options.connect().await.map_err(OpenError::Open)?;
    Ok(Pool::Sqlite { writer: Writer::new(options, connection), recorder: Recorder::closed(), readers })
}

/// Makes the database readable by its owner only. SQLite gives its other files the mode of the first.
fn make_private(path: &Path) -> Result<(), OpenError> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match made {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(OpenError::Open(sqlx::Error::Io(error))),
        _ => Ok(()),
    }
}

/// Checks that the settings are in effect: without WAL on this file system, for example, a 201 would not be durable.
async fn check_durable(writer: &mut SqliteConnection) -> Result<(), OpenError> {
    let mode: String =
        sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *writer).await.map_err(OpenError::Open)?;
    if mode != "wal" {
        return Err(OpenError::NotDurable(format!("journal_mode is {mode}, not wal")));
    }
    let synchronous: i64 =
        sqlx::query_scalar("PRAGMA synchronous").fetch_one(&mut *writer).await.map_err(OpenError::Open)?;
    if synchronous < 2 && !failpoint::planted("sync-off") {
        return Err(OpenError::NotDurable(format!("synchronous is {synchronous}, not FULL")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: &str = "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at) \
                         VALUES (?, 7, ?, 1, ?, 1, 1, 100, 5, 5)";

    #[tokio::test]
    async fn a_later_migration_keeps_existing_orders_and_constraints() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        open(&path).await.unwrap().close().await;
        let options = SqliteConnectOptions::new().filename(&path);
        let pool = SqlitePoolOptions::new().connect_with(options).await.unwrap();
        sqlx::query(ORDER).bind(1).bind(11).bind("unpaid").execute(&pool).await.unwrap();

        let later = [&MIGRATIONS[..], &[("later", "ALTER TABLE orders ADD COLUMN note TEXT")]].concat();
        migrator(&later).run(&pool).await.unwrap();
        let held: (i64, i64, String, Option<String>) =
            sqlx::query_as("SELECT id, user_id, status, note FROM orders").fetch_one(&pool).await.unwrap();
        assert_eq!(held, (1, 11, "unpaid".to_owned(), None));
        for (id, user, status) in [(1, 12, "unpaid"), (2, 11, "unpaid"), (3, 13, "cancelled")] {
            sqlx::query(ORDER).bind(id).bind(user).bind(status).execute(&pool).await.unwrap_err();
        }
        sqlx::query(ORDER).bind(2).bind(12).bind("paid").execute(&pool).await.unwrap();
        pool.close().await;

        // A binary without the later migration does not change the database.
        let error = open(&path).await.unwrap_err().to_string();
        assert!(error.contains("another version of Stampede"), "{error}");
    }

    #[tokio::test]
    async fn a_database_with_another_initial_migration_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        let options = SqliteConnectOptions::new().filename(&path).create_if_missing(true);
        let pool = SqlitePoolOptions::new().connect_with(options).await.unwrap();
        migrator(&[("initial", "CREATE TABLE orders (id INTEGER PRIMARY KEY)")]).run(&pool).await.unwrap();
        pool.close().await;
        let error = open(&path).await.unwrap_err().to_string();
        assert!(error.contains("a new database"), "{error}");
    }
}

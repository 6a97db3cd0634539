//! PostgreSQL: READ COMMITTED, synchronous commits.

use std::str::FromStr as _;

use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};

use crate::db::{ACQUIRE_TIMEOUT, Pool, check_released};
use crate::{APPLIED, OpenError, check_version, migrator};

/// The number of connections for writing, and the same number for reading.
const CONNECTIONS: u32 = 12;

const MIGRATIONS: [(&str, &str); 4] = [
    ("initial", include_str!("migrations/0001_initial.sql")),
    ("gate", include_str!("migrations/0002_gate.sql")),
    ("fence", include_str!("migrations/0003_fence.sql")),
    ("reconcile", include_str!("migrations/0004_reconcile.sql")),
];

fn options(url: &str) -> Result<PgConnectOptions, OpenError> {
    let options = PgConnectOptions::from_str(url).map_err(OpenError::Open)?.application_name("stampede");
    Ok(options.options([
        // A node that is disconnected during a transaction must not lock the sale's row for long.
        ("lock_timeout", "5s"),
        ("idle_in_transaction_session_timeout", "10s"),
        ("timezone", "UTC"),
        // A ROLLBACK outside of a transaction, as `check_released` sends it, is worth no warning.
        ("client_min_messages", "error"),
    ]))
}

fn pool() -> PgPoolOptions {
    PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .after_release(|connection, _| Box::pin(check_released(connection.execute("ROLLBACK"))))
}

/// Opens the database read-only, with or without running servers.
pub(crate) async fn open_read_only(url: &str) -> Result<Pool, OpenError> {
    let options = options(url)?.options([("default_transaction_read_only", "on")]);
    let readers = pool().connect_with(options).await.map_err(OpenError::Open)?;
    check_version(sqlx::query_as(APPLIED).fetch_all(&readers).await, &migrator(&MIGRATIONS))?;
    Ok(Pool::Postgres { writer: readers.clone(), readers })
}

pub(crate) async fn open(url: &str) -> Result<Pool, OpenError> {
    let options = options(url)?;
    let writer = pool().connect_with(options.clone()).await.map_err(OpenError::Open)?;
    check_durable(&writer).await?;
    migrator(&MIGRATIONS).run(&writer).await?;
    let readers = pool().connect_with(options).await.map_err(OpenError::Open)?;
    Ok(Pool::Postgres { writer, readers })
}

/// Checks that commits wait for the disk: otherwise a 201 would not be durable.
async fn check_durable(pool: &PgPool) -> Result<(), OpenError> {
    for (setting, bad) in [("fsync", "off"), ("synchronous_commit", "off")] {
        let value: String = sqlx::query_scalar("SELECT current_setting($1)")
            .bind(setting)
            .fetch_one(pool)
            .await
            .map_err(OpenError::Open)?;
        if value == bad {
            return Err(OpenError::NotDurable(format!("{setting} is {value}")));
        }
    }
    Ok(())
}

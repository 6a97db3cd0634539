//! PostgreSQL: READ COMMITTED, commits that wait for the disk.

use std::str::FromStr as _;

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};

use crate::db::{PATIENCE, Pool, check_released};
use crate::{APPLIED, OpenError, check_version, migrator};

/// To write with, and as many to read with.
const CONNECTIONS: u32 = 12;

const MIGRATIONS: [(&str, &str); 1] = [("initial", include_str!("migrations/0001_initial.sql"))];

fn options(url: &str) -> Result<PgConnectOptions, OpenError> {
    let options = PgConnectOptions::from_str(url).map_err(OpenError::Open)?.application_name("stampede");
    // A node that was cut off in mid-transaction must not hold the sale's row for long.
    Ok(options.options([("lock_timeout", "5s"), ("idle_in_transaction_session_timeout", "10s"), ("timezone", "UTC")]))
}

fn pool() -> PgPoolOptions {
    PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(PATIENCE)
        .after_release(|connection, _| Box::pin(check_released(connection)))
}

/// To be read, beside servers that run or after them.
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

/// A commit that does not wait for the disk would break the promise behind every 201.
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

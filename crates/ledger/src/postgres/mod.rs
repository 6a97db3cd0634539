//! PostgreSQL: READ COMMITTED, synchronous commits.

mod recorder;

use std::str::FromStr as _;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{Executor as _, Row as _};

pub(crate) use self::recorder::Recorder;
use crate::db::{ACQUIRE_TIMEOUT, MAX_LIFETIME, Pool, Use, check_released};
use crate::{APPLIED, OpenError, check_version, migrator};

/// The number of connections for writing, and the same number for reading.
const CONNECTIONS: u32 = 12;

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

fn pool(purpose: Use) -> PgPoolOptions {
    PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .max_lifetime(MAX_LIFETIME)
        .after_release(move |connection, _| Box::pin(check_released(roll_back(connection, purpose))))
}

/// Returns `false` if the connection is for writing and cannot write.
async fn roll_back(connection: &mut PgConnection, purpose: Use) -> sqlx::Result<bool> {
    if purpose != Use::Write {
        return connection.execute("ROLLBACK").await.map(|_| true);
    }
    // One round trip.
    let row = connection.fetch_one("ROLLBACK; SHOW transaction_read_only").await?;
    Ok(row.try_get::<String, _>(0)? == "off")
}

/// Opens the database read-only, with or without running servers.
pub(crate) async fn open_read_only(url: &str) -> Result<Pool, OpenError> {
    let options = options(url)?.options([("default_transaction_read_only", "on")]);
    let readers = pool(Use::Inspect).connect_with(options).await.map_err(OpenError::Open)?;
    check_version(sqlx::query_as(APPLIED).fetch_all(&readers).await, &migrator(&MIGRATIONS))?;
    Ok(Pool::Postgres { writer: readers.clone(), recorder: Recorder::new(readers.clone()), readers })
}

pub(crate) async fn open(url: &str) -> Result<Pool, OpenError> {
    let options = options(url)?;
    let writer = pool(Use::Write).connect_with(options.clone()).await.map_err(OpenError::Open)?;
    check_durable(&writer).await?;
    migrator(&MIGRATIONS).run(&writer).await?;
    let readers = pool(Use::Read).connect_with(options).await.map_err(OpenError::Open)?;
    Ok(Pool::Postgres { recorder: Recorder::new(writer.clone()), writer, readers })
}

/// Checks that commits wait for the disk, and that a page that was written in part is repaired: otherwise a 201 would not be durable.
async fn check_durable(pool: &PgPool) -> Result<(), OpenError> {
    for (setting, bad) in [("fsync", "off"), ("synchronous_commit", "off"), ("full_page_writes", "off")] {
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

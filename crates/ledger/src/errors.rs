//! What a failure means: whether it was done, and whether it is worth trying again.

use std::error::Error;

use sqlx::error::DatabaseError;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::postgres::PgDatabaseError;
use sqlx::sqlite::SqliteError;
use stampede_core::ports::LedgerError;

enum Meaning {
    /// Another transaction was in the way.
    Conflict,
    /// It passes by itself.
    Outage,
    /// The same call will fail again.
    Poison,
}

impl Meaning {
    fn of(self, error: Box<dyn Error + Send + Sync>) -> LedgerError {
        match self {
            Self::Conflict => LedgerError::Conflict(error),
            Self::Outage => LedgerError::Unavailable(error),
            Self::Poison => LedgerError::Poison(error),
        }
    }
}

/// A statement inside a transaction failed: surely not done.
pub(crate) fn failed(error: sqlx::Error) -> LedgerError {
    meaning(&error).of(error.into())
}

/// A transaction could not even begin. Whatever the reason, it is none of an order's: a changed password is no poison.
pub(crate) fn not_begun(error: sqlx::Error) -> LedgerError {
    no_poison(failed(error))
}

fn no_poison(error: LedgerError) -> LedgerError {
    match error {
        LedgerError::Poison(error) => LedgerError::Unavailable(error),
        other => other,
    }
}

/// The same for SQLite's own connection.
pub(crate) fn sqlite_failed(error: rusqlite::Error) -> LedgerError {
    let meaning = match &error {
        rusqlite::Error::SqliteFailure(failure, _) => meaning_of_sqlite(failure.extended_code),
        _ => Meaning::Poison,
    };
    meaning.of(error.into())
}

pub(crate) fn sqlite_not_begun(error: rusqlite::Error) -> LedgerError {
    no_poison(sqlite_failed(error))
}

/// Something with the same key is there already.
pub(crate) fn is_taken(error: &rusqlite::Error) -> bool {
    use rusqlite::ffi::{SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_UNIQUE};
    let code = error.sqlite_error().map(|failure| failure.extended_code);
    matches!(code, Some(SQLITE_CONSTRAINT_PRIMARYKEY | SQLITE_CONSTRAINT_UNIQUE))
}

/// A statement that commits by itself failed: if it is the connection that failed, it may have been done.
pub(crate) fn perhaps(error: sqlx::Error) -> LedgerError {
    match (&error, meaning(&error)) {
        (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Database(_), _) => failed(error),
        (_, Meaning::Outage) => LedgerError::Unknown(error.into()),
        _ => failed(error),
    }
}

fn meaning(error: &sqlx::Error) -> Meaning {
    use sqlx::Error as E;
    match error {
        E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => Meaning::Outage,
        // The connection is in a state that it should not be in; another one will do.
        E::BeginFailed | E::InvalidSavePointStatement => Meaning::Outage,
        E::Database(error) => meaning_of_code(error.as_ref()),
        _ => Meaning::Poison,
    }
}

/// What passes by itself on MySQL and MariaDB: full disk or table, too many connections, shutting down, killed, read-only, not ready,
/// time limits, storage engine errors, network.
const OUTAGES: [u16; 29] = [
    3, 28, 1021, 1026, 1030, 1040, 1041, 1047, 1053, 1077, 1079, 1114, 1129, 1158, 1159, 1160, 1161, 1180, 1203, 1226,
    1290, 1317, 1836, 1927, 1969, 2006, 2013, 3024, 4031,
];

fn meaning_of_code(error: &dyn DatabaseError) -> Meaning {
    if let Some(error) = error.try_downcast_ref::<MySqlDatabaseError>() {
        return match error.number() {
            // Lock wait time-out, deadlock, record has changed.
            1205 | 1213 | 1020 => Meaning::Conflict,
            number if OUTAGES.contains(&number) => Meaning::Outage,
            _ => Meaning::Poison,
        };
    }
    let code = error.code().unwrap_or_default();
    if error.try_downcast_ref::<PgDatabaseError>().is_some() {
        return match code.as_ref() {
            // Serialisation failure, deadlock, lock not available.
            "40001" | "40P01" | "55P03" => Meaning::Conflict,
            // Read-only; we slept in a transaction and were thrown out.
            "25006" | "25P03" | "25P04" => Meaning::Outage,
            // Connection, resources, operator, system.
            code if ["08", "53", "57", "58"].iter().any(|class| code.starts_with(class)) => Meaning::Outage,
            _ => Meaning::Poison,
        };
    }
    debug_assert!(error.try_downcast_ref::<SqliteError>().is_some(), "a fourth database");
    code.parse().map_or(Meaning::Poison, meaning_of_sqlite)
}

fn meaning_of_sqlite(code: i32) -> Meaning {
    // The low byte is the primary code, the rest says more about it.
    match code & 0xff {
        // Busy, locked.
        5 | 6 => Meaning::Conflict,
        // Permission, memory, read-only, interrupted, I/O error, corrupt, disk full, cannot open, locking protocol, not a database:
        // none of it is an order's fault.
        3 | 7 | 8 | 9 | 10 | 11 | 13 | 14 | 15 | 26 => Meaning::Outage,
        _ => Meaning::Poison,
    }
}

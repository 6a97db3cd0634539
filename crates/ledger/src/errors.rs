//! What a failure means: whether it was done, and whether it is worth trying again.
//!
//! Only what is listed here as an error in the data is [`LedgerError::Poison`]. Everything else, known or not, is an outage: taking an
//! outage for a bad order would put good orders into quarantine, taking a bad order for an outage only tries it again.

use std::error::Error;

use sqlx::error::DatabaseError;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::postgres::PgDatabaseError;
use sqlx::sqlite::SqliteError;
use stampede_core::ports::LedgerError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// Another transaction was in the way.
    Conflict,
    /// It passes by itself, or when an operator has acted.
    Outage,
    /// The data cannot be stored: the same call will fail again.
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
    let meaning = error.sqlite_error().map_or(Meaning::Outage, |failure| meaning_of_sqlite(failure.extended_code));
    meaning.of(error.into())
}

pub(crate) fn sqlite_not_begun(error: rusqlite::Error) -> LedgerError {
    no_poison(sqlite_failed(error))
}

/// Something with the same key is there already.
pub(crate) fn is_taken(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|failure| is_duplicate_in_sqlite(failure.extended_code))
}

fn is_duplicate_in_sqlite(code: i32) -> bool {
    use rusqlite::ffi::{SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_ROWID, SQLITE_CONSTRAINT_UNIQUE};
    matches!(code, SQLITE_CONSTRAINT_PRIMARYKEY | SQLITE_CONSTRAINT_ROWID | SQLITE_CONSTRAINT_UNIQUE)
}

/// A statement that commits by itself failed: if it is the connection that failed, it may have been done.
pub(crate) fn classify_autocommit(error: sqlx::Error) -> LedgerError {
    match (&error, meaning(&error)) {
        (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Database(_), _) => failed(error),
        (_, Meaning::Outage) => LedgerError::Unknown(error.into()),
        _ => failed(error),
    }
}

fn meaning(error: &sqlx::Error) -> Meaning {
    use sqlx::Error as E;
    match error {
        E::Database(error) => meaning_of_code(error.as_ref()),
        // A value that cannot be written, or a row that cannot be read.
        E::Encode(_) | E::Decode(_) | E::ColumnDecode { .. } => Meaning::Poison,
        _ => Meaning::Outage,
    }
}

/// Errors in the data that MySQL or MariaDB report outside the SQLSTATE classes 22 and 23: a value cut off, no default value, a string
/// that is not in the character set, a check that failed.
const MYSQL_DATA_ERRORS: [u16; 4] = [1265, 1364, 1366, 3819];

fn meaning_of_code(error: &dyn DatabaseError) -> Meaning {
    if error.is_unique_violation() {
        // Looking again, under the lock of the sale, tells which order has the key.
        return Meaning::Conflict;
    }
    let code = error.code().unwrap_or_default();
    if let Some(error) = error.try_downcast_ref::<MySqlDatabaseError>() {
        return match error.number() {
            // Lock wait time-out, deadlock, record has changed.
            1205 | 1213 | 1020 => Meaning::Conflict,
            number if MYSQL_DATA_ERRORS.contains(&number) => Meaning::Poison,
            _ => meaning_of_class(&code),
        };
    }
    if error.try_downcast_ref::<PgDatabaseError>().is_some() {
        return match code.as_ref() {
            // Serialisation failure, deadlock, lock not available.
            "40001" | "40P01" | "55P03" => Meaning::Conflict,
            code => meaning_of_class(code),
        };
    }
    debug_assert!(error.try_downcast_ref::<SqliteError>().is_some(), "a fourth database");
    code.parse().map_or(Meaning::Outage, meaning_of_sqlite)
}

/// By SQLSTATE: 22 is a data exception, 23 a violated constraint.
fn meaning_of_class(code: &str) -> Meaning {
    if code.starts_with("22") || code.starts_with("23") { Meaning::Poison } else { Meaning::Outage }
}

fn meaning_of_sqlite(code: i32) -> Meaning {
    // The low byte is the primary code, the rest says more about it.
    match code & 0xff {
        // Busy, locked.
        5 | 6 => Meaning::Conflict,
        19 if is_duplicate_in_sqlite(code) => Meaning::Conflict,
        // Too big, constraint, mismatch.
        18..=20 => Meaning::Poison,
        _ => Meaning::Outage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_in_the_data_are_poison() {
        for (code, expected) in [
            ("22001", Meaning::Poison),
            ("23514", Meaning::Poison),
            // Permission denied, undefined table, too many connections, admin shutdown, a code that does not exist.
            ("42501", Meaning::Outage),
            ("42P01", Meaning::Outage),
            ("53300", Meaning::Outage),
            ("57P01", Meaning::Outage),
            ("XYZZY", Meaning::Outage),
            ("", Meaning::Outage),
        ] {
            assert_eq!(meaning_of_class(code), expected, "{code}");
        }
        // Check, not null, foreign key, trigger; unique; busy snapshot; then error, permission, full, schema changed, misuse, not listed.
        for code in [275, 1299, 787, 1811, 18, 20] {
            assert_eq!(meaning_of_sqlite(code), Meaning::Poison, "{code}");
        }
        for code in [2067, 1555, 2579, 5, 6, 517] {
            assert_eq!(meaning_of_sqlite(code), Meaning::Conflict, "{code}");
        }
        for code in [1, 3, 13, 17, 21, 99, 522] {
            assert_eq!(meaning_of_sqlite(code), Meaning::Outage, "{code}");
        }
    }
}

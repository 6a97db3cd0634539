//! Classification of failures: whether the statement was executed, and whether to retry it.
//!
//! Only the errors that are listed here as data errors are [`LedgerError::Poison`]. Everything else is treated as an outage: an outage
//! mistaken for a bad order would quarantine good orders, while a bad order mistaken for an outage is only retried.

use std::error::Error;

use sqlx::error::DatabaseError;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::postgres::PgDatabaseError;
use sqlx::sqlite::SqliteError;
use stampede_core::ports::LedgerError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ErrorClass {
    /// A conflict with another transaction.
    Conflict,
    /// It ends by itself, or after an operator has acted.
    Outage,
    /// The data cannot be stored, so the same call fails again.
    Poison,
}

impl ErrorClass {
    fn with(self, error: Box<dyn Error + Send + Sync>) -> LedgerError {
        match self {
            Self::Conflict => LedgerError::Conflict(error),
            Self::Outage => LedgerError::Unavailable(error),
            Self::Poison => LedgerError::Poison(error),
        }
    }
}

/// A statement inside a transaction failed, so nothing was done.
pub(crate) fn failed(error: sqlx::Error) -> LedgerError {
    classify(&error).with(error.into())
}

/// A transaction could not begin. The cause is never the data of an order: a changed password, for example, is not poison.
pub(crate) fn not_begun(error: sqlx::Error) -> LedgerError {
    no_poison(failed(error))
}

fn no_poison(error: LedgerError) -> LedgerError {
    match error {
        LedgerError::Poison(error) => LedgerError::Unavailable(error),
        other => other,
    }
}

/// The same for the rusqlite connection.
pub(crate) fn sqlite_failed(error: rusqlite::Error) -> LedgerError {
    let class = error.sqlite_error().map_or(ErrorClass::Outage, |failure| classify_sqlite(failure.extended_code));
    class.with(error.into())
}

pub(crate) fn sqlite_not_begun(error: rusqlite::Error) -> LedgerError {
    no_poison(sqlite_failed(error))
}

/// An insert failed whose keys were looked up before, under the lock of the sale. A duplicate key is then one that Stampede does not know,
/// of an index that was added by hand: a retry fails again.
pub(crate) fn after_lookup(error: LedgerError) -> LedgerError {
    match error {
        LedgerError::Conflict(error) if is_unique_violation(&*error) => LedgerError::Poison(error),
        other => other,
    }
}

fn is_unique_violation(error: &(dyn Error + 'static)) -> bool {
    let error = error.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
    error.is_some_and(|error| error.is_unique_violation())
}

/// Whether a row with the same key exists.
pub(crate) fn is_duplicate_key(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|failure| is_duplicate_in_sqlite(failure.extended_code))
}

fn is_duplicate_in_sqlite(code: i32) -> bool {
    use rusqlite::ffi::{SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_ROWID, SQLITE_CONSTRAINT_UNIQUE};
    matches!(code, SQLITE_CONSTRAINT_PRIMARYKEY | SQLITE_CONSTRAINT_ROWID | SQLITE_CONSTRAINT_UNIQUE)
}

/// A statement with autocommit failed: if the connection failed, it may have been executed.
pub(crate) fn classify_autocommit(error: sqlx::Error) -> LedgerError {
    match (&error, classify(&error)) {
        (sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Database(_), _) => failed(error),
        (_, ErrorClass::Outage) => LedgerError::Unknown(error.into()),
        _ => failed(error),
    }
}

fn classify(error: &sqlx::Error) -> ErrorClass {
    use sqlx::Error as E;
    match error {
        E::Database(error) => classify_code(error.as_ref()),
        // A value cannot be encoded. A row that cannot be decoded is not the data of the order that is being recorded.
        E::Encode(_) => ErrorClass::Poison,
        _ => ErrorClass::Outage,
    }
}

/// Data errors that MySQL or MariaDB report outside of the SQLSTATE classes 22 and 23: truncated value, no default value, invalid string
/// for the character set, failed check.
const MYSQL_DATA_ERRORS: [u16; 4] = [1265, 1364, 1366, 3819];

fn classify_code(error: &dyn DatabaseError) -> ErrorClass {
    if error.is_unique_violation() {
        // A retry reads under the lock of the sale which order has the key.
        return ErrorClass::Conflict;
    }
    let code = error.code().unwrap_or_default();
    if let Some(error) = error.try_downcast_ref::<MySqlDatabaseError>() {
        return match error.number() {
            // Lock wait timeout, deadlock, record has changed.
            1205 | 1213 | 1020 => ErrorClass::Conflict,
            number if MYSQL_DATA_ERRORS.contains(&number) => ErrorClass::Poison,
            _ => classify_sqlstate(&code),
        };
    }
    if error.try_downcast_ref::<PgDatabaseError>().is_some() {
        return match code.as_ref() {
            // Serialization failure, deadlock, lock not available.
            "40001" | "40P01" | "55P03" => ErrorClass::Conflict,
            code => classify_sqlstate(code),
        };
    }
    debug_assert!(error.try_downcast_ref::<SqliteError>().is_some(), "an unknown database");
    code.parse().map_or(ErrorClass::Outage, classify_sqlite)
}

/// By SQLSTATE: 22 is a data exception, 23 a violated constraint.
fn classify_sqlstate(code: &str) -> ErrorClass {
    if code.starts_with("22") || code.starts_with("23") { ErrorClass::Poison } else { ErrorClass::Outage }
}

fn classify_sqlite(code: i32) -> ErrorClass {
    // The low byte is the primary result code.
    match code & 0xff {
        // Busy, locked.
        5 | 6 => ErrorClass::Conflict,
        19 if is_duplicate_in_sqlite(code) => ErrorClass::Conflict,
        // Too big, constraint, mismatch.
        18..=20 => ErrorClass::Poison,
        _ => ErrorClass::Outage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_be_read_are_no_poison() {
        use sqlx::Error as E;
        let column = E::ColumnDecode { index: "live".to_owned(), source: "not a number".into() };
        for error in [E::Decode("not a number".into()), column] {
            assert_eq!(classify(&error), ErrorClass::Outage, "{error}");
        }
        assert_eq!(classify(&E::Encode("too long".into())), ErrorClass::Poison);
    }

    #[test]
    fn only_errors_in_the_data_are_poison() {
        for (code, expected) in [
            ("22001", ErrorClass::Poison),
            ("23514", ErrorClass::Poison),
            // Permission denied, undefined table, too many connections, admin shutdown, a code that does not exist.
            ("42501", ErrorClass::Outage),
            ("42P01", ErrorClass::Outage),
            ("53300", ErrorClass::Outage),
            ("57P01", ErrorClass::Outage),
            ("XYZZY", ErrorClass::Outage),
            ("", ErrorClass::Outage),
        ] {
            assert_eq!(classify_sqlstate(code), expected, "{code}");
        }
        // Check, not null, foreign key, trigger; unique; busy snapshot; then error, permission, full, schema changed, misuse, not listed.
        for code in [275, 1299, 787, 1811, 18, 20] {
            assert_eq!(classify_sqlite(code), ErrorClass::Poison, "{code}");
        }
        for code in [2067, 1555, 2579, 5, 6, 517] {
            assert_eq!(classify_sqlite(code), ErrorClass::Conflict, "{code}");
        }
        for code in [1, 3, 13, 17, 21, 99, 522] {
            assert_eq!(classify_sqlite(code), ErrorClass::Outage, "{code}");
        }
    }
}

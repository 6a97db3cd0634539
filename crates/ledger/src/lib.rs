//! The ledger in SQL: the durable record of all orders. A gate can be rebuilt from it at any time.
//!
//! - [`open`], [`open_with`]: open and migrate the database of a URL; [`open_read_only`]: opens it for inspection
//! - [`raw_inserts`]: inserts of many rows with nothing else, to compare with
//! - `store`: the operations of a ledger, shared by all databases
//! - `db`: one interface to three databases; `errors`: the classification of their failures; `steps`: the metric of the steps of orders
//! - `sqlite`, `mysql`, `postgres`: connection settings, durability checks and migrations of each

mod db;
mod errors;
mod mysql;
mod postgres;
mod raw_inserts;
mod sqlite;
mod steps;
mod store;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use sqlx::SqlSafeStr as _;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use stampede_core::ports::{Ledger, Stores};

pub use crate::raw_inserts::{RawInsertError, RawInserts, raw_inserts};
use crate::store::Store;

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("unknown database {0:?}: expected sqlite:PATH, mysql://… or postgres://…")]
    Url(String),
    #[error("cannot open the database")]
    Open(#[source] sqlx::Error),
    #[error("cannot migrate the database")]
    Migrate(#[source] MigrateError),
    #[error(
        "the database's tables were made by another version of Stampede (migration {0} differs); use the version that made \
         them, or a new database"
    )]
    OtherVersion(i64),
    #[error(
        "cannot create the triggers that protect the audit log; run `stampede migrate` once with an account that may create \
         triggers, or set log_bin_trust_function_creators = 1 on the server"
    )]
    Triggers(#[source] sqlx::Error),
    #[error("the database is not durable: {0}")]
    NotDurable(String),
    #[error("the database is older than this version ({0}); run `stampede migrate`")]
    Older(String),
}

impl From<MigrateError> for OpenError {
    fn from(error: MigrateError) -> Self {
        match error {
            // An applied migration differs from that of this version, or is unknown to it.
            MigrateError::VersionMismatch(version) | MigrateError::VersionMissing(version) => {
                Self::OtherVersion(version)
            }
            other => Self::Migrate(other),
        }
    }
}

/// The database of a URL. It is displayed without its password.
#[derive(Clone, PartialEq, Eq)]
pub enum Database {
    Sqlite(PathBuf),
    MySql(String),
    Postgres(String),
}

impl Database {
    pub fn parse(url: &str) -> Result<Self, OpenError> {
        let unknown = || OpenError::Url(without_password(url));
        match url.split_once(':') {
            Some(("sqlite", rest)) => {
                let path = rest.strip_prefix("//").unwrap_or(rest);
                let file = !path.is_empty() && !path.contains('?') && path != ":memory:";
                if file { Ok(Self::Sqlite(PathBuf::from(path))) } else { Err(unknown()) }
            }
            Some(("mysql" | "mariadb", rest)) if rest.starts_with("//") => Ok(Self::MySql(format!("mysql:{rest}"))),
            Some(("postgres" | "postgresql", rest)) if rest.starts_with("//") => Ok(Self::Postgres(url.to_owned())),
            _ => Err(unknown()),
        }
    }
}

/// `scheme://user:***@host/name`: without the password, also if that is a parameter.
fn without_password(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.rsplit_once('@') {
        None => url.to_owned(),
        Some((login, host)) => {
            let (scheme, login) = login.split_once(':').unwrap_or((login, ""));
            let user = login.trim_start_matches('/').split(':').next().unwrap_or_default();
            format!("{scheme}://{user}:***@{host}")
        }
    }
}

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::MySql(url) | Self::Postgres(url) => f.write_str(&without_password(url)),
        }
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a ledger writes. All processes on one database must have the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerConfig {
    /// Whether every step of an order is also written into the outbox of events, from which it is delivered.
    pub writes_events: bool,
}

/// Opens and migrates the database, and checks that its commits are durable. No events are written.
pub async fn open(database: &Database) -> Result<Stores, OpenError> {
    open_with(database, LedgerConfig::default()).await
}

/// Like [`open`], for a ledger that writes what is configured.
pub async fn open_with(database: &Database, config: LedgerConfig) -> Result<Stores, OpenError> {
    let pool = match database {
        Database::Sqlite(path) => sqlite::open(path).await?,
        Database::MySql(url) => mysql::open(url).await?,
        Database::Postgres(url) => postgres::open(url).await?,
    };
    let store = Arc::new(Store::new(pool, config));
    Ok(Stores { ledger: store.clone(), catalogue: store.clone(), accounts: store })
}

/// Opens the database for reading: nothing is written or migrated. Another schema version is an error.
pub async fn open_read_only(database: &Database) -> Result<Arc<dyn Ledger>, OpenError> {
    let pool = match database {
        Database::Sqlite(path) => sqlite::open_read_only(path).await?,
        Database::MySql(url) => mysql::open_read_only(url).await?,
        Database::Postgres(url) => postgres::open_read_only(url).await?,
    };
    Ok(Arc::new(Store::new(pool, LedgerConfig::default())))
}

/// Reads the applied migrations.
const APPLIED: &str = "SELECT version, checksum FROM _sqlx_migrations WHERE success ORDER BY version";

/// Compares the result of [`APPLIED`] with the migrations of this version.
fn check_version(applied: sqlx::Result<Vec<(i64, Vec<u8>)>>, migrator: &Migrator) -> Result<(), OpenError> {
    let applied = match applied {
        Ok(applied) => applied,
        Err(sqlx::Error::Database(error)) => {
            return Err(OpenError::Older(format!("there is no record of a migration: {error}")));
        }
        Err(error) => return Err(OpenError::Open(error)),
    };
    let expected: Vec<(i64, Vec<u8>)> =
        migrator.iter().map(|migration| (migration.version, migration.checksum.to_vec())).collect();
    if let Some((version, _)) = applied.iter().find(|migration| !expected.contains(migration)) {
        return Err(OpenError::OtherVersion(*version));
    }
    match expected.iter().find(|migration| !applied.contains(migration)) {
        Some((version, _)) => Err(OpenError::Older(format!("migration {version} is missing"))),
        None => Ok(()),
    }
}

/// The migrations in order; each has a header with the invariants that it serves.
fn migrator(migrations: &[(&'static str, &'static str)]) -> Migrator {
    let numbered = (1..).zip(migrations).map(|(version, (name, sql))| {
        Migration::new(version, (*name).into(), MigrationType::Simple, sql.into_sql_str(), false)
    });
    Migrator::with_migrations(numbered.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_shown() {
        for (url, shown) in [
            ("postgres://me:word@h/db", "postgres://me:***@h/db"),
            ("postgres://h/db?user=me&password=word", "postgres://h/db"),
            ("mysql://me:wo@word@h/db", "mysql://me:***@h/db"),
        ] {
            assert_eq!(Database::parse(url).unwrap().to_string(), shown);
        }
        for wrong in ["mysql:me:word@h/db", "mongo://me:word@h/db"] {
            let error = Database::parse(wrong).unwrap_err().to_string();
            assert!(!error.contains("word"), "{error}");
        }
    }
}

//! The truth, in SQL. A gate that forgot everything can at worst annoy; what is in here is what was sold.
//!
//! - [`open`]: the ledger behind a URL, migrated and ready
//! - `settle`: what becomes of each order of a batch, decided in Rust once for all databases
//! - `sqlite`: the embedded one, with its migrations and its longer SQL beside it

mod settle;
mod sqlite;

use std::path::PathBuf;
use std::sync::Arc;

use stampede_core::ports::{Accounts, Catalogue, Ledger, LedgerError};

pub use sqlite::Sqlite;

/// The ports of one database.
#[derive(Debug, Clone)]
pub struct Stores {
    pub ledger: Arc<dyn Ledger>,
    pub catalogue: Arc<dyn Catalogue>,
    pub accounts: Arc<dyn Accounts>,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot tell the database from {0:?}: expected sqlite:PATH")]
    Url(String),
    #[error("cannot open the database")]
    Open(#[source] sqlx::Error),
    #[error("cannot bring the database's tables up to date")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    #[error("the database does not promise durability: {0}")]
    NotDurable(String),
}

/// Which database a URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Database {
    Sqlite(PathBuf),
}

impl Database {
    pub fn parse(url: &str) -> Result<Self, OpenError> {
        let path = url.strip_prefix("sqlite:").map(|rest| rest.strip_prefix("//").unwrap_or(rest));
        match path {
            Some(path) if !path.is_empty() && !path.contains('?') && path != ":memory:" => {
                Ok(Self::Sqlite(PathBuf::from(path)))
            }
            _ => Err(OpenError::Url(url.to_owned())),
        }
    }
}

/// Opens the database, brings its tables up to date, and checks that what it commits is durable.
pub async fn open(database: &Database) -> Result<Stores, OpenError> {
    let Database::Sqlite(path) = database;
    let store = Arc::new(Sqlite::open(path).await?);
    Ok(Stores { ledger: store.clone(), catalogue: store.clone(), accounts: store })
}

/// A failed statement was surely not done; whether it is worth trying again depends on why.
fn failed(error: sqlx::Error) -> LedgerError {
    use sqlx::Error as E;
    match &error {
        E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
            LedgerError::Unavailable(error.into())
        }
        E::Database(inner) if sqlite::passes(inner.code().as_deref()) => LedgerError::Unavailable(error.into()),
        _ => LedgerError::Poison(error.into()),
    }
}

/// A failed COMMIT may have been carried out.
fn unanswered(error: sqlx::Error) -> LedgerError {
    LedgerError::Unknown(error.into())
}

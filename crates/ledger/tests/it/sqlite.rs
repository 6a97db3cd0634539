//! The suite on SQLite, and tests that apply only to SQLite.

use sqlx::Connection as _;
use stampede_core::ports::Stores;
use stampede_ledger::{Database, LedgerConfig, open, open_with};

use crate::audit::{REFUSED, REPLACE, rejects_changes};
use crate::conformance::{self, suite};

/// A database in a temporary directory, not on tmpfs.
pub struct Fresh {
    pub stores: Stores,
    folder: tempfile::TempDir,
}

impl Fresh {
    async fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { stores: reopen(&folder).await, folder }
    }

    async fn with_events() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let database = Database::Sqlite(folder.path().join("ledger.db"));
        Self { stores: open_with(&database, LedgerConfig { writes_events: true }).await.unwrap(), folder }
    }
}

async fn reopen(folder: &tempfile::TempDir) -> Stores {
    let url = format!("sqlite:{}", folder.path().join("ledger.db").display());
    open(&Database::parse(&url).unwrap()).await.unwrap()
}

suite!(Fresh::new().await, with_events: Fresh::with_events().await);

#[tokio::test]
async fn reopened_database_keeps_its_data() {
    let fresh = Fresh::new().await;
    let sale = conformance::sale_of(&fresh.stores, 2).await;
    conformance::record(&fresh.stores, sale, &[(1, 1), (2, 2)]).await;
    let before = fresh.stores.ledger.load(sale).await.unwrap();
    let again = reopen(&fresh.folder).await;
    assert_eq!(again.ledger.load(sale).await.unwrap(), before);
}

#[tokio::test]
async fn processes_agree_on_events() {
    let writing = Fresh::with_events().await;
    conformance::processes_agree_on_events(&reopen(&writing.folder).await, &writing.stores).await;
}

#[tokio::test]
async fn audit_log_rejects_changes() {
    let fresh = Fresh::new().await;
    let url = format!("sqlite:{}", fresh.folder.path().join("ledger.db").display());
    rejects_changes!(sqlx::SqliteConnection, &fresh.stores, &url, refused: REFUSED, ignored: &[REPLACE]);
}

#[tokio::test]
async fn old_orders_are_listed_from_the_index_alone() {
    let fresh = Fresh::new().await;
    let url = format!("sqlite:{}", fresh.folder.path().join("ledger.db").display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    let execute = async |sql: &'static str| _ = sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
    conformance::old_orders_are_listed_from_the_index_alone(&fresh.stores, execute).await;
}

#[tokio::test]
async fn discarded_order_with_a_row_keeps_it() {
    let fresh = Fresh::new().await;
    let url = format!("sqlite:{}", fresh.folder.path().join("ledger.db").display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    let execute = async |sql: &'static str| _ = sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
    conformance::discarded_order_with_a_row_keeps_it(&fresh.stores, execute).await;
}

#[tokio::test]
async fn ignored_rows_are_an_outage() {
    let fresh = Fresh::new().await;
    let url = format!("sqlite:{}", fresh.folder.path().join("ledger.db").display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    let ignoring = "CREATE TRIGGER ignoring BEFORE INSERT ON orders BEGIN SELECT RAISE(IGNORE); END";
    sqlx::raw_sql(ignoring).execute(&mut connection).await.unwrap();
    conformance::ignored_rows_are_an_outage(&fresh.stores).await;
}

#[test]
fn invalid_url_is_rejected() {
    for bad in ["", "sqlite:", "sqlite::memory:", "sqlite:x?mode=memory", "oracle://x", "/tmp/x.db"] {
        let error = Database::parse(bad).unwrap_err().to_string();
        assert!(error.contains("sqlite:PATH"), "{bad}: {error}");
    }
}

//! The ledger on embedded SQLite: WAL, `synchronous=FULL`, one writing connection, a few that read.
//!
//! - `record`: admitted orders into rows, a batch a transaction
//! - `orders`, `sales`: the other transactions of selling
//! - `lease`: worker numbers for the id maker
//! - `catalogue`, `accounts`: shops and people
//!
//! One connection writes, so `BEGIN IMMEDIATE` never waits for ourselves; it stands for "lock the sale's row first".

mod accounts;
mod catalogue;
mod lease;
mod orders;
mod record;
mod sales;

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{SqlSafeStr, Sqlite as Db, Transaction};
use stampede_core::ids::{Lease, WorkerId};
use stampede_core::ports::{Admitted, Created, Edited, Ledger, Loaded, Owed, Recorded, Result, SaleDraft, Stepped};
use stampede_core::{Epoch, Order, OrderId, Sale, SaleId, SaleStatus, Timestamp, UserId, failpoint};

use crate::{OpenError, failed, unanswered};

/// How long a statement waits for a lock that another process has, or for a connection of ours.
const PATIENCE: Duration = Duration::from_secs(5);
const READERS: u32 = 4;

const MIGRATIONS: [(i64, &str, &str); 2] = [
    (1, "selling", include_str!("migrations/0001_selling.sql")),
    (2, "people", include_str!("migrations/0002_people.sql")),
];

#[derive(Debug)]
pub struct Sqlite {
    writer: SqlitePool,
    readers: SqlitePool,
}

impl Sqlite {
    pub async fn open(path: &Path) -> std::result::Result<Self, OpenError> {
        let synchronous = if failpoint::planted("sync-off") { SqliteSynchronous::Off } else { SqliteSynchronous::Full };
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .busy_timeout(PATIENCE)
            .foreign_keys(true);
        let pool = || SqlitePoolOptions::new().acquire_timeout(PATIENCE).test_before_acquire(false).min_connections(1);
        let writer = pool().max_connections(1).connect_with(options.clone()).await.map_err(OpenError::Open)?;
        migrator().run(&writer).await.map_err(OpenError::Migrate)?;
        let readers =
            pool().max_connections(READERS).connect_with(options.read_only(true)).await.map_err(OpenError::Open)?;
        let store = Self { writer, readers };
        store.check_durable().await?;
        Ok(store)
    }

    /// A setting that silently did not take (a file system without WAL, say) would break the promise behind every 201.
    async fn check_durable(&self) -> std::result::Result<(), OpenError> {
        let ask = |sql: &'static str| sqlx::query_scalar(sql).fetch_one(&self.writer);
        let mode: String = ask("SELECT journal_mode FROM pragma_journal_mode").await.map_err(OpenError::Open)?;
        if mode != "wal" {
            return Err(OpenError::NotDurable(format!("journal_mode is {mode}, not wal")));
        }
        let synchronous: i64 =
            sqlx::query_scalar("PRAGMA synchronous").fetch_one(&self.writer).await.map_err(OpenError::Open)?;
        if synchronous < 2 && !failpoint::planted("sync-off") {
            return Err(OpenError::NotDurable(format!("synchronous is {synchronous}, not FULL")));
        }
        Ok(())
    }

    /// A transaction that has the write lock from its start.
    async fn begin(&self) -> Result<Transaction<'static, Db>> {
        self.writer.begin_with("BEGIN IMMEDIATE").await.map_err(failed)
    }
}

async fn commit(tx: Transaction<'static, Db>) -> Result<()> {
    tx.commit().await.map_err(unanswered)
}

fn migrator() -> Migrator {
    let migrations = MIGRATIONS
        .into_iter()
        .map(|(version, name, sql)| {
            Migration::new(version, name.into(), MigrationType::Simple, sql.into_sql_str(), false)
        })
        .collect();
    Migrator::with_migrations(migrations)
}

/// Does an error with this SQLite code pass by itself? Busy, locked, I/O error, disk full, cannot open, read-only.
pub(crate) fn passes(code: Option<&str>) -> bool {
    // The low byte is the primary code, the rest says more about it.
    let primary = code.and_then(|code| code.parse::<u32>().ok()).map(|code| code & 0xff);
    matches!(primary, Some(5 | 6 | 8 | 10 | 13 | 14))
}

#[async_trait]
impl Ledger for Sqlite {
    async fn record(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<Recorded>> {
        record::record(self, sale, epoch, batch).await
    }

    async fn quarantine(&self, sale: SaleId, admitted: Admitted, error: &str) -> Result<()> {
        record::quarantine(self, sale, admitted, error).await
    }

    async fn cancel(&self, order: OrderId, user: UserId, now: Timestamp) -> Result<Stepped> {
        orders::cancel(self, order, user, now).await
    }

    async fn owed(&self, limit: u32) -> Result<Vec<Owed>> {
        orders::owed(self, limit).await
    }

    async fn settle_owed(&self, orders: &[OrderId]) -> Result<()> {
        orders::settle_owed(self, orders).await
    }

    async fn order(&self, id: OrderId) -> Result<Option<Order>> {
        orders::order(self, id).await
    }

    async fn live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>> {
        orders::live_order(self, sale, user).await
    }

    async fn orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>> {
        orders::orders_of(self, user, before, limit).await
    }

    async fn sales(&self) -> Result<Vec<Sale>> {
        sales::sales(self).await
    }

    async fn sale(&self, id: SaleId) -> Result<Option<Sale>> {
        sales::sale(self, id).await
    }

    async fn load(&self, id: SaleId) -> Result<Option<Loaded>> {
        sales::load(self, id).await
    }

    async fn create_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<Created> {
        sales::create(self, draft, now).await
    }

    async fn set_status(&self, sale: SaleId, status: SaleStatus) -> Result<Edited> {
        sales::set_status(self, sale, status).await
    }

    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<Edited> {
        sales::top_up(self, sale, add, request_id, now).await
    }

    async fn lease_worker(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        not_before: Timestamp,
        span: Duration,
    ) -> Result<Lease> {
        lease::lease_worker(self, holder, worker, not_before, span).await
    }

    async fn return_worker(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()> {
        lease::return_worker(self, holder, worker, unused_from).await
    }

    async fn ping(&self) -> Result<()> {
        sqlx::query("SELECT 1 FROM sale LIMIT 1").execute(&self.readers).await.map_err(failed)?;
        Ok(())
    }

    async fn close(&self) {
        // The writer last: closing it takes the write-ahead log into the database file.
        self.readers.close().await;
        self.writer.close().await;
    }
}

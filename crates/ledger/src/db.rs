//! One interface to three databases: a statement, its arguments, its rows.
//!
//! Statements have a `?` for each argument, in order; for PostgreSQL they become `$1`, `$2`, …. Every call has a timeout. The meaning of a
//! failure is decided here: inside a transaction, nothing was done; a COMMIT without a reply, or a statement outside of a transaction, may
//! have been executed.

use std::future::Future;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use sqlx::{
    AssertSqlSafe, Executor as _, MySql, MySqlPool, PgPool, Postgres, Row as _, Sqlite, SqliteConnection, SqlitePool,
    Transaction,
};
use stampede_core::ports::{LedgerError, Result};
use stampede_core::{Actor, OrderStatus};

use crate::errors::{self, failed};
use crate::postgres;
use crate::sqlite::{Recorder, Writer, WriterGuard};
use crate::steps::TakenSteps;

/// How long to wait for a connection or a lock.
pub(crate) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one statement may take, including waiting for locks.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the check of a connection may take when it is returned to the pool.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a pooled connection is used. Settings of the database that apply to new sessions are in effect everywhere after this time.
pub(crate) const MAX_LIFETIME: Duration = Duration::from_secs(5 * 60);

/// What the connections of a pool are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Write,
    Read,
    /// Reading a database that must not be changed.
    Inspect,
}

/// The differences in the text of statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    MySql,
    Postgres,
}

impl Dialect {
    /// The end of a SELECT that locks its rows until the transaction ends. SQLite's write transactions lock the whole database.
    pub(crate) const fn for_update(self) -> &'static str {
        match self {
            Self::Sqlite => "",
            Self::MySql | Self::Postgres => " FOR UPDATE",
        }
    }

    /// The end of a SELECT that locks those of its rows that nobody else has locked, and returns no others.
    pub(crate) const fn for_update_skip_locked(self) -> &'static str {
        match self {
            Self::Sqlite => "",
            Self::MySql | Self::Postgres => " FOR UPDATE SKIP LOCKED",
        }
    }

    /// The end of a SELECT that keeps its rows from being changed until the transaction ends.
    pub(crate) const fn for_share(self) -> &'static str {
        match self {
            Self::Sqlite => "",
            // MariaDB does not know FOR SHARE.
            Self::MySql => " LOCK IN SHARE MODE",
            Self::Postgres => " FOR SHARE",
        }
    }

    /// The end of an INSERT that replaces the row with the same `key`.
    pub(crate) fn on_conflict_update(self, key: &str, columns: &[&str]) -> String {
        let set = |new: &dyn Fn(&str) -> String| {
            columns.iter().map(|column| format!("{column} = {}", new(column))).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Sqlite | Self::Postgres => {
                format!(" ON CONFLICT ({key}) DO UPDATE SET {}", set(&|column| format!("excluded.{column}")))
            }
            Self::MySql => format!(" ON DUPLICATE KEY UPDATE {}", set(&|column| format!("VALUES({column})"))),
        }
    }

    /// The end of an INSERT that keeps an existing row with the same `key` (one column or several). Never `INSERT IGNORE`: that stores wrong
    /// values instead of failing. On MySQL the row count does not show whether a row was inserted.
    pub(crate) fn on_conflict_do_nothing(self, key: &str) -> String {
        match self {
            Self::Sqlite | Self::Postgres => format!(" ON CONFLICT ({key}) DO NOTHING"),
            Self::MySql => {
                let column = key.split(',').next().unwrap_or(key);
                format!(" ON DUPLICATE KEY UPDATE {column} = {column}")
            }
        }
    }

    /// Bytes as a literal in a statement.
    pub(crate) fn bytes(self, bytes: &[u8; 16]) -> String {
        let hex = format!("{:032x}", u128::from_be_bytes(*bytes));
        match self {
            Self::Sqlite | Self::MySql => format!("x'{hex}'"),
            Self::Postgres => format!("'\\x{hex}'::bytea"),
        }
    }

    /// The clock of the database, in milliseconds.
    pub(crate) const fn now_ms(self) -> &'static str {
        match self {
            Self::Sqlite => "SELECT CAST(unixepoch('subsec') * 1000 AS INTEGER)",
            Self::MySql => "SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)",
            Self::Postgres => "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Pool {
    /// One transaction writes at a time, so `BEGIN IMMEDIATE` rarely waits; it replaces locking the sale's row first.
    Sqlite {
        writer: Writer,
        recorder: Recorder,
        readers: SqlitePool,
    },
    /// Recording and other writes have separate connections, so that they do not wait for readers.
    MySql {
        writer: MySqlPool,
        readers: MySqlPool,
    },
    Postgres {
        writer: PgPool,
        recorder: postgres::Recorder,
        readers: PgPool,
    },
}

pub(crate) struct Tx {
    pub connection: TxConnection,
    /// The steps of orders that are taken in it. They are counted when it is committed.
    steps: Vec<TakenSteps>,
}

pub(crate) enum TxConnection {
    Sqlite(SqliteTx),
    MySql(Transaction<'static, MySql>),
    Postgres(Transaction<'static, Postgres>),
}

/// SQLite writes through one connection and reads through a pool.
pub(crate) enum SqliteTx {
    Write(WriterGuard),
    Read(Transaction<'static, Sqlite>),
}

impl SqliteTx {
    pub(crate) fn connection(&mut self) -> sqlx::Result<&mut SqliteConnection> {
        match self {
            Self::Write(guard) => guard.connection(),
            Self::Read(tx) => Ok(&mut **tx),
        }
    }
}

pub(crate) enum Row {
    Sqlite(sqlx::sqlite::SqliteRow),
    MySql(sqlx::mysql::MySqlRow),
    Postgres(sqlx::postgres::PgRow),
}

/// One argument of a statement.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg<'a> {
    Int(i64),
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl From<i64> for Arg<'_> {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<u32> for Arg<'_> {
    fn from(value: u32) -> Self {
        Self::Int(value.into())
    }
}

impl From<u16> for Arg<'_> {
    fn from(value: u16) -> Self {
        Self::Int(value.into())
    }
}

impl<'a> From<&'a str> for Arg<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(value)
    }
}

impl<'a> From<&'a [u8]> for Arg<'a> {
    fn from(value: &'a [u8]) -> Self {
        Self::Bytes(value)
    }
}

/// `args![a, b, c]`: arguments of any supported type.
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::db::Arg::from($value)),*] };
}
pub(crate) use args;

macro_rules! bind_args {
    ($sql:expr, $args:expr) => {{
        let mut query = sqlx::query(AssertSqlSafe($sql));
        for arg in $args {
            query = match *arg {
                Arg::Int(value) => query.bind(value),
                Arg::Text(value) => query.bind(value),
                Arg::Bytes(value) => query.bind(value),
            };
        }
        query
    }};
}

/// Converts `?, ?` to PostgreSQL's `$1, $2`. No statement contains a question mark in a string.
fn to_pg_placeholders(sql: &str) -> String {
    let mut numbered = String::with_capacity(sql.len() + 16);
    for (n, part) in sql.split('?').enumerate() {
        if n > 0 {
            numbered.push_str(&format!("${n}"));
        }
        numbered.push_str(part);
    }
    numbered
}

pub(crate) async fn with_timeout<T>(call: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    match tokio::time::timeout(STATEMENT_TIMEOUT, call).await {
        Ok(done) => done,
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

impl Pool {
    pub(crate) const fn dialect(&self) -> Dialect {
        match self {
            Self::Sqlite { .. } => Dialect::Sqlite,
            Self::MySql { .. } => Dialect::MySql,
            Self::Postgres { .. } => Dialect::Postgres,
        }
    }

    /// A transaction that may write.
    pub(crate) async fn begin(&self) -> Result<Tx> {
        let begun = match self {
            Self::Sqlite { writer, .. } => begin_immediate(writer).await.map(TxConnection::Sqlite),
            Self::MySql { writer, .. } => with_timeout(writer.begin()).await.map(TxConnection::MySql),
            Self::Postgres { writer, .. } => with_timeout(writer.begin()).await.map(TxConnection::Postgres),
        };
        begun.map(Tx::new).map_err(errors::not_begun)
    }

    /// A read-only transaction with one snapshot.
    pub(crate) async fn snapshot(&self) -> Result<Tx> {
        let begun = match self {
            Self::Sqlite { readers, .. } => {
                with_timeout(readers.begin()).await.map(|tx| TxConnection::Sqlite(SqliteTx::Read(tx)))
            }
            Self::MySql { readers, .. } => {
                // The level applies only to the next transaction of the connection.
                let begin = async {
                    let mut connection = readers.acquire().await?;
                    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?;
                    Transaction::begin(connection, None).await
                };
                with_timeout(begin).await.map(TxConnection::MySql)
            }
            Self::Postgres { readers, .. } => {
                with_timeout(readers.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
                    .await
                    .map(TxConnection::Postgres)
            }
        };
        begun.map(Tx::new).map_err(errors::not_begun)
    }

    /// One statement with autocommit. It may have been executed although it failed, so it must be repeatable.
    pub(crate) async fn execute(&self, sql: &str, args: &[Arg<'_>]) -> Result<()> {
        let done = match self {
            Self::Sqlite { writer, .. } => match writer.lock().await {
                Ok(mut guard) => {
                    let done =
                        with_timeout(async { bind_args!(sql.to_owned(), args).execute(guard.connection()?).await })
                            .await;
                    done.map(|_| guard.done())
                }
                Err(error) => Err(error),
            },
            Self::MySql { writer, .. } => {
                with_timeout(bind_args!(sql.to_owned(), args).execute(writer)).await.map(|_| ())
            }
            Self::Postgres { writer, .. } => {
                with_timeout(bind_args!(to_pg_placeholders(sql), args).execute(writer)).await.map(|_| ())
            }
        };
        done.map_err(errors::classify_autocommit)
    }

    pub(crate) async fn rows(&self, sql: &str, args: &[Arg<'_>]) -> Result<Vec<Row>> {
        let rows = match self {
            Self::Sqlite { readers, .. } => {
                with_timeout(bind_args!(sql.to_owned(), args).fetch_all(readers)).await.map(wrap_rows(Row::Sqlite))
            }
            Self::MySql { readers, .. } => {
                with_timeout(bind_args!(sql.to_owned(), args).fetch_all(readers)).await.map(wrap_rows(Row::MySql))
            }
            Self::Postgres { readers, .. } => {
                with_timeout(bind_args!(to_pg_placeholders(sql), args).fetch_all(readers))
                    .await
                    .map(wrap_rows(Row::Postgres))
            }
        };
        rows.map_err(failed)
    }

    /// The first row, if there is one.
    pub(crate) async fn row(&self, sql: &str, args: &[Arg<'_>]) -> Result<Option<Row>> {
        Ok(self.rows(sql, args).await?.into_iter().next())
    }

    pub(crate) async fn close(&self) {
        match self {
            Self::Sqlite { writer, recorder, readers } => {
                // The writer is closed last, because that checkpoints the write-ahead log.
                readers.close().await;
                writer.reject();
                recorder.close().await;
                writer.close().await;
            }
            Self::MySql { writer, readers } => {
                readers.close().await;
                writer.close().await;
            }
            Self::Postgres { writer, recorder, readers } => {
                readers.close().await;
                recorder.close();
                writer.close().await;
            }
        }
    }
}

async fn begin_immediate(writer: &Writer) -> sqlx::Result<SqliteTx> {
    let mut guard = writer.lock().await?;
    with_timeout(async { guard.connection()?.execute("BEGIN IMMEDIATE").await }).await?;
    Ok(SqliteTx::Write(guard))
}

/// Not as many rows were written as there should be: the transaction must be rolled back.
pub(crate) fn expect_rows(expected: u64, affected: u64) -> Result<()> {
    if affected == expected {
        return Ok(());
    }
    Err(LedgerError::Unavailable(format!("the database wrote {affected} rows instead of {expected}").into()))
}

fn wrap_rows<R>(wrap: fn(R) -> Row) -> impl Fn(Vec<R>) -> Vec<Row> {
    move |rows| rows.into_iter().map(wrap).collect()
}

impl Tx {
    const fn new(connection: TxConnection) -> Self {
        Self { connection, steps: Vec::new() }
    }

    /// Notes steps of orders that are taken in this transaction.
    pub(crate) fn add_steps(&mut self, to: OrderStatus, by: Actor, orders: u64) {
        match self.steps.last_mut() {
            Some(last) if (last.to, last.by) == (to, by) => last.orders += orders,
            _ => self.steps.push(TakenSteps { to, by, orders }),
        }
    }

    /// Like [`execute`](Self::execute), for a statement that must affect exactly this many rows. A trigger could ignore some of them without an
    /// error.
    pub(crate) async fn execute_on(&mut self, rows: u64, sql: &str, args: &[Arg<'_>]) -> Result<()> {
        expect_rows(rows, self.execute(sql, args).await?)
    }

    /// Returns the number of affected rows.
    pub(crate) async fn execute(&mut self, sql: &str, args: &[Arg<'_>]) -> Result<u64> {
        let done = match &mut self.connection {
            TxConnection::Sqlite(tx) => {
                with_timeout(async { bind_args!(sql.to_owned(), args).execute(tx.connection()?).await })
                    .await
                    .map(|done| done.rows_affected())
            }
            TxConnection::MySql(tx) => {
                with_timeout(bind_args!(sql.to_owned(), args).execute(&mut **tx)).await.map(|done| done.rows_affected())
            }
            TxConnection::Postgres(tx) => with_timeout(bind_args!(to_pg_placeholders(sql), args).execute(&mut **tx))
                .await
                .map(|done| done.rows_affected()),
        };
        done.map_err(failed)
    }

    /// An insert whose key may exist: returns `false` then, and the transaction must be rolled back.
    pub(crate) async fn insert_new(&mut self, sql: &str, args: &[Arg<'_>]) -> Result<bool> {
        let done = match &mut self.connection {
            TxConnection::Sqlite(tx) => {
                with_timeout(async { bind_args!(sql.to_owned(), args).execute(tx.connection()?).await })
                    .await
                    .map(|_| ())
            }
            TxConnection::MySql(tx) => {
                with_timeout(bind_args!(sql.to_owned(), args).execute(&mut **tx)).await.map(|_| ())
            }
            TxConnection::Postgres(tx) => {
                with_timeout(bind_args!(to_pg_placeholders(sql), args).execute(&mut **tx)).await.map(|_| ())
            }
        };
        match done {
            Ok(()) => Ok(true),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    pub(crate) async fn rows(&mut self, sql: &str, args: &[Arg<'_>]) -> Result<Vec<Row>> {
        let rows = match &mut self.connection {
            TxConnection::Sqlite(tx) => {
                with_timeout(async { bind_args!(sql.to_owned(), args).fetch_all(tx.connection()?).await })
                    .await
                    .map(wrap_rows(Row::Sqlite))
            }
            TxConnection::MySql(tx) => {
                with_timeout(bind_args!(sql.to_owned(), args).fetch_all(&mut **tx)).await.map(wrap_rows(Row::MySql))
            }
            TxConnection::Postgres(tx) => with_timeout(bind_args!(to_pg_placeholders(sql), args).fetch_all(&mut **tx))
                .await
                .map(wrap_rows(Row::Postgres)),
        };
        rows.map_err(failed)
    }

    /// The first row, if there is one.
    pub(crate) async fn row(&mut self, sql: &str, args: &[Arg<'_>]) -> Result<Option<Row>> {
        Ok(self.rows(sql, args).await?.into_iter().next())
    }

    /// A statement whose text differs each time, so that preparing it has no use. It contains only numbers and constant words.
    pub(crate) async fn execute_text(&mut self, sql: String) -> Result<u64> {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        let done = match &mut self.connection {
            TxConnection::Sqlite(tx) => {
                with_timeout(async { sql.execute(tx.connection()?).await }).await.map(|done| done.rows_affected())
            }
            TxConnection::MySql(tx) => with_timeout(sql.execute(&mut **tx)).await.map(|done| done.rows_affected()),
            TxConnection::Postgres(tx) => with_timeout(sql.execute(&mut **tx)).await.map(|done| done.rows_affected()),
        };
        done.map_err(failed)
    }

    /// Like [`execute_text`](Self::execute_text), for a query.
    pub(crate) async fn rows_text(&mut self, sql: String) -> Result<Vec<Row>> {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        let rows = match &mut self.connection {
            TxConnection::Sqlite(tx) => {
                with_timeout(async { sql.fetch_all(tx.connection()?).await }).await.map(wrap_rows(Row::Sqlite))
            }
            TxConnection::MySql(tx) => with_timeout(sql.fetch_all(&mut **tx)).await.map(wrap_rows(Row::MySql)),
            TxConnection::Postgres(tx) => with_timeout(sql.fetch_all(&mut **tx)).await.map(wrap_rows(Row::Postgres)),
        };
        rows.map_err(failed)
    }

    /// Streams rows of two numbers, for long results.
    pub(crate) async fn pairs(&mut self, sql: &str, args: &[Arg<'_>], into: &mut Vec<(i64, i64)>) -> Result<()> {
        macro_rules! read {
            ($connection:expr, $sql:expr) => {{
                let mut rows = bind_args!($sql, args).fetch($connection);
                while let Some(row) = with_timeout(rows.try_next()).await.map_err(failed)? {
                    into.push((row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?));
                }
            }};
        }
        match &mut self.connection {
            TxConnection::Sqlite(tx) => read!(tx.connection().map_err(failed)?, sql.to_owned()),
            TxConnection::MySql(tx) => read!(&mut **tx, sql.to_owned()),
            TxConnection::Postgres(tx) => read!(&mut **tx, to_pg_placeholders(sql)),
        }
        Ok(())
    }

    pub(crate) async fn commit(self) -> Result<()> {
        let done = match self.connection {
            TxConnection::Sqlite(SqliteTx::Write(guard)) => guard.end("COMMIT").await,
            TxConnection::Sqlite(SqliteTx::Read(tx)) => with_timeout(tx.commit()).await,
            TxConnection::MySql(tx) => with_timeout(tx.commit()).await,
            TxConnection::Postgres(tx) => with_timeout(tx.commit()).await,
        };
        done.map_err(|error| LedgerError::Unknown(error.into()))?;
        self.steps.into_iter().for_each(TakenSteps::count);
        Ok(())
    }

    /// Explicit, because MariaDB rolls back only the last statement on a lock timeout.
    pub(crate) async fn roll_back(self) -> Result<()> {
        let done = match self.connection {
            TxConnection::Sqlite(SqliteTx::Write(guard)) => guard.end("ROLLBACK").await,
            TxConnection::Sqlite(SqliteTx::Read(tx)) => with_timeout(tx.rollback()).await,
            TxConnection::MySql(tx) => with_timeout(tx.rollback()).await,
            TxConnection::Postgres(tx) => with_timeout(tx.rollback()).await,
        };
        done.map_err(failed)
    }
}

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {
        impl Row {
            $($(#[$doc])* pub(crate) fn $name(&self, column: usize) -> Result<$type> {
                let value = match self {
                    Self::Sqlite(row) => row.try_get(column),
                    Self::MySql(row) => row.try_get(column),
                    Self::Postgres(row) => row.try_get(column),
                };
                value.map_err(failed)
            })*
        }
    };
}

getters! {
    int: i64,
    /// `None` for NULL.
    maybe_int: Option<i64>,
    text: String,
    /// `None` for NULL.
    maybe_text: Option<String>,
    bytes: Vec<u8>,
}

/// Ends the transaction of a connection that is returned to the pool. `roll_back` sends a ROLLBACK, and returns whether the pool may keep the
/// connection.
///
/// A connection whose caller went away while a transaction was being begun is inside of it without sqlx knowing: every later reader would
/// see its snapshot. And one that is returned while a reply is outstanding must not occupy the pool forever. A connection for writing that
/// was opened while the database was read-only stays read-only afterwards, so it is closed.
pub(crate) async fn check_released(roll_back: impl Future<Output = sqlx::Result<bool>>) -> sqlx::Result<bool> {
    match tokio::time::timeout(RELEASE_TIMEOUT, roll_back).await {
        Ok(keep) => keep,
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

//! The connection that writes everything except new orders, and the lock that every write needs. It is not part of a pool: it is not checked
//! before and after each use, and it is closed if a transaction does not end cleanly, so that nothing of it remains.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, SqliteConnection};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::db::{ACQUIRE_TIMEOUT, with_timeout};

#[derive(Clone)]
pub(crate) struct Writer {
    options: Arc<SqliteConnectOptions>,
    /// `None` after a failure, until the next use.
    connection: Arc<Mutex<Option<SqliteConnection>>>,
    closed: Arc<AtomicBool>,
}

/// Exclusive use of the connection for one transaction.
pub(crate) struct WriterGuard {
    connection: OwnedMutexGuard<Option<SqliteConnection>>,
    /// The transaction has not ended cleanly yet.
    in_transaction: bool,
}

impl Writer {
    pub(crate) fn new(options: SqliteConnectOptions, connection: SqliteConnection) -> Self {
        // The file exists. If it was moved, reconnecting fails instead of creating an empty database.
        let options = Arc::new(options.create_if_missing(false));
        Self { options, connection: Arc::new(Mutex::new(Some(connection))), closed: Arc::default() }
    }

    /// Waits for the connection and opens it again after a failure.
    pub(crate) async fn lock(&self) -> sqlx::Result<WriterGuard> {
        let waiting = tokio::time::timeout(ACQUIRE_TIMEOUT, self.connection.clone().lock_owned());
        let mut connection = waiting.await.map_err(|_| sqlx::Error::PoolTimedOut)?;
        if self.closed.load(Ordering::SeqCst) {
            return Err(sqlx::Error::PoolClosed);
        }
        if connection.is_none() {
            *connection = Some(with_timeout(self.options.connect()).await?);
        }
        Ok(WriterGuard { connection, in_transaction: true })
    }

    /// Rejects further writes.
    pub(crate) fn reject(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Closes the connection, which checkpoints the write-ahead log.
    pub(crate) async fn close(&self) {
        self.reject();
        if let Some(connection) = self.connection.lock().await.take()
            && let Err(error) = connection.close().await
        {
            tracing::warn!(%error, "the database was not closed cleanly");
        }
    }
}

impl WriterGuard {
    pub(crate) fn connection(&mut self) -> sqlx::Result<&mut SqliteConnection> {
        self.connection.as_mut().ok_or(sqlx::Error::WorkerCrashed)
    }

    /// Ends the transaction with this statement. If that fails, the connection is closed, which rolls the transaction back.
    pub(crate) async fn end(mut self, with: &'static str) -> sqlx::Result<()> {
        with_timeout(async { self.connection()?.execute(with).await }).await?;
        // sqlx reports no error if its thread dies during the statement; a successful ping shows that it has ended.
        with_timeout(async { self.connection()?.ping().await }).await?;
        self.done();
        Ok(())
    }

    /// Marks the transaction as ended.
    pub(crate) fn done(mut self) {
        self.in_transaction = false;
    }
}

impl Drop for WriterGuard {
    fn drop(&mut self) {
        if self.in_transaction {
            *self.connection = None;
        }
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Writer")
    }
}

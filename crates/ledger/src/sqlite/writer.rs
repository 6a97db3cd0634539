//! The connection that writes everything but new orders, and the turn that whoever writes must have. It is ours, not a pool's: no checks
//! on the way in and out, and a transaction that is not ended well takes its connection with it, so that nothing of it can stay behind.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, SqliteConnection};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::db::{PATIENCE, with_timeout};

#[derive(Clone)]
pub(crate) struct Writer {
    options: Arc<SqliteConnectOptions>,
    /// `None` after a failure, until the next one needs it.
    place: Arc<Mutex<Option<SqliteConnection>>>,
    closed: Arc<AtomicBool>,
}

/// The connection, for as long as one transaction takes.
pub(crate) struct WriterGuard {
    place: OwnedMutexGuard<Option<SqliteConnection>>,
    /// Not ended well so far.
    doubtful: bool,
}

impl Writer {
    pub(crate) fn new(options: SqliteConnectOptions, connection: SqliteConnection) -> Self {
        // It is there: if it is not when we connect again, somebody has moved it, and an empty one in its place would be worse.
        let options = Arc::new(options.create_if_missing(false));
        Self { options, place: Arc::new(Mutex::new(Some(connection))), closed: Arc::default() }
    }

    /// Waits for the connection, and makes it anew if need be.
    pub(crate) async fn take(&self) -> sqlx::Result<WriterGuard> {
        let waiting = tokio::time::timeout(PATIENCE, self.place.clone().lock_owned());
        let mut place = waiting.await.map_err(|_| sqlx::Error::PoolTimedOut)?;
        if self.closed.load(Ordering::SeqCst) {
            return Err(sqlx::Error::PoolClosed);
        }
        if place.is_none() {
            *place = Some(with_timeout(self.options.connect()).await?);
        }
        Ok(WriterGuard { place, doubtful: true })
    }

    /// Nobody gets a turn any more.
    pub(crate) fn refuse(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Lets go of the connection; what is in the log goes into the database file.
    pub(crate) async fn close(&self) {
        self.refuse();
        if let Some(connection) = self.place.lock().await.take()
            && let Err(error) = connection.close().await
        {
            tracing::warn!(%error, "the database was not closed well");
        }
    }
}

impl WriterGuard {
    pub(crate) fn connection(&mut self) -> sqlx::Result<&mut SqliteConnection> {
        self.place.as_mut().ok_or(sqlx::Error::WorkerCrashed)
    }

    /// Ends the transaction with this statement. If that fails, the connection goes, and what was not committed with it.
    pub(crate) async fn end(mut self, with: &'static str) -> sqlx::Result<()> {
        with_timeout(async { self.connection()?.execute(with).await }).await?;
        // A thread that died in the middle shows as an end without an error; one that answers has done it.
        with_timeout(async { self.connection()?.ping().await }).await?;
        self.done();
        Ok(())
    }

    /// Nothing is left open on the connection.
    pub(crate) fn done(mut self) {
        self.doubtful = false;
    }
}

impl Drop for WriterGuard {
    fn drop(&mut self) {
        if self.doubtful {
            *self.place = None;
        }
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Writer")
    }
}

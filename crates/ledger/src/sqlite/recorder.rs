//! The thread that records orders. A batch is one message in and one out; between them nobody else is woken.
//!
//! It has a connection of its own beside the [`Writer`](super::Writer)'s, and records in the writer's turn, so that neither waits for the
//! other inside SQLite. Only a batch that takes too long loses its turn while it is under way. That is safe, because there is one thread and
//! one line: whoever repeats the batch comes after it, and finds what became of it.

use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _, params};
use stampede_core::ports::{Admitted, LedgerError, Result};
use stampede_core::{Epoch, SaleId, failpoint};
use tokio::sync::{mpsc, oneshot};

use super::{SETTINGS, synchronous};
use crate::db::{PATIENCE, STATEMENT_TIMEOUT};
use crate::errors::{is_taken, sqlite_failed, sqlite_not_begun};

/// Makes room for the batch.
const ROOM: &str = "\
    UPDATE sale SET sold = sold + ?1 WHERE id = ?2 AND epoch = ?3 AND sold + ?1 <= total AND orders_indexed_to < 0
    AND NOT EXISTS (SELECT 1 FROM quarantine WHERE quarantine.sale_id = sale.id)";

/// One row at a time: an insert of many would make SQLite remember how to undo it alone, which costs as much as doing it.
const INSERT: &str = "\
    INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at)
    VALUES (?1, ?2, ?3, 1, 'unpaid', ?4, ?5, ?6, ?7, ?7)";

type Failure = Box<dyn Error + Send + Sync>;

/// Admitted orders of one sale.
struct Batch {
    sale: SaleId,
    epoch: Epoch,
    orders: Vec<Admitted>,
}

enum Job {
    Record(Batch, oneshot::Sender<Result<bool>>),
    Close(oneshot::Sender<()>),
}

#[derive(Clone)]
pub(crate) struct Recorder {
    jobs: mpsc::Sender<Job>,
}

impl Recorder {
    pub(crate) fn start(path: &Path) -> std::result::Result<Self, Failure> {
        let connection = open(path)?;
        let (jobs, todo) = mpsc::channel(1);
        let path = path.to_owned();
        std::thread::Builder::new().name("recorder".to_owned()).spawn(move || work(connection, &path, todo))?;
        Ok(Self { jobs })
    }

    /// For a database that is only read: it records nothing.
    pub(crate) fn closed() -> Self {
        Self { jobs: mpsc::channel(1).0 }
    }

    /// All of them, in one transaction. `false` if there was no room for all or one was in the way; then nothing was done.
    pub(crate) async fn record(&self, sale: SaleId, epoch: Epoch, mut orders: Vec<Admitted>) -> Result<bool> {
        // By id, so that rows go in one beside the other.
        orders.sort_unstable_by_key(|item| item.order);
        let (reply, answer) = oneshot::channel();
        let doing = async {
            let sent = self.jobs.send(Job::Record(Batch { sale, epoch, orders }, reply)).await;
            sent.map_err(|_| LedgerError::Unavailable("the recorder is closed".into()))?;
            answer.await.unwrap_or_else(|_| Err(LedgerError::Unknown("the recorder did not say".into())))
        };
        let done = tokio::time::timeout(STATEMENT_TIMEOUT, doing).await;
        done.unwrap_or_else(|_| Err(LedgerError::Unknown("the recorder did not answer in time".into())))
    }

    /// Lets go of the connection, for good.
    pub(crate) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.jobs.send(Job::Close(done)).await.is_ok() {
            // An end without a word is an end, too.
            let _ = closed.await;
        }
    }
}

fn work(connection: Connection, path: &Path, mut todo: mpsc::Receiver<Job>) {
    let mut connection = Some(connection);
    while let Some(job) = todo.blocking_recv() {
        match job {
            Job::Record(batch, reply) => {
                let done = catch_unwind(AssertUnwindSafe(|| record(&mut connection, path, &batch)));
                // A transaction that was not ended well takes its connection with it, so that nothing of it can stay behind.
                if !matches!(done, Ok(Ok(_))) {
                    connection = None;
                }
                // After a panic nobody is answered, and that is the answer. Who has gone does not want one.
                let _ = done.map(|done| reply.send(done));
            }
            Job::Close(done) => {
                drop(connection);
                // Whoever asked may have gone.
                let _ = done.send(());
                return;
            }
        }
    }
}

fn record(connection: &mut Option<Connection>, path: &Path, batch: &Batch) -> Result<bool> {
    let connection = match connection {
        Some(connection) => connection,
        None => connection.insert(open(path).map_err(LedgerError::Unavailable)?),
    };
    run(connection, "BEGIN IMMEDIATE").map_err(sqlite_not_begun)?;
    let all_in = match insert(connection, batch) {
        Err(error) if is_taken(&error) => false,
        done => done.map_err(sqlite_failed)?,
    };
    if all_in {
        failpoint::hit("record.inserted");
        run(connection, "COMMIT").map_err(|error| LedgerError::Unknown(error.into()))?;
    } else {
        run(connection, "ROLLBACK").map_err(sqlite_failed)?;
    }
    Ok(all_in)
}

/// `false` if there is no room for all.
fn insert(connection: &Connection, batch: &Batch) -> rusqlite::Result<bool> {
    let Batch { sale, epoch, orders } = batch;
    let count = i64::try_from(orders.len()).unwrap_or(i64::MAX);
    if connection.prepare_cached(ROOM)?.execute(params![count, sale.get(), epoch.0])? == 0 {
        return Ok(false);
    }
    let mut price = connection.prepare_cached("SELECT price_cents FROM sale WHERE id = ?1")?;
    let Some(price) = price.query_row([sale.get()], |row| row.get::<_, i64>(0)).optional()? else { return Ok(false) };
    let mut insert = connection.prepare_cached(INSERT)?;
    for Admitted { order, user, seq, at } in orders {
        insert.execute(params![order.get(), sale.get(), user.get(), epoch.0, seq, price, at.ms()])?;
    }
    Ok(true)
}

fn run(connection: &Connection, statement: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(statement)?.execute([]).map(drop)
}

fn open(path: &Path) -> std::result::Result<Connection, Failure> {
    // It is there: if it is not any more, somebody has moved it, and an empty one in its place would be worse.
    let connection =
        Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.busy_timeout(PATIENCE)?;
    for (name, value) in SETTINGS {
        connection.pragma_update(None, name, value)?;
    }
    connection.pragma_update(None, "synchronous", synchronous())?;
    // A setting that silently did not take would break the promise behind every 201.
    let mode: String = connection.pragma_query_value(None, "journal_mode", |row| row.get(0))?;
    let level: i64 = connection.pragma_query_value(None, "synchronous", |row| row.get(0))?;
    if mode != "wal" || level != synchronous() {
        return Err(format!("journal_mode is {mode} and synchronous {level}: not durable").into());
    }
    Ok(connection)
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recorder")
    }
}

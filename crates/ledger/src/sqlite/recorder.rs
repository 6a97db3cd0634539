//! The thread that records orders. A batch is one message to the thread and one back, so that no other thread is woken in between.
//!
//! It has a separate connection and records while its caller holds the [`WriterGuard`](super::WriterGuard), so that the two connections do
//! not wait for each other inside SQLite. If a batch times out, the guard is released while the batch still runs. That is safe: there is one
//! thread and one queue, so a repeated batch runs after it and finds its result.

use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use rusqlite::{Connection, OpenFlags, OptionalExtension as _, params};
use stampede_core::ports::{Admitted, LedgerError, Result};
use stampede_core::{Epoch, SaleId, failpoint};
use tokio::sync::{mpsc, oneshot};

use super::{SETTINGS, synchronous};
use crate::db::{ACQUIRE_TIMEOUT, STATEMENT_TIMEOUT};
use crate::errors::{is_duplicate_key, sqlite_failed, sqlite_not_begun};
use crate::store::json_ids;

/// Reserves stock for the batch.
const RESERVE_STOCK: &str = "\
    UPDATE sale SET sold = sold + ?1 WHERE id = ?2 AND epoch = ?3 AND sold + ?1 <= total AND orders_indexed_to < 0 AND buy_again = 1
    AND NOT EXISTS (SELECT 1 FROM quarantine WHERE quarantine.sale_id = sale.id)";

/// One row per statement: for a multi-row insert SQLite keeps a statement journal, which costs as much as the insert.
const INSERT: &str = "\
    INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at, pay_by)
    VALUES (?1, ?2, ?3, 1, 'unpaid', ?4, ?5, ?6, ?7, ?7, ?8)";

/// Price, and until when the orders of a batch must be paid whose last one was admitted at ?2.
const TERMS: &str = "\
    SELECT price_cents, CASE WHEN payment_deadline_ms > 0
        THEN MAX(?2, CAST(unixepoch('subsec') * 1000 AS INTEGER)) + payment_deadline_ms END FROM sale WHERE id = ?1";

const INSERT_DUE: &str =
    "INSERT INTO payment_due (due_at, first_order, last_order, sale_id, orders) VALUES (?1, ?2, ?3, ?4, ?5)";

const INSERT_EVENTS: &str = "INSERT INTO event_outbox (sale_id, orders) VALUES (?1, ?2)";

type Failure = Box<dyn Error + Send + Sync>;

/// Admitted orders of one sale.
struct Batch {
    sale: SaleId,
    epoch: Epoch,
    orders: Vec<Admitted>,
    /// Whether the batch is also written into the outbox of events.
    events: bool,
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
        let (jobs, receiver) = mpsc::channel(1);
        let path = path.to_owned();
        std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || run_thread(connection, &path, receiver))?;
        Ok(Self { jobs })
    }

    /// For a read-only database: it records nothing.
    pub(crate) fn closed() -> Self {
        Self { jobs: mpsc::channel(1).0 }
    }

    /// Records the batch in one transaction. Returns `false`, with nothing done, if there is not enough stock or a key exists.
    pub(crate) async fn record(
        &self,
        sale: SaleId,
        epoch: Epoch,
        mut orders: Vec<Admitted>,
        events: bool,
    ) -> Result<bool> {
        // Sorted by id, so that the rows are adjacent.
        orders.sort_unstable_by_key(|item| item.order);
        let (reply, answer) = oneshot::channel();
        let doing = async {
            let sent = self.jobs.send(Job::Record(Batch { sale, epoch, orders, events }, reply)).await;
            sent.map_err(|_| LedgerError::Unavailable("the recorder is closed".into()))?;
            answer.await.unwrap_or_else(|_| Err(LedgerError::Unknown("the recorder has ended".into())))
        };
        let done = tokio::time::timeout(STATEMENT_TIMEOUT, doing).await;
        done.unwrap_or_else(|_| Err(LedgerError::Unknown("the recorder timed out".into())))
    }

    /// Closes the connection.
    pub(crate) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.jobs.send(Job::Close(done)).await.is_ok() {
            // An error means that the thread has ended.
            let _ = closed.await;
        }
    }
}

fn run_thread(connection: Connection, path: &Path, mut jobs: mpsc::Receiver<Job>) {
    let mut connection = Some(connection);
    while let Some(job) = jobs.blocking_recv() {
        match job {
            Job::Record(batch, reply) => {
                let done = catch_unwind(AssertUnwindSafe(|| record(&mut connection, path, &batch)));
                // The connection is closed if the transaction did not end cleanly, so that nothing of it remains.
                if !matches!(done, Ok(Ok(_))) {
                    connection = None;
                }
                // After a panic there is no reply, which the caller sees as an error. The caller may have been dropped.
                let _ = done.map(|done| reply.send(done));
            }
            Job::Close(done) => {
                drop(connection);
                // The caller may have been dropped.
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
    let inserted = match insert(connection, batch) {
        Err(error) if is_duplicate_key(&error) => false,
        done => done.map_err(sqlite_failed)?,
    };
    if inserted {
        failpoint::hit("record.inserted");
        run(connection, "COMMIT").map_err(|error| LedgerError::Unknown(error.into()))?;
    } else {
        run(connection, "ROLLBACK").map_err(sqlite_failed)?;
    }
    Ok(inserted)
}

/// Returns `false` if there is not enough stock, or if a row was not inserted.
fn insert(connection: &Connection, batch: &Batch) -> rusqlite::Result<bool> {
    let Batch { sale, epoch, orders, events } = batch;
    let count = i64::try_from(orders.len()).unwrap_or(i64::MAX);
    if connection.prepare_cached(RESERVE_STOCK)?.execute(params![count, sale.get(), epoch.0])? == 0 {
        return Ok(false);
    }
    let (Some(first), Some(last), Some(at)) = (orders.first(), orders.last(), orders.iter().map(|item| item.at).max())
    else {
        return Ok(false);
    };
    let mut terms = connection.prepare_cached(TERMS)?;
    let terms =
        terms.query_row([sale.get(), at.ms()], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, Option<i64>>(1)?)));
    let Some((price, pay_by)) = terms.optional()? else { return Ok(false) };
    if let Some(pay_by) = pay_by {
        let due = params![pay_by, first.order.get(), last.order.get(), sale.get(), count];
        if connection.prepare_cached(INSERT_DUE)?.execute(due)? != 1 {
            return Ok(false);
        }
    }
    if *events {
        let ids = json_ids(orders.iter().map(|item| item.order));
        if connection.prepare_cached(INSERT_EVENTS)?.execute(params![sale.get(), ids])? != 1 {
            return Ok(false);
        }
    }
    let mut insert = connection.prepare_cached(INSERT)?;
    for Admitted { order, user, seq, at } in orders {
        if insert.execute(params![order.get(), sale.get(), user.get(), epoch.0, seq, price, at.ms(), pay_by])? != 1 {
            return Ok(false);
        }
    }
    Ok(true)
}

fn run(connection: &Connection, statement: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(statement)?.execute([]).map(drop)
}

fn open(path: &Path) -> std::result::Result<Connection, Failure> {
    // The file exists. If it was moved, opening fails instead of creating an empty database.
    let connection =
        Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.busy_timeout(ACQUIRE_TIMEOUT)?;
    for (name, value) in SETTINGS {
        connection.pragma_update(None, name, value)?;
    }
    connection.pragma_update(None, "synchronous", synchronous())?;
    // Checks that the settings are in effect: otherwise a 201 would not be durable.
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

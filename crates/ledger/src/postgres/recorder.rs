//! Records a batch with one statement outside of a transaction: one round trip.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join;
use parking_lot::Mutex;
use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres};
use stampede_core::ports::{Admitted, Result};
use stampede_core::{Epoch, SaleId, failpoint};

use crate::db::{MAX_LIFETIME, with_timeout};
use crate::errors::{classify_autocommit, not_begun};

/// Connections that are not returned to the pool, which would check them before and after every batch.
const MAX_IDLE: usize = 4;

/// Reserves stock and inserts the orders, with a row for the batch in `payment_due` if they must be paid in time, or does nothing. The sale's
/// row is locked first, as by every transaction that changes `sold`. A sale with orders in quarantine or in the index by user, or in which nobody may
/// buy again, takes the slow path, which reads what is needed. Fewer rows than orders are an error, so that nothing is committed: a trigger may have suppressed them.
macro_rules! record {
    ($more:literal) => {
        concat!(
            "\
    WITH room AS (
        UPDATE sale SET sold = sold + $1 WHERE id = $2 AND epoch = $3 AND sold + $1 <= total AND orders_indexed_to < 0 AND buy_again = 1
            AND NOT EXISTS (SELECT 1 FROM quarantine WHERE quarantine.sale_id = sale.id)
        RETURNING price_cents, CASE WHEN payment_deadline_ms > 0 THEN payment_deadline_ms
            + GREATEST($8::bigint, CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)) END AS pay_by
    ), due AS (
        INSERT INTO payment_due (due_at, first_order, last_order, sale_id, orders)
        SELECT pay_by, $9::bigint, $10::bigint, $2, $1 FROM room WHERE pay_by IS NOT NULL
    ), ",
            $more,
            "inserted AS (
        INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at, pay_by)
        SELECT o.id, $2, o.user_id, 1, 'unpaid', $3, o.seq, room.price_cents, o.at, o.at, room.pay_by
        FROM UNNEST($4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]) AS o (id, user_id, seq, at), room
        RETURNING 1
    )
    SELECT room.count, 1 / (CASE WHEN inserted.count = room.count * $1 THEN 1 ELSE 0 END)
    FROM (SELECT COUNT(*) FROM room) AS room, (SELECT COUNT(*) FROM inserted) AS inserted"
        )
    };
}

const RECORD: &str = record!("");
/// The same, and a row for the batch in the outbox of events.
const RECORD_WITH_EVENTS: &str = record!(
    "event AS (
        INSERT INTO event_outbox (sale_id, orders) SELECT $2, array_to_json($4::bigint[])::text FROM room
    ), "
);
/// SQLSTATE of the division by zero in both.
const ROWS_MISSING: &str = "22012";

/// A connection that is not returned to the pool for a while.
#[derive(Debug)]
struct IdleConnection {
    connection: PoolConnection<Postgres>,
    since: Instant,
}

#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    pool: PgPool,
    /// `None` once closed.
    idle: Arc<Mutex<Option<Vec<IdleConnection>>>>,
}

impl Recorder {
    pub(crate) fn new(pool: PgPool) -> Self {
        Self { pool, idle: Arc::new(Mutex::new(Some(Vec::new()))) }
    }

    /// Returns `false`, with nothing done, if there is not enough stock or an order cannot simply be inserted.
    pub(crate) async fn record(&self, sale: SaleId, epoch: Epoch, sorted: &[&Admitted], events: bool) -> Result<bool> {
        let idle = self.idle.lock().as_mut().and_then(Vec::pop);
        let mut kept = match idle {
            Some(kept) => kept,
            None => IdleConnection { connection: self.pool.acquire().await.map_err(not_begun)?, since: Instant::now() },
        };
        let column = |of: fn(&Admitted) -> i64| sorted.iter().map(|item| of(item)).collect::<Vec<i64>>();
        let record = sqlx::query_as::<_, (i64, i32)>(if events { RECORD_WITH_EVENTS } else { RECORD })
            .bind(sorted.len() as i64)
            .bind(sale.get())
            .bind(epoch.0)
            .bind(column(|item| item.order.get()))
            .bind(column(|item| item.user.get()))
            .bind(column(|item| item.seq))
            .bind(column(|item| item.at.ms()))
            .bind(sorted.iter().map(|item| item.at.ms()).max())
            .bind(sorted.first().map(|item| item.order.get()))
            .bind(sorted.last().map(|item| item.order.get()));
        let recording = with_timeout(record.fetch_one(&mut *kept.connection));
        // The failpoint is reached when the statement has been sent.
        let (recorded, ()) = join(recording, async { failpoint::hit("record.inserted") }).await;
        let done: sqlx::Result<bool> = match recorded {
            Ok((rooms, 1)) => Ok(rooms == 1),
            Ok((_, _quotient)) => Err(sqlx::Error::Protocol("an unexpected reply to a batch of orders".to_owned())),
            Err(sqlx::Error::Database(error))
                if error.is_unique_violation() || error.code().as_deref() == Some(ROWS_MISSING) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        };
        match done {
            Ok(done) => {
                self.put_back(kept);
                Ok(done)
            }
            Err(error) => {
                // The others were probably made by the same server, which may have been restarted.
                self.discard_idle();
                kept.connection.close_on_drop();
                Err(classify_autocommit(error))
            }
        }
    }

    /// Keeps the connection for the next batch, or returns it to the pool.
    fn put_back(&self, kept: IdleConnection) {
        let mut idle = self.idle.lock();
        if let Some(idle) = idle.as_mut().filter(|idle| idle.len() < MAX_IDLE)
            && kept.since.elapsed() < MAX_LIFETIME
        {
            idle.push(kept);
        }
    }

    fn discard_idle(&self) {
        if let Some(idle) = self.idle.lock().as_mut() {
            for mut kept in idle.drain(..) {
                kept.connection.close_on_drop();
            }
        }
    }

    /// Returns its connections to the pool.
    pub(crate) fn close(&self) {
        *self.idle.lock() = None;
    }
}

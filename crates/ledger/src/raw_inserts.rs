//! Raw inserts of many rows at once: the yardstick for how fast consumers of a queue record orders.
//!
//! The rows of sales are inserted once more, into copies of the tables `orders` and `sale` with the same columns, checks and indexes, in the
//! same database with the same settings. As in the ledger, a batch is one durable transaction that also updates the sale's row, and each
//! sale has one transaction at a time. Nothing else is done: no queue, no gate, no search for duplicates or the quarantine.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, MySqlConnection, MySqlPool, PgConnection, PgPool};
use stampede_core::ports::{OrderRow, SaleRecords};

use crate::db::Pool;
use crate::{Database, OpenError, mysql, postgres};

/// Deletes the copies.
const DROP: &str = "DROP TABLE IF EXISTS bench_orders, bench_sale";

const COPY_ON_MYSQL: [&str; 4] = [
    "CREATE TABLE bench_orders LIKE orders",
    "CREATE TABLE bench_sale LIKE sale",
    "INSERT INTO bench_sale SELECT * FROM sale",
    "UPDATE bench_sale SET sold = 0",
];

const COPY_ON_POSTGRES: [&str; 4] = [
    "CREATE TABLE bench_orders (LIKE orders INCLUDING ALL)",
    "CREATE TABLE bench_sale (LIKE sale INCLUDING ALL)",
    "INSERT INTO bench_sale SELECT * FROM sale",
    "UPDATE bench_sale SET sold = 0",
];

/// One statement, as the ledger uses on PostgreSQL.
const INSERT_ON_POSTGRES: &str = "\
    WITH room AS (
        UPDATE bench_sale SET sold = sold + $1 WHERE id = $2 AND epoch = $3 AND sold + $1 <= total RETURNING price_cents
    )
    INSERT INTO bench_orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at)
    SELECT o.id, $2, o.user_id, 1, 'unpaid', $3, o.seq, room.price_cents, o.at, o.at
    FROM UNNEST($4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[]) AS o (id, user_id, seq, at), room";

const UPDATE_ON_MYSQL: &str = "UPDATE bench_sale SET sold = sold + ? WHERE id = ? AND epoch = ? AND sold + ? <= total";

/// How many rows were inserted, and how long that took.
#[derive(Debug, Clone, Copy)]
pub struct RawInserts {
    pub rows: usize,
    pub elapsed: Duration,
}

/// Sales whose rows are inserted at once.
const CONCURRENT_SALES: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum RawInsertError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("rows cannot be inserted into a copy of the table")]
    Insert(#[from] sqlx::Error),
    #[error("raw inserts are measured on MySQL, MariaDB and PostgreSQL")]
    OtherDatabase,
}

/// Inserts the live orders of these sales, in batches of `batch`, in the order in which they were admitted. The copies of the tables are
/// created before and deleted after that.
///
/// # Errors
/// If the database fails, or if it is SQLite, which no queue is used with.
pub async fn raw_inserts(
    database: &Database,
    sales: &[SaleRecords],
    batch: usize,
) -> Result<RawInserts, RawInsertError> {
    let sales: Vec<Vec<OrderRow>> = sales.iter().map(live_orders).filter(|orders| !orders.is_empty()).collect();
    let pool = match database {
        Database::Sqlite(_) => return Err(RawInsertError::OtherDatabase),
        Database::MySql(url) => mysql::open(url).await?,
        Database::Postgres(url) => postgres::open(url).await?,
    };
    match pool {
        Pool::Sqlite { .. } => Err(RawInsertError::OtherDatabase),
        Pool::MySql { writer, .. } => {
            let inserted = on_mysql(&writer, sales, batch).await;
            writer.close().await;
            Ok(inserted?)
        }
        Pool::Postgres { writer, .. } => {
            let inserted = on_postgres(&writer, sales, batch).await;
            writer.close().await;
            Ok(inserted?)
        }
    }
}

fn live_orders(records: &SaleRecords) -> Vec<OrderRow> {
    let mut orders: Vec<OrderRow> = records.orders.iter().filter(|row| row.live).cloned().collect();
    orders.sort_by_key(|row| row.seq);
    orders
}

/// Creates the copies, inserts the rows, and deletes the copies.
macro_rules! insert_all {
    ($pool:expr, $sales:expr, $batch:expr, $copy:expr, $insert:ident) => {{
        $pool.execute(DROP).await?;
        for statement in $copy {
            $pool.execute(statement).await?;
        }
        let rows = $sales.iter().map(Vec::len).sum();
        let insert_sale = |orders: Vec<OrderRow>| {
            let pool = $pool.clone();
            tokio::spawn(async move {
                let mut connection = pool.acquire().await?;
                for rows in orders.chunks($batch.max(1)) {
                    $insert(&mut *connection, rows).await?;
                }
                sqlx::Result::Ok(())
            })
        };
        let started = Instant::now();
        let mut tasks = futures_util::stream::iter($sales).map(insert_sale).buffer_unordered(CONCURRENT_SALES);
        let mut done = Ok(());
        while let Some(ended) = tasks.next().await {
            done = done.and(ended.unwrap_or_else(|error| Err(sqlx::Error::Io(std::io::Error::other(error)))));
        }
        let elapsed = started.elapsed();
        $pool.execute(DROP).await?;
        done.map(|()| RawInserts { rows, elapsed })
    }};
}

async fn on_postgres(pool: &PgPool, sales: Vec<Vec<OrderRow>>, batch: usize) -> sqlx::Result<RawInserts> {
    insert_all!(pool, sales, batch, COPY_ON_POSTGRES, insert_on_postgres)
}

async fn on_mysql(pool: &MySqlPool, sales: Vec<Vec<OrderRow>>, batch: usize) -> sqlx::Result<RawInserts> {
    insert_all!(pool, sales, batch, COPY_ON_MYSQL, insert_on_mysql)
}

fn sorted(rows: &[OrderRow]) -> Vec<&OrderRow> {
    let mut sorted: Vec<&OrderRow> = rows.iter().collect();
    sorted.sort_by_key(|row| row.order.id);
    sorted
}

fn expect_rows(inserted: u64, rows: &[OrderRow]) -> sqlx::Result<()> {
    match usize::try_from(inserted) {
        Ok(inserted) if inserted == rows.len() => Ok(()),
        _ => Err(sqlx::Error::Protocol(format!("{inserted} of {} rows were inserted", rows.len()))),
    }
}

async fn insert_on_postgres(connection: &mut PgConnection, rows: &[OrderRow]) -> sqlx::Result<()> {
    let sorted = sorted(rows);
    let Some(first) = sorted.first() else { return Ok(()) };
    let column = |of: fn(&OrderRow) -> i64| sorted.iter().map(|row| of(row)).collect::<Vec<i64>>();
    let insert = sqlx::query(INSERT_ON_POSTGRES)
        .bind(sorted.len() as i64)
        .bind(first.order.sale.get())
        .bind(first.epoch.0)
        .bind(column(|row| row.order.id.get()))
        .bind(column(|row| row.order.user.get()))
        .bind(column(|row| row.seq))
        .bind(column(|row| row.order.created_at.ms()));
    expect_rows(insert.execute(connection).await?.rows_affected(), rows)
}

async fn insert_on_mysql(connection: &mut MySqlConnection, rows: &[OrderRow]) -> sqlx::Result<()> {
    let sorted = sorted(rows);
    let Some(first) = sorted.first() else { return Ok(()) };
    let (count, sale, epoch) = (sorted.len() as i64, first.order.sale.get(), first.epoch.0);
    let mut text = String::with_capacity(sorted.len() * 100 + 300);
    text.push_str(
        "INSERT INTO bench_orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at) VALUES ",
    );
    for (n, row) in sorted.iter().enumerate() {
        let (comma, at) = (if n > 0 { "," } else { "" }, row.order.created_at.ms());
        let (id, user, price) = (row.order.id, row.order.user, row.order.price.cents());
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}({id},{sale},{user},1,'unpaid',{epoch},{},{price},{at},{at})", row.seq);
    }
    let mut tx = connection.begin().await?;
    let update = sqlx::query(UPDATE_ON_MYSQL).bind(count).bind(sale).bind(epoch).bind(count);
    update.execute(&mut *tx).await?;
    let inserted = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *tx).await?.rows_affected();
    tx.commit().await?;
    expect_rows(inserted, rows)
}

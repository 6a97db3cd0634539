//! Orders per second that MariaDB and PostgreSQL commit: in batches by the ledger, and one transaction per order by 32 connections, on
//! private servers that sync every commit to disk, in one run:
//!
//! ```sh
//! cargo bench -p stampede-ledger
//! ```
//!
//! The baseline does the same work: it takes one from the stock, unless none is left, and inserts the order. Both are measured in turns,
//! and the ratio of the medians counts. The exit code is 1 if a ratio is below its minimum.

use std::process::ExitCode;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use sqlx::mysql::MySqlPoolOptions;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Executor as _, MySqlPool, PgPool};
use stampede_core::ports::{Admitted, Ledger, RecordOutcome};
use stampede_core::{Epoch, OrderId, SaleId, Timestamp, UserId};
use stampede_ledger::{Database, open};
use stampede_testkit::{mariadb, postgres};

const ROUNDS: usize = 5;
/// The most orders in one call of the gate, and so in one transaction of a node.
const BATCH: i64 = 512;
const BATCHES: i64 = 40;
const CONNECTIONS: u32 = 32;
const SINGLES_EACH: u32 = 30;
const MINIMUM_ON_MARIADB: f64 = 15.0;
const MINIMUM_ON_POSTGRES: f64 = 20.0;

const FILL: [&str; 3] = [
    "INSERT INTO shop (id, type_id, name, folded_name, address) VALUES (1, 1, 'x', 'x', 'y')",
    "INSERT INTO voucher VALUES (1, 1, 'flash_sale', 't', '', '', 100, 200, 1)",
    "INSERT INTO sale (id, voucher_id, price_cents, status, begin_at, end_at, total, cap, sold, payment_deadline_ms, created_at)
        VALUES (1, 1, 100, 'on_sale', 1, 4000000000000, 2000000, 2000000, 0, 900000, 1)",
];
/// Takes one from the stock.
const TAKE: &str = "UPDATE sale SET sold = sold + 1 WHERE id = 1 AND sold < total";

/// Numbers orders and users.
static NEXT: AtomicI64 = AtomicI64::new(1);

fn insert(number: i64) -> AssertSqlSafe<String> {
    AssertSqlSafe(format!(
        "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at)
        VALUES ({}, 1, {}, 1, 'unpaid', 1, {number}, 100, 1, 1)",
        600_000_000_000_000_000 + number,
        500_000_000_000_000_000 + number,
    ))
}

/// Commits one transaction per order, by many connections at once. Returns orders per second.
macro_rules! record_singly {
    ($pool:expr) => {{
        let started = Instant::now();
        let tasks: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                let pool = $pool.clone();
                tokio::spawn(async move {
                    let mut connection = pool.acquire().await.expect("a connection");
                    for _ in 0..SINGLES_EACH {
                        let number = NEXT.fetch_add(1, Ordering::Relaxed);
                        connection.execute("BEGIN").await.expect("begun");
                        let taken = connection.execute(TAKE).await.expect("taken");
                        assert_eq!(taken.rows_affected(), 1);
                        connection.execute(insert(number)).await.expect("inserted");
                        connection.execute("COMMIT").await.expect("committed");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("orders");
        }
        f64::from(CONNECTIONS * SINGLES_EACH) / started.elapsed().as_secs_f64()
    }};
}

enum Pool {
    MySql(MySqlPool),
    Postgres(PgPool),
}

impl Pool {
    async fn fill(&self) {
        for statement in FILL {
            match self {
                Self::MySql(pool) => drop(pool.execute(statement).await.expect("a row")),
                Self::Postgres(pool) => drop(pool.execute(statement).await.expect("a row")),
            }
        }
    }

    async fn record_singly(&self) -> f64 {
        match self {
            Self::MySql(pool) => record_singly!(pool),
            Self::Postgres(pool) => record_singly!(pool),
        }
    }
}

async fn record_batches(ledger: &dyn Ledger) -> f64 {
    let sale = SaleId::new(1).expect("an id");
    let started = Instant::now();
    for _ in 0..BATCHES {
        let first = NEXT.fetch_add(BATCH, Ordering::Relaxed);
        let batch: Vec<Admitted> = (first..first + BATCH)
            .map(|number| Admitted {
                order: OrderId::new(600_000_000_000_000_000 + number).expect("an id"),
                user: UserId::new(500_000_000_000_000_000 + number).expect("an id"),
                seq: number,
                at: Timestamp::from_ms(1),
            })
            .collect();
        let outcomes = ledger.record(sale, Epoch(1), &batch).await.expect("recorded");
        assert!(outcomes.iter().all(|outcome| *outcome == RecordOutcome::Inserted));
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of orders")]
    let orders = (BATCHES * BATCH) as f64;
    orders / started.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
async fn measure(name: &str, url: &str, pool: Pool, minimum: f64) -> bool {
    let stores = open(&Database::parse(url).expect("a URL")).await.expect("a ledger");
    pool.fill().await;
    let (mut batched, mut single) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        batched.push(record_batches(&*stores.ledger).await);
        single.push(pool.record_singly().await);
    }
    let (batched, single) = (median(batched), median(single));
    let ratio = batched / single;
    println!("{name}: {batched:.0} orders/s in batches of {BATCH}, {single:.0} orders/s by {CONNECTIONS} connections");
    println!("{name}: ratio {ratio:.1}, at least {minimum}");
    ratio >= minimum
}

#[tokio::main]
async fn main() -> ExitCode {
    let server = mariadb::start().expect("a private MariaDB");
    let url = mariadb::create_database(&server, "bench").expect("a database");
    let pool = MySqlPoolOptions::new().max_connections(CONNECTIONS).connect_lazy(&url).expect("a URL");
    let is_fast_on_mariadb = measure("MariaDB", &url, Pool::MySql(pool), MINIMUM_ON_MARIADB).await;
    drop(server);
    let server = postgres::start().expect("a private PostgreSQL");
    let url = postgres::create_database(&server, "bench").expect("a database");
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect_lazy(&url).expect("a URL");
    let is_fast_on_postgres = measure("PostgreSQL", &url, Pool::Postgres(pool), MINIMUM_ON_POSTGRES).await;
    if is_fast_on_mariadb && is_fast_on_postgres { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

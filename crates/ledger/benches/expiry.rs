//! How much the search for orders that are due slows down buying, with a million old orders in the ledger; and how long it takes to cancel
//! 100,000 orders that fall due together. On SQLite and on private servers, in one run:
//!
//! ```sh
//! cargo bench -p stampede-ledger --bench expiry
//! ```
//!
//! Orders are recorded alone and beside the search, in turns, and the ratio of the medians counts. As in a shop in which nearly everyone pays,
//! each search finds recorded batches that are due and whose orders are all paid. The exit code is 1 if a ratio is below its minimum, or if
//! cancelling takes too long.

use std::convert::Infallible;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection, PgConnection, SqliteConnection, raw_sql};
use stampede_core::ports::{Admitted, Ledger, RecordOutcome};
use stampede_core::{Epoch, OrderId, SaleId, Timestamp, UserId};
use stampede_ledger::{Database, open};
use stampede_testkit::{mariadb, postgres};

const ROUNDS: usize = 5;
const OLD_ORDERS: i64 = 1_000_000;
/// Orders of a recorded batch among the old ones.
const OLD_BATCH: i64 = 100;
/// The most orders in one call of the gate, and so in one transaction of a node.
const BATCH: i64 = 512;
const BATCHES: i64 = 150;
const MINIMUM_RATIO: f64 = 0.9;

/// How often the worker searches, how many batches it looks at, and how many are due in each search.
const INTERVAL: Duration = Duration::from_millis(500);
const LIMIT: u32 = 400;
const DUE_AT_ONCE: i64 = 20;
/// The longest pause of the worker between two calls.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

const DUE_TOGETHER: i64 = 100_000;
const LONGEST_EXPIRY: Duration = Duration::from_secs(30);

/// The sale that is on, that of the old orders, and one whose orders fall due together.
const SALES: [&str; 3] = [
    "INSERT INTO shop (id, type_id, name, folded_name, address) VALUES (1, 1, 'x', 'x', 'y')",
    "INSERT INTO voucher VALUES (1, 1, 'flash_sale', 't', '', '', 100, 200, 1), (2, 1, 'flash_sale', 't', '', '', 100, 200, 1),
        (3, 1, 'flash_sale', 't', '', '', 100, 200, 1)",
    "INSERT INTO sale (id, voucher_id, price_cents, status, begin_at, end_at, total, cap, sold, payment_deadline_ms, created_at)
        VALUES (1, 1, 100, 'on_sale', 1, 4000000000000, 2000000, 2000000, 0, 900000, 1),
        (2, 2, 100, 'on_sale', 1, 2, 1000000, 1000000, 1000000, 900000, 1),
        (3, 3, 100, 'on_sale', 1, 4000000000000, 2000000, 2000000, 0, 1, 1)",
];

/// Numbers orders and users.
static NEXT: AtomicI64 = AtomicI64::new(1);

/// The statements that fill the ledger. `numbers(n)` is a table `s` with the column `n` from 1 on.
fn fill(numbers: &dyn Fn(i64) -> String) -> Vec<String> {
    let (orders, batches) = (numbers(OLD_ORDERS), numbers(OLD_ORDERS / OLD_BATCH));
    let orders = format!(
        "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at, pay_by)
        SELECT 500000000000000000 + n, 2, 500000000000000000 + n, 1, 'paid', 1, n, 100, 1, 1, n FROM {orders}"
    );
    let due = format!(
        "INSERT INTO payment_due (due_at, first_order, last_order, sale_id, orders)
        SELECT n, 500000000000000000 + (n - 1) * {OLD_BATCH} + 1, 500000000000000000 + n * {OLD_BATCH}, 2, {OLD_BATCH} FROM {batches}"
    );
    SALES.iter().map(|&statement| statement.to_owned()).chain([orders, due]).collect()
}

macro_rules! execute {
    ($connection:ty, $url:expr, $statements:expr) => {{
        let mut connection = <$connection>::connect($url).await.expect("a connection");
        for statement in $statements {
            raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await.expect("rows");
        }
        connection.close().await.expect("closed");
    }};
}

/// Records batches of a sale. Returns orders per second.
async fn record(ledger: &dyn Ledger, sale: i64, orders: i64) -> f64 {
    let sale = SaleId::new(sale).expect("an id");
    let started = Instant::now();
    let mut left = orders;
    while left > 0 {
        let size = left.min(BATCH);
        let first = NEXT.fetch_add(size, Ordering::Relaxed);
        let batch: Vec<Admitted> = (first..first + size)
            .map(|number| Admitted {
                order: OrderId::new(600_000_000_000_000_000 + number).expect("an id"),
                user: UserId::new(600_000_000_000_000_000 + number).expect("an id"),
                seq: number,
                at: Timestamp::from_ms(1),
            })
            .collect();
        let outcomes = ledger.record(sale, Epoch(1), &batch).await.expect("recorded");
        assert!(outcomes.iter().all(|outcome| *outcome == RecordOutcome::Inserted));
        left -= size;
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of orders")]
    let orders = orders as f64;
    orders / started.elapsed().as_secs_f64()
}

/// Searches at intervals, as the worker does, until it is dropped. `until` is the time up to which batches are due, and rises.
async fn search(ledger: &dyn Ledger, until: &AtomicI64) -> Infallible {
    loop {
        let next = ledger.next_payment_due().await.expect("a time").expect("old orders");
        ledger.now().await.expect("a time");
        let now = until.fetch_add(DUE_AT_ONCE, Ordering::Relaxed) + DUE_AT_ONCE;
        assert!(next.ms() <= now, "batches are due");
        assert_eq!(expire_until(ledger, &async || Timestamp::from_ms(now)).await, 0, "they are paid");
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Cancels everything that is due, with the pauses of the worker. Returns how many orders were cancelled.
async fn expire_until(ledger: &dyn Ledger, now: &impl AsyncFn() -> Timestamp) -> u64 {
    let mut orders = 0;
    loop {
        let started = Instant::now();
        let expired = ledger.expire_orders(now().await, LIMIT, &[]).await.expect("expired");
        assert!(expired.failed.is_empty(), "{expired:?}");
        orders += expired.orders;
        if !expired.more {
            return orders;
        }
        tokio::time::sleep(started.elapsed().min(LONGEST_PAUSE)).await;
    }
}

/// Returns how long it takes to cancel the orders that fell due together.
async fn expire_all(ledger: &dyn Ledger) -> Duration {
    let started = Instant::now();
    let orders = expire_until(ledger, &async || ledger.now().await.expect("a time")).await;
    assert_eq!(i64::try_from(orders), Ok(DUE_TOGETHER));
    started.elapsed()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
async fn measure(name: &str, database: &Database) -> bool {
    let ledger = open(database).await.expect("a ledger").ledger;
    let (mut alone, mut beside, until) = (Vec::new(), Vec::new(), AtomicI64::new(0));
    for _ in 0..ROUNDS {
        alone.push(record(&*ledger, 1, BATCHES * BATCH).await);
        beside.push(tokio::select! {
            rate = record(&*ledger, 1, BATCHES * BATCH) => rate,
            never = search(&*ledger, &until) => match never {},
        });
    }
    let (alone, beside) = (median(alone), median(beside));
    let ratio = beside / alone;
    println!("{name}: {alone:.0} orders/s alone, {beside:.0} orders/s beside the search for what is due");
    println!("{name}: ratio {ratio:.2}, at least {MINIMUM_RATIO}");

    // The old batches are not of interest any more.
    while ledger.expire_orders(Timestamp::from_ms(OLD_ORDERS), LIMIT, &[]).await.expect("searched").more {}
    record(&*ledger, 3, DUE_TOGETHER).await;
    let (expiry, buying) = tokio::join!(expire_all(&*ledger), record(&*ledger, 1, BATCHES * BATCH));
    println!(
        "{name}: {DUE_TOGETHER} orders that fell due together expired in {expiry:.1?}, at most {LONGEST_EXPIRY:?}"
    );
    println!(
        "{name}: meanwhile {buying:.0} orders/s of another sale were recorded, {:.2} of what it is alone",
        buying / alone
    );
    ledger.close().await;
    ratio >= MINIMUM_RATIO && expiry <= LONGEST_EXPIRY
}

async fn measure_sqlite(folder: &Path) -> bool {
    let file = folder.join("ledger.db");
    let database = Database::Sqlite(file.clone());
    open(&database).await.expect("a ledger").ledger.close().await;
    let url = format!("sqlite:{}", file.display());
    let numbers = |count| {
        format!(
            "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s) AS s"
        )
    };
    execute!(SqliteConnection, &url, fill(&numbers).into_iter().chain(["ANALYZE".to_owned()]));
    measure("SQLite", &database).await
}

async fn measure_mariadb() -> bool {
    let server = mariadb::start().expect("a private MariaDB");
    let url = mariadb::create_database(&server, "bench").expect("a database");
    let database = Database::parse(&url).expect("a URL");
    open(&database).await.expect("a ledger").ledger.close().await;
    let numbers = |count| format!("(SELECT seq AS n FROM seq_1_to_{count}) AS s");
    execute!(MySqlConnection, &url, fill(&numbers).into_iter().chain(["ANALYZE TABLE orders, payment_due".to_owned()]));
    measure("MariaDB", &database).await
}

async fn measure_postgres() -> bool {
    let server = postgres::start().expect("a private PostgreSQL");
    let url = postgres::create_database(&server, "bench").expect("a database");
    let database = Database::parse(&url).expect("a URL");
    open(&database).await.expect("a ledger").ledger.close().await;
    let numbers = |count| format!("generate_series(1, {count}) AS s(n)");
    execute!(PgConnection, &url, fill(&numbers).into_iter().chain(["ANALYZE".to_owned()]));
    measure("PostgreSQL", &database).await
}

#[tokio::main]
async fn main() -> ExitCode {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let results = [measure_sqlite(folder.path()).await, measure_mariadb().await, measure_postgres().await];
    if results.into_iter().all(|is_good| is_good) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

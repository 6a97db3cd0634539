//! How long a start takes with a million orders in the ledger, beside a plain read of those rows, in one run:
//!
//! ```sh
//! cargo bench -p stampede-engine
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::Connection as _;
use sqlx::sqlite::SqliteConnection;
use stampede_core::SystemClock;
use stampede_engine::{Config, Engine, IdConfig, LatePayments, PaymentConfig, SoloConfig, TierConfig};
use stampede_ledger::Database;

#[path = "../tests/it/config.rs"]
mod config;

use config::{ALERTS, AUTH, CACHE};

const ROUNDS: usize = 7;
const ORDERS: usize = 1_000_000;

const SOLO: SoloConfig = SoloConfig {
    shared_ledger: false,
    max_batch: 512,
    queue_per_sale: 1000,
    queue_total: 1000,
    quarantine_after: Duration::from_secs(30),
    abandon_queue: false,
};

const CONFIG: Config = Config {
    answer_timeout: Duration::from_secs(5),
    payment_deadline_ms: 900_000,
    buy_again: true,
    payments: PaymentConfig {
        callback_keys: Vec::new(),
        replay_window: Duration::ZERO,
        test_provider: false,
        late: LatePayments::Refund,
        provider: None,
        refund_pause: Duration::from_secs(1),
        refund_tries: 10,
    },
    events: None,
    tier: TierConfig::Solo(SOLO),
    ids: IdConfig::Snowflake,
    alerts: ALERTS,
    cache: CACHE,
    auth: AUTH,
};

/// Users in random order.
const FILL: &str = "
    INSERT INTO shop VALUES (1, 1, 'x', 'x', 'y');
    INSERT INTO voucher VALUES (1, 1, 'flash_sale', 't', '', '', 100, 200, 1);
    INSERT INTO sale (id, voucher_id, price_cents, status, begin_at, end_at, total, cap, sold, created_at)
        VALUES (1, 1, 100, 'on_sale', 1, 4000000000000, 2000000, 2000000, 1000000, 1);
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000)
    INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at)
        SELECT 600000000000000000 + i, 1, 288230376151711744 + (i * 387420489) % 1000003, 1, 'unpaid', 1, i, 100, 1, 1 FROM n";

#[tokio::main]
#[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
async fn main() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("ledger.db").display());
    let database = Database::parse(&url).expect("a URL");
    drop(stampede_ledger::open(&database).await.expect("a ledger"));
    let mut connection = SqliteConnection::connect(&url).await.expect("a connection");
    sqlx::raw_sql(FILL).execute(&mut connection).await.expect("a million orders");

    let (mut reads, mut starts) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let rows: Vec<(i64, i64)> = sqlx::query_as("SELECT user_id, id FROM orders WHERE sale_id = 1 AND live = 1")
            .fetch_all(&mut connection)
            .await
            .expect("rows");
        reads.push(started.elapsed());
        assert_eq!(rows.len(), ORDERS);
        drop(rows);
        let started = Instant::now();
        let stores = stampede_ledger::open(&database).await.expect("a ledger");
        let engine = Engine::start(CONFIG, stores, Arc::new(SystemClock), None).await.expect("an engine");
        starts.push(started.elapsed());
        assert!(engine.shut_down(Duration::from_secs(5)).await);
    }
    let (read, start) = (median(reads), median(starts));
    println!("plain read {read:?}, start {start:?}: {:.2} times", start.as_secs_f64() / read.as_secs_f64());
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}

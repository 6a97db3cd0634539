//! The search for what is due uses the keys of both tables, whatever else they hold.

use super::*;
use crate::db::{Dialect, Pool, Tx};
use crate::{mysql, postgres, sqlite};

/// Orders that are long over, in batches of 100, and as many rows of `payment_due` that are not due.
fn fill(dialect: Dialect, count: u64) -> Vec<String> {
    let numbers = match dialect {
        Dialect::Sqlite => {
            format!(
                "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s) AS s"
            )
        }
        Dialect::MySql => format!("(SELECT seq AS n FROM seq_1_to_{count}) AS s"),
        Dialect::Postgres => format!("generate_series(1, {count}) AS s(n)"),
    };
    let orders = format!(
        "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at, pay_by)
        SELECT n * 10, 1 + n % 20, n, 1, CASE WHEN n % 3 = 0 THEN 'paid' ELSE 'unpaid' END, 1, n, 100, n, n, n FROM {numbers}"
    );
    let due = format!(
        "INSERT INTO payment_due (due_at, first_order, last_order, sale_id, orders)
        SELECT 1000000000 + n, n * 10, n * 10 + 9, 1 + n % 20, 1 FROM {numbers}"
    );
    let statistics: &[&str] = match dialect {
        Dialect::Sqlite | Dialect::Postgres => &["ANALYZE"],
        Dialect::MySql => &["ANALYZE TABLE orders", "ANALYZE TABLE payment_due"],
    };
    [orders, due].into_iter().chain(statistics.iter().map(|&statement| statement.to_owned())).collect()
}

/// How the database executes a query: a line for each table that is read.
async fn plan(tx: &mut Tx, dialect: Dialect, sql: &str) -> Vec<String> {
    let explain = if dialect == Dialect::Sqlite { "EXPLAIN QUERY PLAN" } else { "EXPLAIN" };
    let rows = tx.rows_text(format!("{explain} {sql}")).await.unwrap();
    let line = |row: &crate::db::Row| match dialect {
        Dialect::Sqlite => row.text(3).unwrap(),
        // Table, type of the access, key.
        Dialect::MySql => [2, 3, 5].map(|column| row.maybe_text(column).unwrap().unwrap_or_default()).join(" "),
        Dialect::Postgres => row.text(0).unwrap(),
    };
    rows.iter().map(line).collect()
}

async fn reads_by_key(pool: Pool) {
    let dialect = pool.dialect();
    let mut tx = pool.begin().await.unwrap();
    let count = stampede_testkit::count(1_000_000, 50_000);
    for statement in fill(dialect, count) {
        tx.execute_text(statement).await.unwrap();
    }
    let batch = |n: i64| DueBatch { due_at: n, first: n * 10, last: n * 10 + 990, orders: 100 };
    let now = Timestamp::from_ms(40_000);
    let sale = SaleId::new(3).unwrap();
    for batches in [vec![batch(20_000)], vec![batch(20_000), batch(20_050), batch(30_000), batch(5)]] {
        let plan = plan(&mut tx, dialect, &candidates(sale, &batches, now)).await;
        assert_by_key(dialect, &plan, "orders");
    }
    for except in [vec![], vec![sale, SaleId::new(4).unwrap()]] {
        let due = due(&except).replacen('?', "40000", 1).replacen('?', "200", 1);
        let plan = plan(&mut tx, dialect, &due).await;
        assert_by_key(dialect, &plan, "payment_due");
    }
    assert_first_of_key(dialect, &plan(&mut tx, dialect, NEXT_DUE).await);
    tx.roll_back().await.unwrap();
    pool.close().await;
}

/// The first row in the order of the key is read: nothing is sorted.
fn assert_first_of_key(dialect: Dialect, plan: &[String]) {
    let all = plan.join("\n");
    match dialect {
        // A table without a rowid is read in the order of its key. A sort would be a second line.
        Dialect::Sqlite => assert_eq!(plan, ["SCAN payment_due"]),
        Dialect::MySql => assert_eq!(plan, ["payment_due index PRIMARY"]),
        Dialect::Postgres => {
            assert!(all.contains("Limit") && all.contains("payment_due_pkey"), "{all}");
            assert!(!all.contains("Seq Scan") && !all.contains("Sort"), "{all}");
        }
    }
}

fn assert_by_key(dialect: Dialect, plan: &[String], table: &str) {
    let all = plan.join("\n");
    match dialect {
        Dialect::Sqlite => {
            assert!(all.contains("PRIMARY KEY"), "{all}");
            assert!(!all.contains("SCAN") && !all.contains("TEMP B-TREE"), "{all}");
        }
        Dialect::MySql => {
            let by_key = |line: &String| *line == format!("{table} range PRIMARY") || line.starts_with("<union");
            assert!(plan.iter().all(by_key), "{all}");
        }
        Dialect::Postgres => {
            assert!(all.contains(&format!("{table}_pkey")), "{all}");
            assert!(!all.contains("Seq Scan") && !all.contains("orders_sale_id"), "{all}");
        }
    }
}

#[test]
fn overlapping_ranges_are_read_once() {
    let batch = |first, last| DueBatch { due_at: 1, first, last, orders: 1 };
    let batches = [batch(5, 9), batch(1, 1), batch(7, 20), batch(20, 21), batch(23, 30), batch(24, 25)];
    assert_eq!(merged_ranges(&batches), [(1, 1), (5, 21), (23, 30)]);
    assert_eq!(merged_ranges(&[]), []);
}

#[tokio::test]
async fn due_orders_are_found_by_key_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    reads_by_key(sqlite::open(&folder.path().join("ledger.db")).await.unwrap()).await;
}

#[tokio::test]
async fn due_orders_are_found_by_key_on_mariadb() {
    let server = stampede_testkit::mariadb::start().unwrap();
    let url = stampede_testkit::mariadb::create_database(&server, "plans").unwrap();
    reads_by_key(mysql::open(&url).await.unwrap()).await;
}

#[tokio::test]
async fn due_orders_are_found_by_key_on_postgres() {
    let server = stampede_testkit::postgres::start().unwrap();
    let url = stampede_testkit::postgres::create_database(&server, "plans").unwrap();
    reads_by_key(postgres::open(&url).await.unwrap()).await;
}

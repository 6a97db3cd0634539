//! The suite on MariaDB and PostgreSQL: one private server each, with a separate database per test.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection as _, query_scalar, raw_sql};
use stampede_core::OrderId;
use stampede_core::ports::{LedgerError, RecordOutcome, Stores};
use stampede_core::{Epoch, OrderStatus, RejectReason, Timestamp};
use stampede_ledger::{Database, LedgerConfig, open, open_with};
use stampede_testkit::Server;

static MARIADB: LazyLock<Server> = LazyLock::new(|| stampede_testkit::mariadb::start().unwrap());
static POSTGRES: LazyLock<Server> = LazyLock::new(|| stampede_testkit::postgres::start().unwrap());

pub struct Fresh {
    pub stores: Stores,
    url: String,
}

fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("t{}", NEXT.fetch_add(1, Ordering::SeqCst))
}

impl Fresh {
    async fn new(url: String) -> Self {
        Self { stores: reopen(&url).await, url }
    }

    async fn with_events(url: String) -> Self {
        let database = Database::parse(&url).unwrap();
        Self { stores: open_with(&database, LedgerConfig { writes_events: true }).await.unwrap(), url }
    }
}

async fn reopen(url: &str) -> Stores {
    open(&Database::parse(url).unwrap()).await.unwrap()
}

/// Two nodes start concurrently on an empty database: both succeed, and the tables are created once.
async fn two_nodes_migrate_concurrently(url: String) {
    let nodes: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { reopen(&url).await })
        })
        .collect();
    for node in nodes {
        assert!(node.await.unwrap().ledger.sales(None).await.unwrap().is_empty());
    }
}

/// Callers that go away at any moment leave no connection inside a transaction: readers see what was committed since.
async fn abandoned_calls_leave_no_snapshot_behind(url: String) {
    let Fresh { stores, .. } = Fresh::new(url).await;
    let sale = crate::conformance::sale_of(&stores, 1_000_000).await;
    for round in 0..stampede_testkit::count(200, 30) {
        let calls: Vec<_> = (0..24)
            .map(|n| {
                let ledger = stores.ledger.clone();
                let abandoned_after = Duration::from_micros((round * 37 + n * 97) % 3000);
                tokio::spawn(async move {
                    let call = async {
                        if n % 3 == 0 {
                            let now = stampede_core::Timestamp::from_ms(0);
                            drop(ledger.set_status(sale, stampede_core::SaleStatus::OnSale, None, now).await);
                        } else {
                            drop(ledger.load(sale).await);
                        }
                    };
                    let _ = tokio::time::timeout(abandoned_after, call).await;
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
        let id = round as i64 + 1;
        let recorded = crate::conformance::record(&stores, sale, &[(id, id)]).await;
        assert_eq!(recorded, [RecordOutcome::Inserted]);
        // More reads at once than there are connections, so that all of them are used.
        let reads: Vec<_> = (0..30)
            .map(|_| {
                let ledger = stores.ledger.clone();
                tokio::spawn(async move { ledger.order(stampede_core::OrderId::new(id).unwrap()).await.unwrap() })
            })
            .collect();
        for read in reads {
            assert!(read.await.unwrap().is_some(), "round {round}: a reader does not see a committed order");
        }
    }
}

/// Another transaction repeatedly takes the locks of a recording in the opposite order, so that the database aborts the recording: it is
/// retried as a whole, and every order exists once.
macro_rules! deadlocks {
    ($connection:ty, $url:expr, $patient:expr, $waits:expr) => {{
        let url = $url;
        let fresh = Fresh::new(url.clone()).await;
        let rounds = stampede_testkit::count(20, 3) as i64;
        let sale = crate::conformance::sale_of(&fresh.stores, 1000).await;
        let mut other = <$connection>::connect(&url).await.unwrap();
        let mut observer = <$connection>::connect(&url).await.unwrap();
        raw_sql($patient).execute(&mut other).await.unwrap();
        let mut ours_lost = 0;
        for round in 1..=rounds {
            raw_sql("BEGIN").execute(&mut other).await.unwrap();
            // Many rows, so that the database prefers to abort the recording.
            for n in 0..50 {
                let id = 1_000_000 * round + n;
                let user = if n == 0 { round } else { id };
                let insert = format!(
                    "INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at)
                     VALUES ({id}, {sale}, {user}, 1, 'unpaid', 1, 1, 1, 1, 1)"
                );
                raw_sql(AssertSqlSafe(insert)).execute(&mut other).await.unwrap();
            }
            let stores = fresh.stores.clone();
            let recording =
                tokio::spawn(async move { crate::conformance::record(&stores, sale, &[(round, round)]).await });
            // MariaDB refreshes this table only if it was not read for a tenth of a second.
            let deadline = Instant::now() + Duration::from_secs(30);
            while query_scalar::<_, i64>($waits).fetch_one(&mut observer).await.unwrap() == 0 {
                assert!(Instant::now() < deadline, "the recording never waited");
                tokio::time::sleep(Duration::from_millis(150)).await;
            }
            let update = format!("UPDATE sale SET ver = ver WHERE id = {sale}");
            let update = raw_sql(AssertSqlSafe(update)).execute(&mut other).await;
            ours_lost += i64::from(update.is_ok());
            raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
            assert_eq!(recording.await.unwrap(), [RecordOutcome::Inserted]);
        }
        assert!(ours_lost > 0, "the recording was never the one that was ended");
        assert_eq!(crate::conformance::check(&fresh.stores, sale).await as i64, rounds);
    }};
}

/// Another client locks a sale: a rebuild of the gate begins, and loading the sale, or completing a reduction of it, fails after one wait.
macro_rules! locked_sale {
    ($connection:ty, $url:expr) => {{
        let fresh = Fresh::new($url).await;
        let ledger = &fresh.stores.ledger;
        let sale = crate::conformance::sale_of(&fresh.stores, 5).await;
        let from = ledger.gate_record("id").await.unwrap().incarnation;
        let mut other = <$connection>::connect(&fresh.url).await.unwrap();
        let lock = format!("BEGIN; SELECT id FROM sale WHERE id = {sale} FOR UPDATE");
        raw_sql(AssertSqlSafe(lock)).execute(&mut other).await.unwrap();
        let started = Instant::now();
        assert_eq!(ledger.begin_rebuild(from, "r").await.unwrap(), Some(from + 1));
        assert!(started.elapsed() < Duration::from_secs(3), "the rebuild has waited for the sale");
        let started = Instant::now();
        let loaded = ledger.begin_load(sale, Epoch(1), from + 1).await;
        assert!(matches!(loaded, Err(LedgerError::Conflict(_))), "{loaded:?}");
        assert!(started.elapsed() < Duration::from_secs(9), "{:?}: it has waited twice", started.elapsed());
        let started = Instant::now();
        let adopted = ledger.adopt_cap(sale, 1, 4, Timestamp::from_ms(1)).await;
        assert!(matches!(adopted, Err(LedgerError::Conflict(_))), "{adopted:?}");
        assert!(started.elapsed() < Duration::from_secs(9), "{:?}: it has waited twice", started.elapsed());
        raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
        assert!(ledger.begin_load(sale, Epoch(1), from + 1).await.unwrap().is_some());
    }};
}

/// Another client locks a sale with more due batches than are read at once: it is waited for once, and the orders of another sale expire.
macro_rules! locked_expiry {
    ($connection:ty, $url:expr) => {{
        let fresh = Fresh::new($url).await;
        let (stores, ledger) = (&fresh.stores, &fresh.stores.ledger);
        let sale = crate::conformance::sale_with_deadline(stores, 20, 1000).await;
        let other_sale = crate::conformance::another_sale_with_deadline(stores, 1, 1000).await;
        for id in 1..=12 {
            crate::conformance::record(stores, sale, &[(id, id)]).await;
        }
        crate::conformance::record(stores, other_sale, &[(100, 1)]).await;
        let due = stores.ledger.order(OrderId::new(100).unwrap()).await.unwrap().unwrap().pay_by.unwrap();
        let mut other = <$connection>::connect(&fresh.url).await.unwrap();
        let lock = format!("BEGIN; SELECT id FROM sale WHERE id = {sale} FOR UPDATE");
        raw_sql(AssertSqlSafe(lock)).execute(&mut other).await.unwrap();
        let started = Instant::now();
        let expired = ledger.expire_orders(due, 13, &[]).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(9), "{:?}: it has waited twice", started.elapsed());
        assert_eq!(expired.orders, 1, "of the other sale");
        assert!(matches!(expired.failed[..], [(failed, LedgerError::Conflict(_))] if failed == sale), "{expired:?}");
        crate::conformance::record(stores, other_sale, &[(101, 2)]).await;
        let due = due.max(stores.ledger.order(OrderId::new(101).unwrap()).await.unwrap().unwrap().pay_by.unwrap());
        let expired = ledger.expire_orders(due, 10, &[sale]).await.unwrap();
        assert_eq!((expired.orders, expired.failed.len()), (1, 0));
        raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
        assert_eq!(ledger.expire_orders(due, 20, &[]).await.unwrap().orders, 12);
        assert_eq!(crate::conformance::check(stores, sale).await, 0);
    }};
}

/// Another client locks the first orders of a sale, as a payment does: the others expire, those too that are recorded in later batches, and
/// nothing has failed.
macro_rules! locked_order_expiry {
    ($connection:ty, $url:expr) => {{
        let fresh = Fresh::new($url).await;
        let (stores, ledger) = (&fresh.stores, &fresh.stores.ledger);
        let order = |id| OrderId::new(id).unwrap();
        let sale = crate::conformance::sale_with_deadline(stores, 2000, 1000).await;
        for first in (1..=900).step_by(300) {
            let pairs: Vec<(i64, i64)> = (first..first + 300).map(|id| (id, id)).collect();
            crate::conformance::record(stores, sale, &pairs).await;
        }
        let due = ledger.order(order(900)).await.unwrap().unwrap().pay_by.unwrap();
        let mut other = <$connection>::connect(&fresh.url).await.unwrap();
        let lock =
            "BEGIN; SELECT id FROM orders WHERE id = 2 FOR UPDATE; SELECT id FROM orders WHERE id = 7 FOR UPDATE";
        raw_sql(lock).execute(&mut other).await.unwrap();
        let expire = async || {
            let expired = ledger.expire_orders(due, 10, &[]).await.unwrap();
            assert!(expired.failed.is_empty(), "{expired:?}");
            (expired.orders, expired.more, expired.done, expired.locked)
        };
        let locked = vec![(sale, order(2))];
        assert_eq!(expire().await, (298, true, vec![sale], locked.clone()));
        // Of the first batch nothing but the locked orders is left.
        assert_eq!(expire().await, (300, true, vec![sale], locked.clone()));
        assert_eq!(expire().await, (300, false, vec![sale], locked.clone()));
        assert_eq!(expire().await, (0, false, vec![], locked));
        assert_eq!(ledger.next_payment_due().await.unwrap(), Some(due), "the batch is still due");
        raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
        assert_eq!(expire().await, (2, false, vec![sale], vec![]));
        assert_eq!(ledger.next_payment_due().await.unwrap(), None);
        assert_eq!(crate::conformance::check(stores, sale).await, 0);
    }};
}

/// Returns when the task of a call waits for a lock. MariaDB refreshes its table only if it was not read for a tenth of a second.
macro_rules! until_it_waits {
    ($call:expr, $observer:expr, $waits:expr) => {{
        let deadline = Instant::now() + Duration::from_secs(30);
        while query_scalar::<_, i64>($waits).fetch_one(&mut $observer).await.unwrap() == 0 {
            assert!(Instant::now() < deadline && !$call.is_finished(), "the call has not waited");
            tokio::time::sleep(Duration::from_millis(150)).await;
        }
    }};
}

/// A rebuild of the gate is about to begin while the one before loads a sale: the load waits, and changes nothing.
macro_rules! overtaken_load {
    ($connection:ty, $url:expr, $waits:expr) => {{
        let fresh = Fresh::new($url).await;
        let ledger = fresh.stores.ledger.clone();
        let sale = crate::conformance::sale_of(&fresh.stores, 5).await;
        let from = ledger.gate_record("id").await.unwrap().incarnation;
        let before = ledger.sale(sale).await.unwrap();
        let mut other = <$connection>::connect(&fresh.url).await.unwrap();
        let mut observer = <$connection>::connect(&fresh.url).await.unwrap();
        raw_sql("BEGIN; UPDATE gate SET incarnation = incarnation + 1").execute(&mut other).await.unwrap();
        let loading = tokio::spawn(async move { ledger.begin_load(sale, Epoch(1), from).await });
        until_it_waits!(loading, observer, $waits);
        raw_sql("COMMIT").execute(&mut other).await.unwrap();
        assert_eq!(loading.await.unwrap().unwrap(), None);
        assert_eq!(fresh.stores.ledger.sale(sale).await.unwrap(), before);
    }};
}

/// Another client has locked a sale while its order is put into quarantine: that waits. If the client has raised the epoch, as a rebuild does,
/// the order is rejected.
macro_rules! overtaken_quarantine {
    ($connection:ty, $url:expr, $waits:expr) => {{
        let fresh = Fresh::new($url).await;
        let stores = &fresh.stores;
        let sale = crate::conformance::sale_of(stores, 5).await;
        let mut other = <$connection>::connect(&fresh.url).await.unwrap();
        let mut observer = <$connection>::connect(&fresh.url).await.unwrap();
        for (id, change, is_rejected) in [(1, "ver = ver", false), (2, "epoch = epoch + 1", true)] {
            let lock = format!("BEGIN; UPDATE sale SET {change} WHERE id = {sale}");
            raw_sql(AssertSqlSafe(lock)).execute(&mut other).await.unwrap();
            let (ledger, item) = (stores.ledger.clone(), crate::conformance::quarantined(sale, id, Epoch(1), "odd"));
            let quarantining = tokio::spawn(async move { ledger.quarantine(&item).await });
            until_it_waits!(quarantining, observer, $waits);
            assert_eq!(stores.ledger.quarantined(None, 10).await.unwrap().len(), usize::from(is_rejected));
            raw_sql("COMMIT").execute(&mut other).await.unwrap();
            let rejected = RecordOutcome::Rejected { reason: RejectReason::Epoch, existing: None };
            let expected = if is_rejected { rejected } else { RecordOutcome::Quarantined };
            assert_eq!(quarantining.await.unwrap().unwrap(), expected);
            let row = stores.ledger.order(OrderId::new(id).unwrap()).await.unwrap();
            assert_eq!(row.map(|order| order.status), is_rejected.then_some(OrderStatus::Rejected));
        }
        let left = stores.ledger.quarantined(None, 10).await.unwrap();
        assert_eq!(left, [crate::conformance::quarantined(sale, 1, Epoch(1), "odd")]);
        assert_eq!(stores.ledger.load(sale).await.unwrap().unwrap().marks.len(), 1, "the one in quarantine");
    }};
}

macro_rules! on {
    ($module:ident, $server:ident, $connection:ty, $patient:expr, $waits:expr, $refused:expr) => {
        mod $module {
            use super::*;
            use crate::audit::{REFUSED, rejects_changes};
            use crate::conformance::suite;

            fn url() -> String {
                stampede_testkit::$module::create_database(&$server, &name()).unwrap()
            }

            suite!(Fresh::new(url()).await, with_events: Fresh::with_events(url()).await);

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn calls_can_be_abandoned() {
                abandoned_calls_leave_no_snapshot_behind(url()).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn nodes_can_migrate_concurrently() {
                two_nodes_migrate_concurrently(url()).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn recording_is_retried_after_a_deadlock() {
                deadlocks!($connection, url(), $patient, $waits);
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_locked_sale_does_not_keep_a_rebuild_from_beginning() {
                locked_sale!($connection, url());
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn processes_agree_on_events() {
                let url = url();
                let (plain, writing) = (Fresh::new(url.clone()).await, Fresh::with_events(url).await);
                crate::conformance::processes_agree_on_events(&plain.stores, &writing.stores).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_locked_sale_holds_up_no_expiry_of_others() {
                locked_expiry!($connection, url());
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_locked_order_holds_up_no_expiry_of_others() {
                locked_order_expiry!($connection, url());
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_load_that_is_overtaken_by_a_rebuild_changes_nothing() {
                overtaken_load!($connection, url(), $waits);
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn an_order_is_not_put_into_quarantine_after_a_rebuild() {
                overtaken_quarantine!($connection, url(), $waits);
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn old_orders_are_listed_from_the_index_alone() {
                let fresh = Fresh::new(url()).await;
                let mut connection = <$connection>::connect(&fresh.url).await.unwrap();
                let execute = async |sql: &'static str| _ = raw_sql(sql).execute(&mut connection).await.unwrap();
                crate::conformance::old_orders_are_listed_from_the_index_alone(&fresh.stores, execute).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn discarded_order_with_a_row_keeps_it() {
                let fresh = Fresh::new(url()).await;
                let mut connection = <$connection>::connect(&fresh.url).await.unwrap();
                let execute = async |sql: &'static str| _ = raw_sql(sql).execute(&mut connection).await.unwrap();
                crate::conformance::discarded_order_with_a_row_keeps_it(&fresh.stores, execute).await;
            }

            #[tokio::test]
            async fn audit_log_rejects_changes() {
                let fresh = Fresh::new(url()).await;
                let stores = &fresh.stores;
                rejects_changes!($connection, stores, &fresh.url, refused: REFUSED, ignored: &[] as &[&str]);
                rejects_changes!($connection, stores, &fresh.url, refused: $refused, ignored: &[] as &[&str]);
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn reopened_database_keeps_its_data() {
                let fresh = Fresh::new(url()).await;
                let sale = crate::conformance::sale_of(&fresh.stores, 2).await;
                crate::conformance::record(&fresh.stores, sale, &[(1, 1), (2, 2)]).await;
                let before = fresh.stores.ledger.load(sale).await.unwrap();
                fresh.stores.ledger.close().await;
                assert_eq!(reopen(&fresh.url).await.ledger.load(sale).await.unwrap(), before);
            }
        }
    };
}

on!(
    mariadb,
    MARIADB,
    sqlx::MySqlConnection,
    "SET SESSION innodb_lock_wait_timeout = 50",
    "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id IN
         (SELECT id FROM information_schema.processlist WHERE db = DATABASE())",
    &[crate::audit::REPLACE]
);
on!(
    postgres,
    POSTGRES,
    sqlx::PgConnection,
    "SET deadlock_timeout = '20s'",
    "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
    &["TRUNCATE audit"]
);

/// With a binary log, recovery rolls back transactions that are not in it: a server that does not flush it at each commit is rejected, unless
/// InnoDB's log is flushed at prepare and at commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_with_an_unsynced_binary_log_is_rejected() {
    let server =
        stampede_testkit::mariadb::start_with(&["--log-bin=binlog", "--server-id=1", "--sync-binlog=0"]).unwrap();
    let url = stampede_testkit::mariadb::create_database(&server, "binlog").unwrap();
    let database = Database::parse(&url).unwrap();
    let mut administrator = sqlx::MySqlConnection::connect(&url).await.unwrap();
    for (sync_binlog, flush, durable) in [(0, 1, false), (100, 1, false), (1, 2, false), (1, 1, true), (0, 3, true)] {
        let set = format!("SET GLOBAL sync_binlog = {sync_binlog}, GLOBAL innodb_flush_log_at_trx_commit = {flush}");
        raw_sql(AssertSqlSafe(set)).execute(&mut administrator).await.unwrap();
        match open(&database).await {
            Ok(stores) => {
                assert!(durable, "sync_binlog = {sync_binlog} with {flush} was accepted");
                stores.ledger.close().await;
            }
            Err(error) => {
                let error = error.to_string();
                assert!(!durable && error.contains("not durable"), "sync_binlog = {sync_binlog} with {flush}: {error}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_ignored_by_postgres_are_an_outage() {
    let fresh = Fresh::new(stampede_testkit::postgres::create_database(&POSTGRES, &name()).unwrap()).await;
    let mut connection = sqlx::PgConnection::connect(&fresh.url).await.unwrap();
    let ignoring = "CREATE FUNCTION ignoring() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
        CREATE TRIGGER ignoring BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION ignoring()";
    raw_sql(ignoring).execute(&mut connection).await.unwrap();
    crate::conformance::ignored_rows_are_an_outage(&fresh.stores).await;
}

/// Without these settings a page that was written in part before a power failure cannot be repaired, or nothing is flushed at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_that_cannot_repair_its_pages_is_rejected() {
    for (options, setting) in [
        (&["--skip-log-bin", "--innodb-doublewrite=0"] as &[_], "innodb_doublewrite"),
        (&["--skip-log-bin", "--innodb-flush-method=nosync"], "innodb_flush_method"),
    ] {
        let server = stampede_testkit::mariadb::start_with(options).unwrap();
        let url = stampede_testkit::mariadb::create_database(&server, "torn").unwrap();
        let error = open(&Database::parse(&url).unwrap()).await.unwrap_err().to_string();
        assert!(error.contains("not durable") && error.contains(setting), "{options:?}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_that_cannot_repair_its_pages_is_rejected() {
    let server = stampede_testkit::postgres::start().unwrap();
    let url = stampede_testkit::postgres::create_database(&server, "torn").unwrap();
    let mut administrator = sqlx::PgConnection::connect(&url).await.unwrap();
    raw_sql("ALTER SYSTEM SET full_page_writes = off").execute(&mut administrator).await.unwrap();
    raw_sql("SELECT pg_reload_conf()").execute(&mut administrator).await.unwrap();
    stampede_testkit::until("the setting is in effect", async || {
        let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
        query_scalar::<_, String>("SHOW full_page_writes").fetch_one(&mut connection).await.unwrap() == "off"
    })
    .await;
    let error = open(&Database::parse(&url).unwrap()).await.unwrap_err().to_string();
    assert!(error.contains("not durable") && error.contains("full_page_writes"), "{error}");
}

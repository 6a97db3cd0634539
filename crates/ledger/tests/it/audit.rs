//! The audit log is append-only for every account of the database.

use sqlx::{Connection as _, MySqlConnection, raw_sql};
use stampede_core::Timestamp;
use stampede_core::ports::Stores;
use stampede_core::ports::{AuditFilter, AuditRow};
use stampede_ledger::{Database, open};

/// The row `n` of the action `action_id`.
pub fn row(n: i64, action_id: i64, target: &str, outcome: &str) -> AuditRow {
    AuditRow {
        id: n,
        action_id,
        at: Timestamp::from_ms(1_800_000_000_000 + n),
        actor: "alice".into(),
        address: "2001:db8::1".into(),
        request_id: "00112233aabbccdd".into(),
        action: "pause".into(),
        target: target.into(),
        outcome: outcome.into(),
        detail: r#"{"changes":[{"field":"title","from":"茶","to":"a \u0000 b"}]}"#.into(),
    }
}

pub async fn is_append_only(stores: &Stores) {
    let ledger = &stores.ledger;
    // The rows of two concurrent actions alternate.
    let rows = [
        row(1, 1, "voucher 7", "asked"),
        row(2, 2, "sale 9 · 测试", "asked"),
        row(3, 1, "sale 9", "done"),
        row(4, 2, "sale 9 · 测试", "illegal_step"),
        row(5, 5, "sale 9", "asked"),
    ];
    for row in &rows {
        ledger.audit(row).await.unwrap();
    }
    let [r1, r2, r3, r4, r5] = rows;
    ledger.audit(&row(3, 1, "something else", "done")).await.expect("a row that is there is left as it is");
    let log = async |target, before, limit| ledger.audit_log(AuditFilter { target, before, limit }).await.unwrap();
    assert_eq!(log(None, None, 2).await, [r5.clone(), r2.clone(), r4.clone()]);
    assert_eq!(log(None, Some(5), 10).await, [r2, r4, r1.clone(), r3.clone()]);
    assert_eq!(
        log(Some("sale 9"), None, 10).await,
        [r5.clone(), r1.clone(), r3.clone()],
        "as the target or as what was made"
    );
    assert_eq!(log(Some("sale 9"), None, 1).await, [r5]);
    assert_eq!(log(Some("sale 9"), Some(5), 1).await, [r1, r3]);
    assert!(log(Some("sale"), None, 10).await.is_empty());
}

/// Executes `$refused`, each of which must fail, and `$ignored`, which may succeed, on a separate connection; the log must be unchanged.
macro_rules! rejects_changes {
    ($connection:ty, $stores:expr, $url:expr, refused: $refused:expr, ignored: $ignored:expr) => {{
        use sqlx::Connection as _;
        let stores: &stampede_core::ports::Stores = $stores;
        for (n, outcome) in [(1, "asked"), (2, "done")] {
            stores.ledger.audit(&$crate::audit::row(n, 1, "sale 9", outcome)).await.unwrap();
        }
        let all = stampede_core::ports::AuditFilter { limit: 10, ..Default::default() };
        let before = stores.ledger.audit_log(all).await.unwrap();
        let mut connection = <$connection>::connect($url).await.unwrap();
        for statement in $refused {
            let error = sqlx::raw_sql(*statement).execute(&mut connection).await.expect_err(statement);
            assert!(error.to_string().contains("the audit log cannot be changed"), "{statement}: {error}");
        }
        for statement in $ignored {
            let _ = sqlx::raw_sql(*statement).execute(&mut connection).await;
        }
        assert_eq!(stores.ledger.audit_log(all).await.unwrap(), before);
    }};
}
pub(crate) use rejects_changes;

pub const REFUSED: &[&str] = &[
    "UPDATE audit SET actor = 'bob'",
    "UPDATE audit SET outcome = 'done' WHERE id = 1",
    "DELETE FROM audit WHERE id = 2",
    "DELETE FROM audit",
];

pub const REPLACE: &str =
    "REPLACE INTO audit (id, action_id, at, actor, address, request_id, action, target, outcome, detail)
    VALUES (1, 1, 1, 'bob', '', '', '', '', '', '')";

/// MySQL's default: a binary log, and an application account without SUPER, which may not create triggers. The first open fails with advice;
/// after an account with permission has created them, the application's account works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn triggers_need_an_account_with_permission() {
    let options = &["--log-bin=binlog", "--server-id=1", "--sync-binlog=1"];
    let server = stampede_testkit::mariadb::start_with(options).unwrap();
    let root = stampede_testkit::mariadb::create_database(&server, "shop").unwrap();
    let mut administrator = MySqlConnection::connect(&root).await.unwrap();
    let account = "CREATE USER app@'127.0.0.1' IDENTIFIED BY 'word'; GRANT ALL ON shop.* TO app@'127.0.0.1'";
    raw_sql(account).execute(&mut administrator).await.unwrap();
    let app = format!("mysql://app:word@127.0.0.1:{}/shop", server.port());
    let open = async |url: &str| open(&Database::parse(url).unwrap()).await;
    for _ in 0..2 {
        let error = open(&app).await.unwrap_err().to_string();
        assert!(error.contains("stampede migrate") && error.contains("log_bin_trust_function_creators"), "{error}");
    }
    open(&root).await.unwrap().ledger.close().await;
    let stores = open(&app).await.unwrap();
    rejects_changes!(MySqlConnection, &stores, &app, refused: REFUSED, ignored: &[] as &[&str]);
}

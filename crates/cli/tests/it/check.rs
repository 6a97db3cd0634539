//! `stampede check`: reports a violation of every invariant, and has no false findings on a running system.
//!
//! - [`steady_load`]: while orders are being recorded all the time

mod steady_load;

use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use stampede_core::{Clock as _, SystemClock};
use stampede_proof::history as recorded;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::proof::{parse_json, run_without_violation, small_bench, stampede};
use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage, TOKEN, command, temporary_storage};

/// The invariants that `check` reports as violated.
pub fn failed(output: &Output) -> Vec<u64> {
    let checks = parse_json(output);
    let all = checks["checks"].as_array().unwrap();
    let failed: Vec<u64> = all
        .iter()
        .filter(|check| check["result"] == "failed")
        .map(|check| check["invariant"].as_u64().unwrap())
        .collect();
    let code = if failed.is_empty() { 0 } else { 1 };
    assert_eq!(output.status.code(), Some(code), "{checks:#}");
    failed
}

fn check(data: &Path, history: Option<&Path>) -> Output {
    let mut command = stampede(&["check", "--json", "--data-dir"]);
    command.arg(data);
    if let Some(history) = history {
        command.arg("--history").arg(history);
    }
    command.output().unwrap()
}

async fn corrupt(database: &Path, sql: &str) {
    let mut connection = SqliteConnection::connect(&format!("sqlite:{}", database.display())).await.unwrap();
    let sql = format!("PRAGMA ignore_check_constraints = ON; PRAGMA foreign_keys = OFF; {sql}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn violation_of_every_invariant_is_reported() {
    let storage = temporary_storage();
    let (data, history) = (storage.path().join("node-0"), storage.path().join("history"));
    let mut command = small_bench(1);
    command.arg("--data-dir").arg(storage.path()).arg("--history").arg(&history);
    run_without_violation(command);
    assert_eq!(failed(&check(&data, Some(&history))), [0; 0]);
    let without = parse_json(&check(&data, None));
    let not_checkable = |checks: &Value| {
        let all = checks["checks"].as_array().unwrap().clone();
        let some = all.iter().filter(|check| check["result"] == "not_checkable");
        some.map(|check| check["invariant"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let expected = [1, 4, 5, 6, 6, 10, 11];
    assert_eq!(
        not_checkable(&without),
        expected,
        "the gate of a stopped system, what needs a history, epochs, the backlog"
    );

    let good = std::fs::read(data.join("stampede.db")).unwrap();
    let lines: Vec<Value> =
        std::fs::read_to_string(&history).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let some_order = "(SELECT MIN(id) FROM orders WHERE live = 1)";
    for (invariant, sql) in [
        (1, "UPDATE sale SET sold = sold - 1 WHERE sold > 1".to_owned()),
        (2, "UPDATE sale SET total = sold - 1, cap = sold - 1 WHERE sold > 1".to_owned()),
        (3, format!("DROP INDEX IF EXISTS x; CREATE TABLE o AS SELECT * FROM orders; DROP TABLE orders; ALTER TABLE o RENAME TO orders;
            INSERT INTO orders SELECT id + 1, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at, pay_by
            FROM orders WHERE id = {some_order}")),
        (7, format!("UPDATE orders SET id = id + (1000000 << 22) WHERE id = {some_order}")),
        (8, format!("UPDATE orders SET created_at = 5 WHERE id = {some_order}")),
        (9, format!("UPDATE orders SET status = 'paid', live = NULL WHERE id = {some_order}")),
        (9, format!("UPDATE orders SET status = 'paid' WHERE id = {some_order}")),
        (9, format!("INSERT INTO order_events SELECT id, 'unpaid', 'refunded', updated_at, NULL, 'system' FROM orders WHERE id = {some_order}")),
        (9, format!("INSERT INTO payment (provider, transaction_id, order_id, amount_cents, status, received_at)
            SELECT 'p', 't', id, price_cents, 'paid', updated_at FROM orders WHERE id = {some_order}")),
        (9, "INSERT INTO payment (provider, transaction_id, order_id, amount_cents, status, received_at)
            VALUES ('p', 't', 404, 100, 'paid', 1)".to_owned()),
        (10, format!("UPDATE orders SET epoch = 7 WHERE id = {some_order}")),
        (11, format!("INSERT INTO pending_releases SELECT id, sale_id, user_id FROM orders WHERE id = {some_order}")),
    ] {
        corrupt(&data.join("stampede.db"), &sql).await;
        let found = failed(&check(&data, None));
        assert!(found.contains(&invariant), "{invariant}: {found:?}");
        for file in ["stampede.db-wal", "stampede.db-shm"] {
            let _ = std::fs::remove_file(data.join(file));
        }
        std::fs::write(data.join("stampede.db"), &good).unwrap();
    }

    let confirmed = lines.iter().position(|line| line["response"] == "created").unwrap();
    let late = lines.iter().position(|line| line["response"] == "sold_out").unwrap();
    let written = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut lines = lines.clone();
        change(&mut lines);
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&history, text).unwrap();
        failed(&check(&data, Some(&history)))
    };
    assert!(written(&|lines| lines[confirmed]["order"] = json!("12345")).contains(&4), "a confirmation without a row");
    let user = lines[confirmed]["user"].clone();
    assert!(written(&|lines| lines.retain(|line| line["user"] != user)).contains(&5), "a row without an attempt");
    // A buyer got this response before any order existed.
    let early = |lines: &mut Vec<Value>| {
        lines[late]["start_us"] = json!(0);
        lines[late]["end_us"] = json!(1);
    };
    assert!(written(&early).contains(&6), "sold out too early");
    assert!(written(&|lines| lines[late]["response"] = json!("paused")).contains(&6), "a refusal for another reason");
    let twice = |lines: &mut Vec<Value>| {
        let mut other = lines[confirmed].clone();
        other["user"] = json!("1");
        lines.push(other);
    };
    assert!(written(&twice).contains(&7), "one id for two users");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_system_is_checked_through_its_routes() {
    let storage = crate::shop::Storage::on(Kind::Sqlite);
    let mut serve = command(&storage);
    serve.env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    let shop = Shop::run(serve);
    let target = format!("http://{}", shop.address);
    let arguments = [
        "bench",
        "--json",
        "--seconds",
        "0.1",
        "--buyers",
        "200",
        "--stock",
        "20",
        "--connections",
        "8",
        "--storm-seconds",
        "1",
    ];
    let run = |arguments: Vec<String>| {
        tokio::task::spawn_blocking(move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            stampede(&arguments).env("STAMPEDE_ADMIN_TOKEN", TOKEN).output().unwrap()
        })
    };
    let with_target = |arguments: &[&str]| {
        let given = arguments.iter().map(|&argument| argument.to_owned());
        given.chain(["--target".to_owned(), target.clone()]).collect::<Vec<String>>()
    };
    let output = run(with_target(&arguments)).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let output = run(with_target(&["check", "--json"])).await.unwrap();
    assert_eq!(failed(&output), [0; 0]);
    let gate = parse_json(&output)["checks"][1].clone();
    assert_eq!((&gate["invariant"], &gate["result"]), (&json!(1), &json!("passed")), "the gate was compared");
    let not_checkable = |output: &Output| {
        let checks = parse_json(output)["checks"].as_array().unwrap().clone();
        checks.iter().filter(|check| check["result"] == "not_checkable").count()
    };
    assert_eq!(
        not_checkable(&output),
        10,
        "the sums of the ledger, pending work, what needs a history, steps and payments, epochs, the backlog"
    );
    let data = storage.path().display().to_string();
    let output = run(with_target(&["check", "--json", "--data-dir", &data])).await.unwrap();
    assert_eq!(
        (failed(&output), not_checkable(&output)),
        (Vec::new(), 6),
        "with the database, the sums, the pending work, steps and payments are checked"
    );
    // Without the setting there is neither a no-op route nor test sessions.
    let plain = Shop::open(&temporary_storage());
    let target = format!("http://{}", plain.address);
    let output = run(vec!["bench".to_owned(), "--target".to_owned(), target]).await.unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("404"), "{output:?}");
}

/// Refusals by a rate limit are not presented as the speed of the system.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_of_a_target_with_low_limits_is_not_a_measurement() {
    let storage = temporary_storage();
    let mut serve = command(&storage);
    serve.env("STAMPEDE__ALLOW_LOAD_TEST", "true").env("STAMPEDE__BUY__PER_USER__COUNT", "5");
    let shop = Shop::run(serve);
    let mut bench = stampede(&["bench", "--json", "--seconds", "0.1", "--buyers", "50", "--stock", "5"]);
    bench.args(["--connections", "8", "--storm-seconds", "0.5"]).args(target(&shop)).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = tokio::task::spawn_blocking(move || bench.output().unwrap()).await.unwrap();
    let (report, errors) = (parse_json(&output), String::from_utf8_lossy(&output.stderr).into_owned());
    assert_eq!((output.status.code(), &report["violations"]), (Some(2), &json!([])), "{errors}");
    for text in [report["distorted"].as_str().unwrap(), &errors] {
        assert!(text.contains("429") && text.contains("buy.per_user") && text.contains("buy.per_address"), "{text}");
    }
}

/// Runs `stampede check --json` with these arguments in the background.
pub async fn check_with(arguments: Vec<String>) -> Output {
    let run = move || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        stampede(&["check", "--json"]).args(&arguments).env("STAMPEDE_ADMIN_TOKEN", TOKEN).output().unwrap()
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

pub fn target(shop: &Shop) -> [String; 2] {
    ["--target".to_owned(), format!("http://{}", shop.address)]
}

fn migrated() -> Storage {
    let storage = temporary_storage();
    assert!(stampede(&["migrate", "--data-dir"]).arg(storage.path()).status().unwrap().success());
    storage
}

#[test]
fn empty_ledger_is_not_checkable() {
    let storage = migrated();
    let output = check(storage.path(), None);
    assert_eq!(output.status.code(), Some(2), "there is nothing to check");
    assert!(parse_json(&output)["checks"].as_array().unwrap().iter().all(|line| line["result"] == "not_checkable"));

    let history = storage.path().join("history");
    let line = json!({ "sale": "7", "user": "8", "start_us": 1, "end_us": 2, "response": "created", "order": "9" });
    std::fs::write(&history, format!("{line}\n")).unwrap();
    let output = check(storage.path(), Some(&history));
    assert_eq!(failed(&output), [4]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("sale 7, which the ledger does not have"));
    // A sale that is named is judged in the same way. Without attempts at it, there is nothing to check.
    let check_sale = |sale: &str, history: Option<&Path>| {
        let mut command = stampede(&["check", "--json", "--sale", sale, "--data-dir"]);
        command.arg(storage.path()).args(history.map(|_| "--history")).args(history);
        command.output().unwrap()
    };
    let output = check_sale("7", Some(&history));
    assert_eq!((failed(&output), output.status.code()), (vec![4], Some(1)), "{output:?}");
    for output in [check_sale("7", None), check_sale("8", Some(&history))] {
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("there is no sale"), "{output:?}");
    }
    std::fs::write(&history, "").unwrap();
    assert_eq!(check(storage.path(), Some(&history)).status.code(), Some(2), "an empty history is not checkable");
}

#[test]
fn unreadable_database_is_not_checkable() {
    let storage = temporary_storage();
    let output = check(storage.path(), None);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no database"), "{output:?}");
    let mut command = stampede(&["check", "--target", "http://127.0.0.1:1"]);
    assert_eq!(command.env("STAMPEDE_ADMIN_TOKEN", TOKEN).output().unwrap().status.code(), Some(2));
    let help = stampede(&["check", "--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("Exit codes: 0"), "{help:?}");
}

/// A database of an older version is reported and left unchanged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_does_not_migrate_the_database() {
    let storage = migrated();
    let database = storage.path().join("stampede.db");
    corrupt(&database, "DELETE FROM _sqlx_migrations; DROP TABLE stock_change; PRAGMA journal_mode = DELETE").await;
    let before = std::fs::read(&database).unwrap();
    let output = check(storage.path(), None);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("older than this version") && error.contains("stampede migrate"), "{error}");
    assert!(std::fs::read(&database).unwrap() == before, "the database was changed");
}

/// A database without write permission can be checked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_database_can_be_checked() {
    for kind in [Kind::MariaDb, Kind::Postgres] {
        let storage = Storage::on(kind);
        let shop = Shop::open(&storage);
        let sale = shop.create_sale(3).await;
        let ledger = crate::shop::read_only(&storage).await;
        assert!(ledger.inspect(sale).await.unwrap().is_some());
        let ended = ledger.set_status(sale, stampede_core::SaleStatus::Ended, None, SystemClock.now()).await;
        ended.expect_err("it was opened to be read");
        ledger.close().await;
    }
}

/// Some time after its end a sale is evicted from the gate; the others are still checked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sale_evicted_from_the_gate_does_not_stop_the_check() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    shop.create_sale(1).await;
    let day = Duration::from_secs(24 * 3600);
    let made = shop.admin("shops", &json!({ "type_id": "1", "name": "Old" })).await.text("id");
    let voucher = json!({ "shop_id": made, "kind": "flash_sale", "title": "Old", "price_cents": 1, "worth_cents": 2 });
    let voucher = shop.admin("vouchers", &voucher).await.text("id");
    let now = SystemClock.now();
    let sale = json!({ "voucher_id": voucher, "stock": 5, "begin": now.minus(day * 3), "end": now.minus(day * 2) });
    let sale = shop.admin("sales", &sale).await.text("id");
    let gate = shop.client().await.get(&format!("/admin/v1/sales/{sale}/gate"), TOKEN).await.unwrap();
    assert_eq!(gate.status, 404, "the gate does not have it");
    let output = check_with(target(&shop).into()).await;
    assert_eq!(failed(&output), [0; 0]);
}

/// A running system of the tier `shared`, with gate, outbox and ledger: every invariant is checked through the nodes, the database and a
/// history; without the history, only what needs it is not. A row that was changed by hand is found.
async fn running_system_of_shared_is_checked(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let buyers = nodes.shops[0].log_in(0, 12).await;
    let sale = nodes.create_sale(8).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &buyers[..4], 1).await;
    // After a rebuild there are orders of two epochs.
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    until("the gate is rebuilt", async || {
        let mut client = nodes.shops[0].client().await;
        history.buy(&mut client, sale, &buyers[4]).await.response.is_confirmation()
    })
    .await;
    nodes.wait_until_open(sale).await;
    nodes.storm(&history, sale, &buyers, 1).await;
    assert!(history.count(Response::SoldOut) > 0, "it is sold out");

    let results = |output: &Output| {
        let checks = parse_json(output)["checks"].as_array().unwrap().clone();
        let result =
            |check: &Value| (check["invariant"].as_u64().unwrap(), check["result"].as_str().unwrap().to_owned());
        checks.iter().map(result).collect::<Vec<_>>()
    };
    let expected = |not_checkable: &[u64]| {
        let of = |invariant: u64| {
            let result = if not_checkable.contains(&invariant) { "not_checkable" } else { "passed" };
            (invariant, result.to_owned())
        };
        [1, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 11].map(of)
    };
    let database = ["--database".to_owned(), nodes.storages[0].url()];
    let everything: Vec<String> = database.iter().cloned().chain(nodes.shops.iter().flat_map(target)).collect();
    let file = nodes.storages[0].path().join("history");
    recorded::write(&history.ended(), std::fs::File::create(&file).unwrap()).unwrap();
    let with_history = everything.iter().cloned().chain(["--history".into(), file.display().to_string()]);
    let output = check_with(with_history.collect()).await;
    assert_eq!((output.status.code(), &results(&output)[..]), (Some(0), &expected(&[])[..]), "{output:?}");
    let output = check_with(everything).await;
    assert_eq!((output.status.code(), &results(&output)[..]), (Some(0), &expected(&[4, 5, 6])[..]), "{output:?}");

    execute(kind, &nodes.storages[0], &format!("UPDATE sale SET sold = sold - 1 WHERE id = {sale}")).await;
    let output = check_with(database.into_iter().chain(target(&nodes.shops[0])).collect()).await;
    assert_eq!(failed(&output), [1], "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("sold is 7, live rows are 8"), "{output:?}");

    // A payment for an order that no sale has.
    let stray = "INSERT INTO payment (provider, transaction_id, order_id, amount_cents, status, received_at)
        VALUES ('p', 't', 404, 100, 'paid', 1)";
    execute(kind, &nodes.storages[0], stray).await;
    let output = check_with(vec!["--database".to_owned(), nodes.storages[0].url()]).await;
    assert_eq!(failed(&output), [1, 9], "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("order 404, which has no row, has paid it"), "{output:?}");
}

on_each_database!(servers: running_system_of_shared_is_checked);

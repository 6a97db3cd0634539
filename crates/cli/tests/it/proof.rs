//! `stampede bench` and `stampede check`: right without a bug, and every planted one is caught and named.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use stampede_testkit::count;

use crate::shop::{Kind, Shop, TOKEN, command, folder};

fn stampede(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(arguments).current_dir(env!("CARGO_TARGET_TMPDIR")).env_remove("STAMPEDE_ADMIN_TOKEN");
    command
}

/// A small benchmark: seconds, not minutes.
fn small(seed: u64) -> Command {
    let mut command = stampede(&["bench", "--json", "--seconds", "0.2", "--buyers", "400", "--stock", "100"]);
    command.args(["--connections", "32", "--seed", &seed.to_string()]);
    command
}

fn told(output: &Output) -> Value {
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}\n{errors}"))
}

fn passes(mut command: Command) -> Value {
    let output = command.output().unwrap();
    let report = told(&output);
    assert!(output.status.success(), "{:#}", report["violations"]);
    assert_eq!(report["violations"], json!([]));
    report
}

#[test]
fn the_report_has_what_it_promises() {
    let report = passes(small(1));
    assert_eq!(report["tier"], "solo");
    for member in [
        "/connections",
        "/nodes",
        "/noop/per_s",
        "/noop/cpu_us",
        "/batch/p50",
        "/batch/max",
        "/peak_rss_bytes",
        "/steal",
        "/orders/count",
        "/orders/per_s",
        "/orders/vs_noop",
        "/orders/cpu_us",
        "/refusals/count",
        "/refusals/per_s",
        "/refusals/vs_noop",
        "/refusals/cpu_us",
        "/latency_ms/order/p50",
        "/latency_ms/order/p99",
        "/latency_ms/order/p999",
        "/latency_ms/refusal/p50",
        "/latency_ms/refusal/p99",
        "/latency_ms/refusal/p999",
    ] {
        assert!(report.pointer(member).is_some_and(Value::is_number), "{member} in {report:#}");
    }
    let storm = &report["storm"];
    assert_eq!((&storm["buyers"], &storm["stock"], &storm["sold"]), (&json!(400), &json!(100), &json!(100)));
    for nothing in ["oversold", "undersold", "duplicated", "lost", "unexpected"] {
        assert_eq!(storm[nothing], json!(0), "{nothing}");
    }
    assert_eq!(report["orders"]["other"], json!(0), "everybody got one");
}

/// Under 256 connections batches grow by themselves: the median is above 16. A crowd that the machine lets starve is no crowd, so it
/// may try three times.
#[test]
fn batches_grow_with_the_crowd() {
    let batch = || {
        let mut command = stampede(&["bench", "--json", "--buyers", "4096", "--connections", "256"]);
        command.args(["--seconds", if count(1, 0) == 1 { "5" } else { "1" }]);
        passes(command)["batch"].clone()
    };
    let mut batches = std::iter::repeat_with(batch).take(3);
    assert!(batches.any(|batch| batch["p50"].as_f64().is_some_and(|p50| p50 > 16.0)), "the median was never above 16");
}

#[test]
fn no_violation_whatever_the_seed() {
    for seed in 0..count(50, 3) {
        passes(small(seed));
    }
}

#[test]
fn no_violation_though_the_server_is_killed() {
    for seed in 0..count(50, 3) {
        let mut command = small(seed);
        command.arg("--kill");
        passes(command);
    }
}

#[test]
fn no_violation_on_shared_databases_with_two_nodes() {
    for database in ["mariadb", "postgres"] {
        for seed in 0..count(10, 1) {
            let mut command = small(seed);
            command.args(["--private-servers", "--database", database, "--nodes", "2"]);
            let report = passes(command);
            assert_eq!(report["nodes"], json!(2));
        }
    }
}

#[test]
fn in_open_loop_latency_counts_from_when_it_was_due() {
    let mut command = small(1);
    // Far more than it can answer: who waits longest waits for most of the run.
    command.args(["--rate", "1000000"]);
    let report = passes(command);
    let (p50, p99) = (&report["latency_ms"]["refusal"]["p50"], &report["latency_ms"]["refusal"]["p99"]);
    assert!(p50.as_f64().unwrap() > 20.0 && p99.as_f64() > p50.as_f64(), "{p50} {p99}");
}

/// The bug is caught, and called by this name.
fn caught(bug: &str, flags: &[&str], named: &str) {
    // Whether a bug does harm may be a matter of luck; not for long.
    for seed in 0..20 {
        let mut command = small(seed);
        command.args(flags).env("STAMPEDE_PLANT", bug);
        let output = command.output().unwrap();
        if !output.status.success() {
            let violations = told(&output)["violations"].to_string();
            return assert!(violations.contains(named), "{bug}: {violations}");
        }
    }
    panic!("{bug} was never caught");
}

#[test]
fn a_skipped_duplicate_test_is_caught() {
    caught("skip-duplicate", &[], "duplicated");
}

#[test]
fn stock_that_is_returned_twice_is_caught() {
    caught("release-twice", &[], "live rows are");
}

#[test]
fn an_answer_before_the_commit_is_caught() {
    caught("answer-early", &["--kill"], "lost: order");
}

#[test]
fn a_count_written_while_orders_are_on_their_way_is_caught() {
    caught("reconcile-count", &[], "the gate's cap is");
}

/// The invariants that `check` says have failed.
fn failed(output: &Output) -> Vec<u64> {
    let checks = told(output);
    let all = checks["checks"].as_array().unwrap();
    let failed: Vec<u64> = all
        .iter()
        .filter(|check| check["result"] == "failed")
        .map(|check| check["invariant"].as_u64().unwrap())
        .collect();
    assert_eq!(output.status.success(), failed.is_empty(), "{checks:#}");
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

async fn spoil(database: &Path, sql: &str) {
    let mut connection = SqliteConnection::connect(&format!("sqlite:{}", database.display())).await.unwrap();
    let sql = format!("PRAGMA ignore_check_constraints = ON; PRAGMA foreign_keys = OFF; {sql}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_invariant_has_a_violation_that_check_names() {
    let place = folder();
    let (data, history) = (place.path().join("node-0"), place.path().join("history"));
    let mut command = small(1);
    command.arg("--data-dir").arg(place.path()).arg("--history").arg(&history);
    passes(command);
    assert_eq!(failed(&check(&data, Some(&history))), [0; 0]);
    let without = told(&check(&data, None));
    let not_checkable = |checks: &Value| {
        let all = checks["checks"].as_array().unwrap().clone();
        let some = all.iter().filter(|check| check["result"] == "not_checkable");
        some.map(|check| check["invariant"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(not_checkable(&without), [1, 4, 5, 6], "the gate of a stopped system, and what needs a history");

    let good = std::fs::read(data.join("stampede.db")).unwrap();
    let lines: Vec<Value> =
        std::fs::read_to_string(&history).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let some_order = "(SELECT MIN(id) FROM orders WHERE live = 1)";
    for (invariant, sql) in [
        (1, "UPDATE sale SET sold = sold - 1 WHERE sold > 1".to_owned()),
        (2, "UPDATE sale SET total = sold - 1, cap = sold - 1 WHERE sold > 1".to_owned()),
        (3, format!("DROP INDEX IF EXISTS x; CREATE TABLE o AS SELECT * FROM orders; DROP TABLE orders; ALTER TABLE o RENAME TO orders;
            INSERT INTO orders SELECT id + 1, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at
            FROM orders WHERE id = {some_order}")),
        (7, format!("UPDATE orders SET id = id + (1000000 << 22) WHERE id = {some_order}")),
        (8, format!("UPDATE orders SET created_at = 5 WHERE id = {some_order}")),
        (9, format!("UPDATE orders SET status = 'paid', live = NULL WHERE id = {some_order}")),
        (10, format!("UPDATE orders SET epoch = 7 WHERE id = {some_order}")),
        (11, format!("INSERT INTO owed SELECT id, sale_id, user_id FROM orders WHERE id = {some_order}")),
    ] {
        spoil(&data.join("stampede.db"), &sql).await;
        let found = failed(&check(&data, None));
        assert!(found.contains(&invariant), "{invariant}: {found:?}");
        for file in ["stampede.db-wal", "stampede.db-shm"] {
            let _ = std::fs::remove_file(data.join(file));
        }
        std::fs::write(data.join("stampede.db"), &good).unwrap();
    }

    let yes = lines.iter().position(|line| line["heard"] == "created").unwrap();
    let late = lines.iter().position(|line| line["heard"] == "sold_out").unwrap();
    let written = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut lines = lines.clone();
        change(&mut lines);
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&history, text).unwrap();
        failed(&check(&data, Some(&history)))
    };
    assert!(written(&|lines| lines[yes]["order"] = json!("12345")).contains(&4), "a yes without a row");
    let user = lines[yes]["user"].clone();
    assert!(written(&|lines| lines.retain(|line| line["user"] != user)).contains(&5), "a row without an attempt");
    // One who was told so before anybody had bought anything.
    let early = |lines: &mut Vec<Value>| {
        lines[late]["start_us"] = json!(0);
        lines[late]["end_us"] = json!(1);
    };
    assert!(written(&early).contains(&6), "told sold out too early");
    let twice = |lines: &mut Vec<Value>| {
        let mut other = lines[yes].clone();
        other["user"] = json!("1");
        lines.push(other);
    };
    assert!(written(&twice).contains(&7), "one id for two people");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_system_is_checked_through_its_own_routes() {
    let place = crate::shop::Place::on(Kind::Sqlite);
    let mut serve = command(&place);
    serve.env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    let shop = Shop::run(serve);
    let target = format!("http://{}", shop.address);
    let arguments = ["bench", "--json", "--seconds", "0.1", "--buyers", "200", "--stock", "20", "--connections", "8"];
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
    let gate = told(&output)["checks"][1].clone();
    assert_eq!((&gate["invariant"], &gate["result"]), (&json!(1), &json!("passed")), "the gate was asked");
    let not_checkable = |output: &Output| {
        let checks = told(output)["checks"].as_array().unwrap().clone();
        checks.iter().filter(|check| check["result"] == "not_checkable").count()
    };
    assert_eq!(not_checkable(&output), 5, "the ledger's own sums and what is left over, and what needs a history");
    let data = place.path().display().to_string();
    let output = run(with_target(&["check", "--json", "--data-dir", &data])).await.unwrap();
    assert_eq!(
        (failed(&output), not_checkable(&output)),
        (Vec::new(), 3),
        "with the database only a history is missing"
    );
    // Without the setting there are neither no-op nor test sessions.
    let plain = Shop::open(&folder());
    let target = format!("http://{}", plain.address);
    let output = run(vec!["bench".to_owned(), "--target".to_owned(), target]).await.unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("404"), "{output:?}");
}

//! `stampede check`: reports a violation of every invariant, and has no false findings on a running system.

use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use stampede_core::{Clock as _, SystemClock};
use stampede_proof::history as recorded;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, until};

use crate::proof::{parse_json, run_without_violation, small_bench, stampede};
use crate::shop::{Kind, Shop, Storage, TOKEN, command, temporary_storage, verify};

/// The invariants that `check` reports as violated.
fn failed(output: &Output) -> Vec<u64> {
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
    let expected = [1, 4, 5, 6, 6, 9, 10, 11];
    assert_eq!(
        not_checkable(&without),
        expected,
        "the gate of a stopped system, what needs a history, transitions, epochs, the backlog"
    );

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
        9,
        "the sums of the ledger, pending work, what needs a history, transitions, epochs, the backlog"
    );
    let data = storage.path().display().to_string();
    let output = run(with_target(&["check", "--json", "--data-dir", &data])).await.unwrap();
    assert_eq!(
        (failed(&output), not_checkable(&output)),
        (Vec::new(), 7),
        "with the database, the sums and the pending work are checked"
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
async fn check_with(arguments: Vec<String>) -> Output {
    let run = move || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        stampede(&["check", "--json"]).args(&arguments).env("STAMPEDE_ADMIN_TOKEN", TOKEN).output().unwrap()
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn target(shop: &Shop) -> [String; 2] {
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
        let ended = ledger.set_status(sale, stampede_core::SaleStatus::Ended).await;
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

/// Buyers who buy and cancel until they are stopped.
fn steady_load(shop: &Shop, buyers: Vec<crate::shop::Buyer>, sale: stampede_core::SaleId) -> SteadyLoad {
    let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
    let press = |buyer: crate::shop::Buyer| {
        let (history, stop, address) = (history.clone(), stop.clone(), shop.address);
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                let bought = history.buy(&mut client, sale, &buyer).await;
                assert!(bought.response.is_confirmation(), "{bought:?}");
                history.cancel(&mut client, sale, &buyer, bought.order.unwrap()).await;
            }
            history.buy(&mut client, sale, &buyer).await;
        })
    };
    let tasks = buyers.into_iter().map(press).collect();
    SteadyLoad { history, stop, tasks }
}

struct SteadyLoad {
    history: Arc<Recorder>,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl SteadyLoad {
    async fn end(self) -> Arc<Recorder> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.history
    }
}

/// Orders are being recorded in every pass, and there are no findings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_findings_under_steady_load() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(1000).await;
    let buyers = shop.log_in(0, 24).await;
    let load = steady_load(&shop, buyers, sale);
    let data = ["--data-dir".to_owned(), storage.path().display().to_string()];
    let begun = Instant::now();
    for _ in 0..count(20, 3) {
        assert_eq!(failed(&check_with(target(&shop).into()).await), [0; 0], "through its routes");
        let both = target(&shop).into_iter().chain(data.clone()).collect();
        assert_eq!(failed(&check_with(both).await), [0; 0], "with its database");
    }
    let history = load.end().await;
    let orders = history.count(Response::Created);
    assert!(orders > 100, "{orders} orders in {:?} are no load", begun.elapsed());

    // Afterwards everything matches, and every confirmation has its row.
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 24);
    let file = storage.path().join("history");
    recorded::write(&history.ended(), std::fs::File::create(&file).unwrap()).unwrap();
    let all = target(&shop).into_iter().chain(data).chain(["--history".into(), file.display().to_string()]).collect();
    assert_eq!(failed(&check_with(all).await), [0; 0]);
}

/// A real violation is found although orders are being recorded all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn violation_is_found_under_steady_load() {
    let storage = temporary_storage();
    let mut planted = command(&storage);
    planted.env("STAMPEDE_PLANTED_BUGS", "reconcile-count");
    let shop = Shop::run(planted);
    let sale = shop.create_sale(1000).await;
    let buyers = shop.log_in(0, 24).await;
    let load = steady_load(&shop, buyers, sale);
    // A check that finds nothing ends with its first pass, so the bug must have had its effect before.
    let mut client = shop.client().await;
    until("the planted bug has changed the gate", async || {
        client.get(&format!("/admin/v1/sales/{sale}/gate"), TOKEN).await.unwrap().json()["cap"] != 1000
    })
    .await;
    let output = check_with(target(&shop).into()).await;
    assert_eq!(failed(&output), [1], "{output:?}");
    load.end().await;
}

/// The gates of all nodes are compared, and the wrong one is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gates_of_all_nodes_are_compared() {
    let server = Kind::Postgres.server().unwrap();
    let url = Kind::Postgres.create_database(server, server.port());
    let (storage, other) = (Storage::with(Some(url.clone())), Storage::with(Some(url)));
    let right = Shop::open(&storage);
    let mut planted = command(&other);
    planted.env("STAMPEDE_PLANTED_BUGS", "reconcile-count");
    let wrong = Shop::run(planted);
    let sale = right.create_sale(1000).await;
    wrong.wait_for_sale(sale).await;
    let load = steady_load(&wrong, right.log_in(0, 24).await, sale);
    let both: Vec<String> = target(&right).into_iter().chain(target(&wrong)).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    // The bug has an effect only sometimes, so the check is repeated.
    loop {
        let output = check_with(both.clone()).await;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains("the gate's cap is") && text.contains(&format!("at {}", wrong.address)) {
            assert_eq!(output.status.code(), Some(1));
            break;
        }
        assert!(Instant::now() < deadline, "{text}");
    }
    load.end().await;
    assert_eq!(failed(&check_with(target(&right).into()).await), [0; 0], "the other is right");
}

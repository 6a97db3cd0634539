//! `stampede check`: each invariant has a violation that it names, and it is neither blind nor wrong on a live shop.

use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use stampede_core::{Clock as _, SystemClock};
use stampede_proof::history as recorded;
use stampede_testkit::{Client, count};

use crate::history::{Heard, History};
use crate::proof::{passes, small, stampede, told};
use crate::shop::{Kind, Place, Shop, TOKEN, command, folder};

/// The invariants that `check` says have failed.
fn failed(output: &Output) -> Vec<u64> {
    let checks = told(output);
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
    let expected = [1, 4, 5, 6, 6, 9, 10];
    assert_eq!(
        not_checkable(&without),
        expected,
        "the gate of a stopped system, what needs a history, steps and epochs"
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
    // A buyer who got this answer before any order was made.
    let early = |lines: &mut Vec<Value>| {
        lines[late]["start_us"] = json!(0);
        lines[late]["end_us"] = json!(1);
    };
    assert!(written(&early).contains(&6), "told sold out too early");
    assert!(written(&|lines| lines[late]["heard"] = json!("paused")).contains(&6), "a refusal for another reason");
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
    let gate = told(&output)["checks"][1].clone();
    assert_eq!((&gate["invariant"], &gate["result"]), (&json!(1), &json!("passed")), "the gate was asked");
    let not_checkable = |output: &Output| {
        let checks = told(output)["checks"].as_array().unwrap().clone();
        checks.iter().filter(|check| check["result"] == "not_checkable").count()
    };
    assert_eq!(
        not_checkable(&output),
        8,
        "the ledger's own sums, what is left over, what needs a history, steps and epochs"
    );
    let data = place.path().display().to_string();
    let output = run(with_target(&["check", "--json", "--data-dir", &data])).await.unwrap();
    assert_eq!(
        (failed(&output), not_checkable(&output)),
        (Vec::new(), 6),
        "with the database the first two are checked"
    );
    // Without the setting there are neither no-op nor test sessions.
    let plain = Shop::open(&folder());
    let target = format!("http://{}", plain.address);
    let output = run(vec!["bench".to_owned(), "--target".to_owned(), target]).await.unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("404"), "{output:?}");
}

/// `stampede check --json` with these arguments, beside whatever the test does.
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

fn migrated() -> Place {
    let place = folder();
    assert!(stampede(&["migrate", "--data-dir"]).arg(place.path()).status().unwrap().success());
    place
}

#[test]
fn an_empty_ledger_does_not_pass() {
    let place = migrated();
    let output = check(place.path(), None);
    assert_eq!(output.status.code(), Some(2), "there is nothing to check");
    assert!(told(&output)["checks"].as_array().unwrap().iter().all(|line| line["result"] == "not_checkable"));

    let history = place.path().join("history");
    let line = json!({ "sale": "7", "user": "8", "start_us": 1, "end_us": 2, "heard": "created", "order": "9" });
    std::fs::write(&history, format!("{line}\n")).unwrap();
    let output = check(place.path(), Some(&history));
    assert_eq!(failed(&output), [4]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("sale 7, which the ledger does not have"));
    std::fs::write(&history, "").unwrap();
    assert_eq!(check(place.path(), Some(&history)).status.code(), Some(2), "an empty history shows nothing");
}

#[test]
fn what_cannot_be_read_is_neither_right_nor_wrong() {
    let place = folder();
    let output = check(place.path(), None);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no database"), "{output:?}");
    let mut command = stampede(&["check", "--target", "http://127.0.0.1:1"]);
    assert_eq!(command.env("STAMPEDE_ADMIN_TOKEN", TOKEN).output().unwrap().status.code(), Some(2));
    let help = stampede(&["check", "--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("Exit codes: 0"), "{help:?}");
}

/// Tables of an older version are named, and left as they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_tables_are_not_migrated() {
    let place = migrated();
    let database = place.path().join("stampede.db");
    spoil(&database, "DELETE FROM _sqlx_migrations; DROP TABLE top_up; PRAGMA journal_mode = DELETE").await;
    let before = std::fs::read(&database).unwrap();
    let output = check(place.path(), None);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("older than this version") && error.contains("stampede migrate"), "{error}");
    assert!(std::fs::read(&database).unwrap() == before, "the database was changed");
}

/// A database that may not be written to is checked all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_is_only_read() {
    for kind in [Kind::MariaDb, Kind::Postgres] {
        let place = Place::on(kind);
        let shop = Shop::open(&place);
        let sale = shop.put_up(3).await;
        let ledger = crate::shop::read_only(&place).await;
        assert!(ledger.inspect(sale).await.unwrap().is_some());
        let ended = ledger.set_status(sale, stampede_core::SaleStatus::Ended).await;
        ended.expect_err("it was opened to be read");
        ledger.close().await;
    }
}

/// Long after its end a sale is no longer at the gate; the others are checked all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_that_is_long_over_does_not_stop_the_check() {
    let place = folder();
    let shop = Shop::open(&place);
    shop.put_up(1).await;
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

/// Buyers who buy and cancel until they are stopped, one request under way each.
fn steady_load(shop: &Shop, buyers: Vec<crate::shop::Buyer>, sale: stampede_core::SaleId) -> SteadyLoad {
    let (history, stop) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
    let press = |buyer: crate::shop::Buyer| {
        let (history, stop, address) = (history.clone(), stop.clone(), shop.address);
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                let bought = history.buy(&mut client, sale, &buyer).await;
                assert!(bought.heard.is_yes(), "{bought:?}");
                history.cancel(&mut client, sale, &buyer, bought.order.unwrap()).await;
            }
            history.buy(&mut client, sale, &buyer).await;
        })
    };
    let tasks = buyers.into_iter().map(press).collect();
    SteadyLoad { history, stop, tasks }
}

struct SteadyLoad {
    history: Arc<History>,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl SteadyLoad {
    async fn end(self) -> Arc<History> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.history
    }
}

/// Orders are on their way in every look, and nothing is wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shop_under_steady_load_has_no_findings() {
    let place = folder();
    let shop = Shop::open(&place);
    let sale = shop.put_up(1000).await;
    let buyers = shop.log_in(0, 24).await;
    let load = steady_load(&shop, buyers, sale);
    let data = ["--data-dir".to_owned(), place.path().display().to_string()];
    let begun = Instant::now();
    for _ in 0..count(20, 3) {
        assert_eq!(failed(&check_with(target(&shop).into()).await), [0; 0], "through its routes");
        let both = target(&shop).into_iter().chain(data.clone()).collect();
        assert_eq!(failed(&check_with(both).await), [0; 0], "with its database");
    }
    let history = load.end().await;
    let orders = history.count(Heard::Created);
    assert!(orders > 100, "{orders} orders in {:?} are no load", begun.elapsed());

    // At rest everything is equal, and every answer has its row.
    assert_eq!(history.check(&place, &[&shop], sale).await, 24);
    let file = place.path().join("history");
    recorded::write(&history.all(), std::fs::File::create(&file).unwrap()).unwrap();
    let all = target(&shop).into_iter().chain(data).chain(["--history".into(), file.display().to_string()]).collect();
    assert_eq!(failed(&check_with(all).await), [0; 0]);
}

/// A real violation is seen although orders are on their way all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_violation_is_found_under_steady_load() {
    let place = folder();
    let mut planted = command(&place);
    planted.env("STAMPEDE_PLANTED_BUGS", "reconcile-count");
    let shop = Shop::run(planted);
    let sale = shop.put_up(1000).await;
    let buyers = shop.log_in(0, 24).await;
    let load = steady_load(&shop, buyers, sale);
    let output = check_with(target(&shop).into()).await;
    assert_eq!(failed(&output), [1], "{output:?}");
    load.end().await;
}

/// Every node's gate is asked and compared, and the one that is wrong is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_is_asked() {
    let server = Kind::Postgres.server().unwrap();
    let url = Kind::Postgres.create_database(server, server.port());
    let (place, other) = (Place::with(Some(url.clone())), Place::with(Some(url)));
    let right = Shop::open(&place);
    let mut planted = command(&other);
    planted.env("STAMPEDE_PLANTED_BUGS", "reconcile-count");
    let wrong = Shop::run(planted);
    let sale = right.put_up(1000).await;
    wrong.knows(sale).await;
    let load = steady_load(&wrong, right.log_in(0, 24).await, sale);
    let both: Vec<String> = target(&right).into_iter().chain(target(&wrong)).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    // Whether the bug does harm is a matter of luck; not for long.
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

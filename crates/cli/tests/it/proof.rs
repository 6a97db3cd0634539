//! `stampede bench`: no violation without a bug, and every planted bug is detected and named.

use std::process::{Command, Output};

use serde_json::{Value, json};
use stampede_testkit::{Reply, count};

use crate::shop::{Shop, command, temporary_storage};

pub fn stampede(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(arguments).current_dir(env!("CARGO_TARGET_TMPDIR")).env_remove("STAMPEDE_ADMIN_TOKEN");
    command
}

/// A short benchmark.
pub fn small_bench(seed: u64) -> Command {
    let mut command = stampede(&["bench", "--json", "--seconds", "0.2", "--buyers", "400", "--stock", "100"]);
    command.args(["--storm-seconds", if count(1, 0) == 1 { "5" } else { "1" }]);
    command.args(["--connections", "32", "--seed", &seed.to_string()]);
    command
}

/// Parses the output of a command with `--json`.
pub fn parse_json(output: &Output) -> Value {
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}\n{errors}"))
}

pub fn run_without_violation(mut command: Command) -> Value {
    let output = command.output().unwrap();
    let report = parse_json(&output);
    assert!(output.status.success(), "{:#}", report["violations"]);
    assert_eq!(report["violations"], json!([]));
    report
}

#[test]
fn report_has_all_members() {
    let report = run_without_violation(small_bench(1));
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
    assert_eq!(report["orders"]["other"], json!(0), "every buyer got an order");
    let responses = report["responses"].as_array().unwrap();
    for (phase, response) in [
        ("orders", "created"),
        ("refusals", "sold_out"),
        ("storm", "created"),
        ("storm", "already"),
        ("storm", "sold_out"),
    ] {
        let found = responses.iter().find(|line| line["phase"] == phase && line["response"] == response);
        let p99 = found.unwrap_or_else(|| panic!("{phase} {response} in {responses:?}"))["latency_ms"]["p99"].as_f64();
        assert!(p99.unwrap() > 0.0);
    }
}

#[test]
fn storm_lasts_and_shows_responses_by_kind() {
    let mut command =
        stampede(&["bench", "--seconds", "0.1", "--buyers", "100", "--stock", "10", "--connections", "8"]);
    let started = std::time::Instant::now();
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(started.elapsed().as_secs() >= 5, "five seconds by default");
    for response in ["created", "already", "sold_out"] {
        let line = text.lines().find(|line| line.starts_with("storm ") && line.contains(response));
        assert!(line.is_some(), "{response} in {text}");
    }
}

/// The no-op response has the headers and the size of an order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn noop_response_has_the_size_of_an_order() {
    let storage = temporary_storage();
    let mut serve = command(&storage);
    serve.env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    let shop = Shop::run(serve);
    let sale = shop.create_sale(1).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let mut client = shop.client().await;
    let order = client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap();
    let noop = client.post("/load-test/noop", &buyer.token, &Value::Null).await.unwrap();
    assert_eq!((order.status.as_u16(), noop.status.as_u16()), (201, 200));
    let sizes = |reply: &Reply| {
        let mut sizes: Vec<(String, usize)> =
            reply.headers.iter().map(|(name, value)| (name.to_string(), value.len())).collect();
        sizes.sort_unstable();
        (sizes, reply.body.len())
    };
    assert_eq!(sizes(&order), sizes(&noop));
    assert!(shop.metric("stampede_http_seconds_count{route=\"/load-test/noop\"}").await >= 1.0);
    // It needs no session, and it exists only with the setting.
    assert_eq!(client.post("/load-test/noop", "", &Value::Null).await.unwrap().status, 200);
    let plain = Shop::open(&temporary_storage());
    assert_eq!(plain.client().await.post("/load-test/noop", "", &Value::Null).await.unwrap().status, 404);
}

/// Only those who cancelled can buy the returned stock.
#[test]
fn stock_for_every_buyer_is_not_undersold() {
    let mut command = stampede(&["bench", "--json", "--seconds", "0.1", "--buyers", "200", "--stock", "200"]);
    command.args(["--connections", "16", "--storm-seconds", "1"]);
    let report = run_without_violation(command);
    assert_eq!((&report["storm"]["sold"], &report["storm"]["undersold"]), (&json!(200), &json!(0)));
    assert_ne!(report["storm"]["returned"], json!(0), "some were cancelled");
}

/// With 256 connections, the median batch size is above 16. Other load on the machine may prevent that, so there are three attempts.
#[test]
fn batches_grow_with_the_number_of_connections() {
    let batch = || {
        let mut command = stampede(&["bench", "--json", "--buyers", "4096", "--connections", "256"]);
        command.args(["--seconds", if count(1, 0) == 1 { "5" } else { "1" }]);
        run_without_violation(command)["batch"].clone()
    };
    let mut batches = std::iter::repeat_with(batch).take(3);
    assert!(batches.any(|batch| batch["p50"].as_f64().is_some_and(|p50| p50 > 16.0)), "the median was never above 16");
}

#[test]
fn no_violation_with_any_seed() {
    for seed in 0..count(50, 3) {
        run_without_violation(small_bench(seed));
    }
}

#[test]
fn no_violation_when_the_server_is_killed() {
    for seed in 0..count(50, 3) {
        let mut command = small_bench(seed);
        command.arg("--kill");
        run_without_violation(command);
    }
}

#[test]
fn no_violation_on_shared_databases_with_two_nodes() {
    for database in ["mariadb", "postgres"] {
        for seed in 0..count(10, 1) {
            let mut command = small_bench(seed);
            command.args(["--private-servers", "--database", database, "--nodes", "2"]);
            let report = run_without_violation(command);
            assert_eq!(report["nodes"], json!(2));
        }
    }
}

#[test]
fn open_loop_latency_counts_from_the_scheduled_time() {
    let mut command = small_bench(1);
    // Far more than the server can handle, so late requests wait for most of the run.
    command.args(["--rate", "1000000"]);
    let report = run_without_violation(command);
    let (p50, p99) = (&report["latency_ms"]["refusal"]["p50"], &report["latency_ms"]["refusal"]["p99"]);
    assert!(p50.as_f64().unwrap() > 20.0 && p99.as_f64() > p50.as_f64(), "{p50} {p99}");
}

/// The bug is detected, and the violation contains this text.
fn assert_detected(bug: &str, flags: &[&str], named: &str) {
    // A bug may have an effect only sometimes, so the run is repeated.
    for seed in 0..20 {
        let mut command = small_bench(seed);
        command.args(flags).env("STAMPEDE_PLANTED_BUGS", bug);
        let output = command.output().unwrap();
        if !output.status.success() {
            let violations = parse_json(&output)["violations"].to_string();
            return assert!(violations.contains(named), "{bug}: {violations}");
        }
    }
    panic!("{bug} was not detected");
}

#[test]
fn skipped_duplicate_check_is_detected() {
    assert_detected("skip-duplicate", &[], "duplicated");
}

#[test]
fn double_release_is_detected() {
    assert_detected("release-twice", &[], "live rows are");
}

#[test]
fn response_before_the_commit_is_detected() {
    assert_detected("answer-early", &["--kill"], "lost: order");
}

#[test]
fn cap_reset_during_recording_is_detected() {
    assert_detected("reconcile-count", &[], "the gate's cap is");
}

//! `stampede bench` and `stampede check`: right without a bug, and every planted one is caught and named.

use std::process::{Command, Output};

use serde_json::{Value, json};
use stampede_testkit::{Reply, count};

use crate::shop::{Shop, command, folder};

pub fn stampede(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(arguments).current_dir(env!("CARGO_TARGET_TMPDIR")).env_remove("STAMPEDE_ADMIN_TOKEN");
    command
}

/// A small benchmark: seconds, not minutes.
pub fn small(seed: u64) -> Command {
    let mut command = stampede(&["bench", "--json", "--seconds", "0.2", "--buyers", "400", "--stock", "100"]);
    command.args(["--storm-seconds", if count(1, 0) == 1 { "5" } else { "1" }]);
    command.args(["--connections", "32", "--seed", &seed.to_string()]);
    command
}

pub fn told(output: &Output) -> Value {
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}\n{errors}"))
}

pub fn passes(mut command: Command) -> Value {
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
    let answers = report["answers"].as_array().unwrap();
    for (phase, answer) in [
        ("orders", "created"),
        ("refusals", "sold_out"),
        ("storm", "created"),
        ("storm", "already"),
        ("storm", "sold_out"),
    ] {
        let found = answers.iter().find(|line| line["phase"] == phase && line["answer"] == answer);
        let p99 = found.unwrap_or_else(|| panic!("{phase} {answer} in {answers:?}"))["latency_ms"]["p99"].as_f64();
        assert!(p99.unwrap() > 0.0);
    }
}

#[test]
fn the_storm_lasts_and_its_answers_are_shown_by_kind() {
    let mut command =
        stampede(&["bench", "--seconds", "0.1", "--buyers", "100", "--stock", "10", "--connections", "8"]);
    let started = std::time::Instant::now();
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(started.elapsed().as_secs() >= 5, "five seconds unless told otherwise");
    for answer in ["created", "already", "sold_out"] {
        let line = text.lines().find(|line| line.starts_with("storm ") && line.contains(answer));
        assert!(line.is_some(), "{answer} in {text}");
    }
}

/// The yardstick is answered as an order is: the same headers, as many bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_noop_is_answered_as_an_order_is() {
    let place = folder();
    let mut serve = command(&place);
    serve.env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    let shop = Shop::run(serve);
    let sale = shop.put_up(1).await;
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
    // Without a session, and without the setting it is not there.
    assert_eq!(client.post("/load-test/noop", "", &Value::Null).await.unwrap().status, 200);
    let plain = Shop::open(&folder());
    assert_eq!(plain.client().await.post("/load-test/noop", "", &Value::Null).await.unwrap().status, 404);
}

/// Nobody is left to buy what others gave back, but for themselves.
#[test]
fn as_many_buyers_as_stock_is_not_undersold() {
    let mut command = stampede(&["bench", "--json", "--seconds", "0.1", "--buyers", "200", "--stock", "200"]);
    command.args(["--connections", "16", "--storm-seconds", "1"]);
    let report = passes(command);
    assert_eq!((&report["storm"]["sold"], &report["storm"]["undersold"]), (&json!(200), &json!(0)));
    assert_ne!(report["storm"]["returned"], json!(0), "some were cancelled");
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
        command.args(flags).env("STAMPEDE_PLANTED_BUGS", bug);
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

//! Admissions per second: batched by the gate, and one buyer per call as `redis-benchmark` sends them, on a private Redis, in one run:
//!
//! ```sh
//! cargo bench -p stampede-gate
//! ```
//!
//! The script of the baseline decides on one buyer and does the same writes: mark, outbox, sequence number. Both are measured in turns, and
//! the ratio of the medians counts. The exit code is 1 if it is below its minimum.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Gate as _, GateRecord, LoadedSale};
use stampede_core::{Admission, OrderId, SaleId, SaleStatus, UserId};
use stampede_gate::RedisGate;
use stampede_redis::Client;
use stampede_testkit::redis as server;

#[path = "../tests/it/conformance.rs"]
#[allow(dead_code, reason = "of the test suite, only the sale is used")]
mod conformance;

const ROUNDS: usize = 7;
const BATCH: usize = 256;
const BATCHES: usize = 200;
const SINGLES: usize = 50_000;
/// Connections of `redis-benchmark`, which is its default.
const CONNECTIONS: usize = 50;
/// The minimum of batched admissions relative to single ones.
const MINIMUM: f64 = 4.0;

const SINGLE: &str = "\
    local sale = redis.call('HMGET', KEYS[1], 'cap', 'seq')
    local held = redis.call('HGET', KEYS[2], ARGV[1])
    if held then return held end
    if redis.call('HLEN', KEYS[2]) >= tonumber(sale[1]) then return 's' end
    redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
    redis.call('HINCRBY', KEYS[1], 'seq', 1)
    redis.call('XADD', KEYS[3], '*', ARGV[1], ARGV[2])
    return 'a'";

#[tokio::main]
#[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
async fn main() -> ExitCode {
    let redis = server::start().expect("a private Redis");
    let timeout = Duration::from_secs(10);
    let client = Client::new(server::url(redis.port()).into(), timeout, timeout).expect("a URL");
    let record = GateRecord { ledger_id: "bench".to_owned(), incarnation: 1, replication_id: String::new() };
    let gate = RedisGate::new(Arc::new(client), &record, u32::MAX);
    gate.load_scripts(1).await.expect("scripts");
    let hash = server::ask(redis.port(), &["script", "load", SINGLE]).expect("a hash").trim().to_owned();

    let (mut batched, mut single) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        batched.push(admit_batches(&gate, round).await);
        single.push(admit_singly(redis.port(), &hash, round));
    }
    let (batched, single) = (median(batched), median(single));
    let ratio = batched / single;
    println!("in batches of {BATCH}, one after another: {batched:>9.0} admissions/s");
    println!("one per call, {CONNECTIONS} connections:        {single:>9.0} admissions/s");
    println!("ratio {ratio:.1}, at least {MINIMUM}");
    if ratio < MINIMUM { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[expect(clippy::cast_precision_loss, reason = "a count of admissions")]
async fn admit_batches(gate: &RedisGate, round: usize) -> f64 {
    let mut sale = conformance::sale(u32::MAX, 1, SaleStatus::OnSale);
    sale.id = SaleId::new(round as i64 + 1).expect("an id");
    let id = sale.id;
    gate.open(LoadedSale { sale, marks: Vec::new(), ended: Vec::new() }).await.expect("a sale");
    let started = Instant::now();
    for batch in 0..BATCHES {
        let requests: Vec<AdmitRequest> = (0..BATCH)
            .map(|n| {
                let number = (batch * BATCH + n + 1) as i64;
                let user = UserId::new(600_000_000_000_000_000 + number).expect("an id");
                AdmitRequest { user, order: OrderId::new(700_000_000_000_000_000 + number).expect("an id") }
            })
            .collect();
        let (decisions, _) = gate.admit_batch(id, &requests).await.expect("an answer").expect("a sale");
        assert!(decisions.iter().all(|decision| matches!(decision.admission, Admission::Admitted(_))));
    }
    (BATCHES * BATCH) as f64 / started.elapsed().as_secs_f64()
}

/// What `redis-benchmark` measures, without pipelining.
fn admit_singly(port: u16, hash: &str, round: usize) -> f64 {
    let key = |part: &str| format!("single:{{{round}}}:{part}");
    server::ask(port, &["hset", &key("sale"), "cap", "4000000000", "seq", "0"]).expect("a reply");
    let mut command = Command::new("redis-benchmark");
    command.args(["-p", &port.to_string(), "-c", &CONNECTIONS.to_string(), "-n", &SINGLES.to_string(), "--csv"]);
    // Random users, as long as real ones.
    command.args(["-r", "1000000000", "evalsha", hash, "3", &key("sale"), &key("live"), &key("out")]);
    command.args(["600000__rand_int__", "700000__rand_int__"]);
    let output = command.output().expect("redis-benchmark");
    let text = String::from_utf8(output.stdout).expect("text");
    let line = text.lines().last().unwrap_or_default();
    let rate = line.rsplit("\",\"").nth(6).and_then(|rate| rate.trim_matches('"').parse().ok());
    rate.unwrap_or_else(|| panic!("redis-benchmark printed {text:?}"))
}

use std::process::Command;
use std::time::Duration;

use stampede_testkit::{Process, Server, count, redis};

const PROCESSES: u64 = 4;

fn crowd(server: &Server, mode: &str, each: u64) -> Process {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples/crowd");
    assert!(program.exists(), "not built: run `cargo test` without `--test`, or `cargo build --examples`");
    let mut command = Command::new(program);
    command.args([&redis::url(server.port()), mode, &each.to_string()]);
    let mut process = Process::start(command).unwrap();
    process.wait_for(Duration::from_secs(20), |line| (line == "ready").then_some(())).unwrap();
    process
}

/// The longest wait of all, in milliseconds.
fn go(server: &Server, processes: &mut [Process]) -> u64 {
    redis::ask(server.port(), &["set", "go", "1"]).unwrap();
    let longest = |line: &str| line.strip_prefix("longest ").and_then(|ms| ms.parse::<u64>().ok());
    processes.iter_mut().map(|one| one.wait_for(Duration::from_secs(60), longest).unwrap()).max().unwrap()
}

#[test]
fn ten_thousand_that_want_a_cold_key_cost_one_load() {
    for _ in 0..count(20, 2) {
        let server = redis::start().unwrap();
        let mut processes: Vec<_> = (0..PROCESSES).map(|_| crowd(&server, "cold", 2500)).collect();
        let longest = go(&server, &mut processes);
        assert_eq!(redis::ask(server.port(), &["get", "loads"]).unwrap(), "1");
        assert!(longest >= 1500, "the load itself takes a second and a half");
    }
}

#[test]
fn of_a_stale_key_too_and_nobody_waits() {
    for _ in 0..count(20, 2) {
        let server = redis::start().unwrap();
        let mut processes: Vec<_> = (0..PROCESSES).map(|_| crowd(&server, "stale", 2500)).collect();
        let longest = go(&server, &mut processes);
        for one in &mut processes {
            one.wait_for(Duration::from_secs(20), |line| (line == "new").then_some(())).unwrap();
        }
        assert_eq!(redis::ask(server.port(), &["get", "loads"]).unwrap(), "1");
        assert!(longest < 1500, "somebody waited {longest} ms, as long as a load takes");
    }
}

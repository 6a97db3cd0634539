//! Several processes that want one key at the same moment.

use std::process::Command;
use std::time::Duration;

use stampede_testkit::{Process, Server, count, redis};

const PROCESSES: usize = 4;

fn crowd(server: &Server, mode: &str, callers: u64, takes: Duration) -> Vec<Process> {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples/crowd");
    assert!(program.exists(), "not built: run `cargo test` without `--test`, or `cargo build --examples`");
    let start = |_| {
        let mut command = Command::new(&program);
        command.args([&redis::url(server.port()), mode, &callers.to_string(), &takes.as_millis().to_string()]);
        Process::start(command).unwrap()
    };
    let mut processes: Vec<Process> = (0..PROCESSES).map(start).collect();
    for process in &mut processes {
        process.wait_for(Duration::from_secs(20), |line| (line == "ready").then_some(())).unwrap();
    }
    processes
}

fn go(server: &Server) {
    redis::ask(server.port(), &["set", "go", "1"]).unwrap();
}

/// The longest wait of all.
fn longest(processes: &mut [Process]) -> Duration {
    let longest = |line: &str| line.strip_prefix("longest ").and_then(|ms| ms.parse::<u64>().ok());
    let waits = processes.iter_mut().map(|one| one.wait_for(Duration::from_secs(60), longest).unwrap());
    Duration::from_millis(waits.max().unwrap())
}

/// The processes that have called the source.
fn loaders(server: &Server) -> Vec<u32> {
    let loads = redis::ask(server.port(), &["--raw", "lrange", "loads", "0", "-1"]).unwrap();
    loads.lines().filter_map(|pid| pid.trim().parse().ok()).collect()
}

#[test]
fn ten_thousand_that_want_a_cold_key_cost_one_load() {
    let takes = Duration::from_millis(1500);
    for _ in 0..count(20, 2) {
        let server = redis::start().unwrap();
        let mut processes = crowd(&server, "cold", 2500, takes);
        go(&server);
        assert!(longest(&mut processes) >= takes, "a caller did not wait for the load");
        assert_eq!(loaders(&server).len(), 1);
    }
}

#[test]
fn of_a_stale_key_too_and_nobody_waits() {
    let takes = Duration::from_millis(1500);
    for _ in 0..count(20, 2) {
        let server = redis::start().unwrap();
        let mut processes = crowd(&server, "stale", 2500, takes);
        go(&server);
        let longest = longest(&mut processes);
        for one in &mut processes {
            one.wait_for(Duration::from_secs(20), |line| (line == "new").then_some(())).unwrap();
        }
        assert_eq!(loaders(&server).len(), 1);
        assert!(longest < takes, "a caller waited {longest:?}, as long as a load takes");
    }
}

/// The load takes as long as the lease of the lock, and longer than half of what a caller waits for by default.
#[test]
fn a_slow_load_runs_once_over_all_processes() {
    for _ in 0..count(20, 1) {
        let server = redis::start().unwrap();
        let mut processes = crowd(&server, "cold", 50, Duration::from_secs(4));
        go(&server);
        longest(&mut processes);
        assert_eq!(loaders(&server).len(), 1);
    }
}

#[test]
fn when_the_process_that_loads_is_killed_another_takes_over() {
    for _ in 0..count(20, 1) {
        let server = redis::start().unwrap();
        let takes = Duration::from_secs(2);
        let mut processes = crowd(&server, "cold", 50, takes);
        go(&server);
        let killed = loop {
            if let [first, ..] = *loaders(&server) {
                break first;
            }
        };
        let at = processes.iter().position(|one| one.pid() == killed).unwrap();
        processes.remove(at).kill().unwrap();
        let waited = longest(&mut processes);
        assert_eq!(loaders(&server).len(), 2, "one of the others has loaded it");
        // The rest of the lease of three seconds, the second load, and time for a busy machine.
        assert!(waited < Duration::from_secs(3) + takes + Duration::from_secs(4), "{waited:?}");
    }
}

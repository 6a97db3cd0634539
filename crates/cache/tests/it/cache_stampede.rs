//! Several processes request one key at the same time.

use std::process::Command;
use std::time::Duration;

use stampede_testkit::{Process, Server, count, redis};

const PROCESSES: usize = 4;

fn start_processes(server: &Server, mode: &str, callers: u64, load_time: Duration) -> Vec<Process> {
    let executable = std::env::current_exe().unwrap();
    let program = executable.parent().and_then(|deps| deps.parent()).unwrap().join("examples/cache_stampede");
    assert!(program.exists(), "not built: run `cargo test` without `--test`, or `cargo build --examples`");
    let start = |_| {
        let mut command = Command::new(&program);
        command.args([&redis::url(server.port()), mode, &callers.to_string(), &load_time.as_millis().to_string()]);
        Process::start(command).unwrap()
    };
    let mut processes: Vec<Process> = (0..PROCESSES).map(start).collect();
    for process in &mut processes {
        process.wait_for(Duration::from_secs(20), |line| (line == "ready").then_some(())).unwrap();
    }
    processes
}

fn release_callers(server: &Server) {
    redis::ask(server.port(), &["set", "go", "1"]).unwrap();
}

/// The longest wait of all callers.
fn longest(processes: &mut [Process]) -> Duration {
    let longest = |line: &str| line.strip_prefix("longest ").and_then(|ms| ms.parse::<u64>().ok());
    let waits = processes.iter_mut().map(|process| process.wait_for(Duration::from_secs(60), longest).unwrap());
    Duration::from_millis(waits.max().unwrap())
}

/// The processes that have called the source.
fn loaders(server: &Server) -> Vec<u32> {
    let loads = redis::ask(server.port(), &["--raw", "lrange", "loads", "0", "-1"]).unwrap();
    loads.lines().filter_map(|pid| pid.trim().parse().ok()).collect()
}

#[test]
fn ten_thousand_callers_of_a_cold_key_cause_one_load() {
    let load_time = Duration::from_millis(1500);
    for _ in 0..count(20, 2) {
        let server = redis::start().unwrap();
        let mut processes = start_processes(&server, "cold", 2500, load_time);
        release_callers(&server);
        assert!(longest(&mut processes) >= load_time, "a caller did not wait for the load");
        assert_eq!(loaders(&server).len(), 1);
    }
}

#[test]
fn callers_of_a_stale_key_do_not_wait_and_cause_one_load() {
    let load_time = Duration::from_millis(1500);
    for _ in 0..count(20, 2) {
        let server = redis::start().unwrap();
        let mut processes = start_processes(&server, "stale", 2500, load_time);
        release_callers(&server);
        let longest = longest(&mut processes);
        for process in &mut processes {
            process.wait_for(Duration::from_secs(20), |line| (line == "new").then_some(())).unwrap();
        }
        assert_eq!(loaders(&server).len(), 1);
        assert!(longest < load_time, "a caller waited {longest:?}, at least as long as the load takes");
    }
}

/// The load takes longer than the TTL of the lock, and longer than half of the default wait timeout.
#[test]
fn slow_load_runs_once_across_processes() {
    for _ in 0..count(20, 1) {
        let server = redis::start().unwrap();
        let mut processes = start_processes(&server, "cold", 50, Duration::from_secs(4));
        release_callers(&server);
        longest(&mut processes);
        assert_eq!(loaders(&server).len(), 1);
    }
}

#[test]
fn another_process_takes_over_when_the_loading_process_is_killed() {
    for _ in 0..count(20, 1) {
        let server = redis::start().unwrap();
        let load_time = Duration::from_secs(2);
        let mut processes = start_processes(&server, "cold", 50, load_time);
        release_callers(&server);
        let killed = loop {
            if let [first, ..] = *loaders(&server) {
                break first;
            }
        };
        let at = processes.iter().position(|process| process.pid() == killed).unwrap();
        processes.remove(at).kill().unwrap();
        let waited = longest(&mut processes);
        assert_eq!(loaders(&server).len(), 2, "one of the other processes loads the key");
        // The rest of the lock's TTL of three seconds, the second load, and a margin for a busy machine.
        assert!(waited < Duration::from_secs(3) + load_time + Duration::from_secs(4), "{waited:?}");
    }
}

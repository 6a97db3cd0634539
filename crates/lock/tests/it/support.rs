use std::process::Command;
use std::time::{Duration, Instant};

use stampede_lock::{Config, Locks};
use stampede_testkit::{Process, Proxy, Server, redis};

pub const SHORT: Duration = Duration::from_millis(800);

/// Short leases, so that tests are quick.
pub fn short() -> Config {
    Config { watchdog_lease: SHORT, answer_within: Duration::from_millis(200), ..Config::default() }
}

/// Leases that never end within a test.
pub fn long() -> Config {
    Config { answer_within: Duration::from_millis(300), ..Config::default() }
}

pub async fn connect(server: &Server, config: Config) -> Locks {
    Locks::connect(redis::url(server.port()), config).await.unwrap()
}

pub async fn through(proxy: &Proxy, config: Config) -> Locks {
    Locks::connect(redis::url(proxy.address().port()), config).await.unwrap()
}

/// What `redis-cli` says.
pub fn ask(server: &Server, command: &[&str]) -> String {
    redis::ask(server.port(), command).unwrap()
}

/// Waits for something to become true.
pub async fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < Duration::from_secs(20), "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How many commands of this name Redis has carried out, scripts' own included.
pub fn calls(server: &Server, command: &str) -> u64 {
    let stats = ask(server, &["info", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

/// A program of `examples/`, which `cargo test` builds too.
pub fn example(name: &str, args: &[&str], lease: Option<Duration>) -> Process {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(program.exists(), "{name} is not built: run `cargo test` without `--test`, or `cargo build --examples`");
    let mut command = Command::new(program);
    command.args(args);
    if let Some(lease) = lease {
        command.env("LEASE_MS", lease.as_millis().to_string());
    }
    Process::start(command).unwrap()
}

/// Waits until Redis has heard nothing new for a while but our own questions.
pub async fn quiet(server: &Server) {
    let (mut before, mut same) = (0, 0);
    until("nothing comes any more", || {
        let now = calls(server, "evalsha");
        same = if now == before { same + 1 } else { 0 };
        before = now;
        same == 10
    })
    .await;
}

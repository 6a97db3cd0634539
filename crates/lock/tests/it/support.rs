use std::process::Command;
use std::time::Duration;

use stampede_lock::{Config, Locks};
pub use stampede_testkit::until;
use stampede_testkit::{Process, Proxy, Server, redis};

pub const SHORT: Duration = Duration::from_millis(800);

/// A short TTL, so that tests are quick.
pub fn short() -> Config {
    Config { watchdog_ttl: SHORT, response_timeout: Duration::from_millis(200), ..Config::default() }
}

/// A TTL that never ends within a test.
pub fn long() -> Config {
    Config { response_timeout: Duration::from_millis(300), ..Config::default() }
}

pub async fn connect(server: &Server, config: Config) -> Locks {
    Locks::connect(redis::url(server.port()), config).await.unwrap()
}

pub async fn through(proxy: &Proxy, config: Config) -> Locks {
    Locks::connect(redis::url(proxy.address().port()), config).await.unwrap()
}

/// The output of `redis-cli`.
pub fn ask(server: &Server, command: &[&str]) -> String {
    redis::ask(server.port(), command).unwrap()
}

/// How many commands of this name Redis has executed, including those called by scripts.
pub fn calls(server: &Server, command: &str) -> u64 {
    let stats = ask(server, &["info", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}

/// A program of `examples/`, which `cargo test` builds too.
pub fn example(name: &str, args: &[&str], ttl: Option<Duration>) -> Process {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(program.exists(), "{name} is not built: run `cargo test` without `--test`, or `cargo build --examples`");
    let mut command = Command::new(program);
    command.args(args);
    if let Some(ttl) = ttl {
        command.env("TTL_MS", ttl.as_millis().to_string());
    }
    Process::start(command).unwrap()
}

/// Waits until no new scripts arrive at Redis.
pub async fn quiet(server: &Server) {
    let (mut before, mut same) = (0, 0);
    until("no new scripts arrive", async || {
        let now = calls(server, "evalsha");
        same = if now == before { same + 1 } else { 0 };
        before = now;
        same == 10
    })
    .await;
}

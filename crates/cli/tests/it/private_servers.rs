//! The servers that `bench` and `demo` start for themselves.

use serde_json::json;
use stampede_testkit::{redis, until};

use crate::proof::{run_without_violation, small_bench, stampede};
use crate::shared::processes_with;

/// A server that is not installed is named with the command that installs it.
#[test]
fn servers_that_are_not_installed_are_named() {
    let (database, redis) = ("postgres://127.0.0.1:1/none", "redis://127.0.0.1:1/");
    let cases: [(&[&str], &str, &str); 5] = [
        (&["demo"], "PostgreSQL", "postgresql"),
        (&["bench", "--tier", "shared"], "PostgreSQL", "postgresql"),
        (&["bench", "--private-servers", "--database", "mariadb"], "MariaDB", "mariadb-server"),
        (&["bench", "--tier", "shared", "--database", database], "Redis", "redis-server"),
        (
            &["bench", "--tier", "queued", "--queue", "rabbitmq", "--database", database, "--redis", redis],
            "RabbitMQ",
            "rabbitmq-server",
        ),
    ];
    for (arguments, name, package) in cases {
        let output = stampede(arguments).env("PATH", "/nonexistent").output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        let named = format!("{name} is not installed; on Debian and Ubuntu: sudo apt-get install {package}");
        assert!(error.contains(&named), "{arguments:?}: {error}");
    }
}

/// Without `--database` and `--redis`, the load test of the tier `shared` runs on a private PostgreSQL, and a private Redis that syncs its
/// append-only file once a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_test_of_shared_starts_postgres_and_redis() {
    let temporary = tempfile::tempdir().unwrap();
    let mut bench = small_bench(1);
    bench.args(["--tier", "shared"]).env("TMPDIR", temporary.path());
    let running = tokio::task::spawn_blocking(move || run_without_violation(bench));
    let started_here = temporary.path().display().to_string();
    let option = |line: &str, name: &str| line.split('\0').skip_while(|word| *word != name).nth(1).map(str::to_owned);
    let mut urls = None;
    until("a node runs", async || {
        let lines = processes_with(&started_here);
        urls = lines.iter().find_map(|(_, line)| Some((option(line, "--database")?, option(line, "--redis")?)));
        urls.is_some()
    })
    .await;
    let (database, redis) = urls.unwrap();
    assert!(database.starts_with("postgres://postgres@127.0.0.1:"), "{database}");
    let port = redis.strip_prefix("redis://127.0.0.1:").and_then(|rest| rest.strip_suffix('/')).unwrap();
    let settings = ["appendonly", "appendfsync"].map(|name| {
        let setting = redis::ask(port.parse().unwrap(), &["config", "get", name]).unwrap();
        setting.lines().next_back().unwrap_or_default().to_owned()
    });
    assert_eq!(settings, ["yes", "everysec"]);
    let report = running.await.unwrap();
    assert_eq!((&report["tier"], &report["nodes"]), (&json!("shared"), &json!(1)), "{report:#}");
}

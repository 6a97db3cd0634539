use std::time::Duration;

use redis::Value;
use stampede_redis::{Client, CommandError, EvalShaError, Script, Servers};
use stampede_testkit::redis as server;

const NO_ARGS: [&str; 0] = [];
const TIMEOUT: Duration = Duration::from_secs(5);

fn client(servers: impl Into<Servers>) -> Client {
    Client::new(servers.into(), TIMEOUT, TIMEOUT).unwrap()
}

/// Increments a counter, so that every execution is visible.
fn increment() -> Script {
    Script::new("return redis.call('INCR', KEYS[1])")
}

#[tokio::test]
async fn eval_sha_returns_no_script_and_does_not_load_the_script() {
    let redis = server::start().unwrap();
    let (client, script) = (client(server::url(redis.port())), increment());
    let ask = |command: &[&str]| server::ask(redis.port(), command).unwrap();

    client.script_load(&script).await.unwrap();
    assert_eq!(client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap(), Value::Int(1));

    ask(&["script", "flush"]);
    for _ in 0..2 {
        let error = client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap_err();
        assert!(matches!(error, EvalShaError::NoScript), "{error}");
    }
    assert_eq!(ask(&["script", "exists", script.hash()]), "0");
    assert_eq!(ask(&["get", "counter"]), "1", "nothing was executed");
    assert_eq!(client.connection_count(), 1, "NOSCRIPT does not break the connection");

    client.script_load(&script).await.unwrap();
    assert_eq!(client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap(), Value::Int(2));
}

#[tokio::test]
async fn eval_sha_returns_no_script_after_a_restart() {
    let redis = server::start_durable().unwrap();
    let (client, script) = (client(server::url(redis.port())), increment());
    client.script_load(&script).await.unwrap();
    client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap();
    redis.kill().unwrap();
    redis.restart().unwrap();
    // The first call may find the broken connection.
    let error = loop {
        match client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap_err() {
            EvalShaError::Command(CommandError::NotSent(_) | CommandError::Unknown(_)) => {}
            error => break error,
        }
    };
    assert!(matches!(error, EvalShaError::NoScript), "{error}");
    assert_eq!(server::ask(redis.port(), &["get", "counter"]).unwrap(), "1");
}

#[tokio::test]
async fn eval_loads_a_script_that_the_server_does_not_have() {
    let redis = server::start().unwrap();
    let (client, script) = (client(server::url(redis.port())), increment());
    for count in 1..=2 {
        assert_eq!(client.eval(&script, &["counter"], &NO_ARGS).await.unwrap(), Value::Int(count));
        assert_eq!(server::ask(redis.port(), &["script", "exists", script.hash()]).unwrap(), "1");
    }
}

#[tokio::test]
async fn errors_other_than_no_script_are_command_errors() {
    let redis = server::start().unwrap();
    let (client, script) = (client(server::url(redis.port())), increment());
    client.script_load(&script).await.unwrap();
    server::ask(redis.port(), &["lpush", "list", "x"]).unwrap();
    let error = client.eval_sha(&script, &["list"], &NO_ARGS).await.unwrap_err();
    assert!(matches!(error, EvalShaError::Command(CommandError::Refused(_))), "{error}");
}

#[tokio::test]
async fn script_load_loads_into_every_master_of_a_cluster() {
    let nodes = server::start_cluster().unwrap();
    let urls = nodes.iter().map(|node| server::url(node.port())).collect();
    let (client, script) = (client(Servers::Cluster(urls)), increment());
    let error = client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap_err();
    assert!(matches!(error, EvalShaError::NoScript), "{error}");
    client.script_load(&script).await.unwrap();
    for node in &nodes {
        assert_eq!(server::ask(node.port(), &["script", "exists", script.hash()]).unwrap(), "1");
    }
    assert_eq!(client.eval_sha(&script, &["counter"], &NO_ARGS).await.unwrap(), Value::Int(1));
}

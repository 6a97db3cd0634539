//! 64 tasks in each of 4 processes increment a counter by reading it and writing it back: without mutual exclusion the sum is wrong.

use std::time::Duration;

use stampede_testkit::{Server, count, redis};

use crate::support::{ask, example};

const PROCESSES: u64 = 4;
const TASKS: u64 = 64;

/// Returns the expected and the actual value of the counter.
fn contend(kind: &str, servers: &[Server]) -> (u64, u64) {
    let rounds = count(20, 2);
    let urls: Vec<String> = servers.iter().map(|server| redis::url(server.port())).collect();
    let numbers = [TASKS.to_string(), rounds.to_string()];
    let mut args = vec![kind, "counter", &numbers[0], &numbers[1]];
    args.extend(urls.iter().map(String::as_str));
    let mut nodes: Vec<_> = (0..PROCESSES).map(|_| example("contend", &args, None)).collect();
    for node in &mut nodes {
        let status = node.wait(Duration::from_secs(240)).unwrap();
        assert!(status.success(), "{kind}: {status}");
    }
    let adding = if kind == "read-write" { TASKS / 2 } else { TASKS };
    let counted = ask(&servers[0], &["get", "counter-count"]).parse().unwrap();
    (PROCESSES * adding * rounds, counted)
}

fn assert_exclusive(kind: &str, servers: u64) {
    let servers: Vec<Server> = (0..servers).map(|_| redis::start().unwrap()).collect();
    let (added, counted) = contend(kind, &servers);
    assert_eq!(counted, added, "{kind}: increments were lost");
    for server in &servers {
        let left = ask(server, &["--raw", "keys", "lock:*"]);
        let left: Vec<&str> = left.lines().filter(|key| !key.is_empty() && !key.ends_with(":fence")).collect();
        assert!(left.is_empty(), "{kind} left {left:?}");
    }
}

/// Proves that the other tests can fail.
#[test]
fn increments_are_lost_without_a_lock() {
    let server = redis::start().unwrap();
    let (added, counted) = contend("none", &[server]);
    assert!(counted < added, "nothing was lost: the test proves nothing");
}

#[test]
fn simple_lock_is_exclusive() {
    assert_exclusive("simple", 1);
}

#[test]
fn reentrant_lock_is_exclusive() {
    assert_exclusive("reentrant", 1);
}

#[test]
fn fair_lock_is_exclusive() {
    assert_exclusive("fair", 1);
}

#[test]
fn read_write_lock_is_exclusive() {
    assert_exclusive("read-write", 1);
}

#[test]
fn multi_lock_is_exclusive() {
    assert_exclusive("multi", 2);
}

#[test]
fn redlock_is_exclusive() {
    assert_exclusive("redlock", 3);
}

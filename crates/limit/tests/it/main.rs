//! Limits on a real Redis server.
//!
//! - `nodes`: limits hold over several nodes; `outage`: Redis does not answer

mod nodes;
mod outage;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use stampede_limit::{Counters, Limit, RedisCounters};
use stampede_redis::Client;
use stampede_testkit::{Server, redis};

/// Long, so that a slow machine changes no outcome.
const PATIENCE: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

/// The server that tests share. Each has a prefix of its own.
static SERVER: LazyLock<Server> = LazyLock::new(|| redis::start().unwrap());

fn new_prefix() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("stampede:test{}:limit", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn connect(port: u16, prefix: &str, call_timeout: Duration) -> Arc<RedisCounters> {
    let client = Client::new(redis::url(port).into(), PATIENCE, PATIENCE).unwrap();
    RedisCounters::start(Arc::new(client), prefix.to_owned(), call_timeout)
}

/// The counters of two nodes.
fn two_nodes(prefix: &str) -> [Counters; 2] {
    [(); 2].map(|()| Counters::Redis(connect(SERVER.port(), prefix, PATIENCE)))
}

fn calls(counters: &Counters) -> u64 {
    match counters {
        Counters::Local => 0,
        Counters::Redis(counters) => counters.calls(),
    }
}

fn per_hour(count: u32) -> Limit {
    Limit { count, window: HOUR }
}

fn ask(command: &[&str]) -> String {
    redis::ask(SERVER.port(), command).unwrap().trim().to_owned()
}

#[test]
fn script_headers_match_the_scripts() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lua");
    assert_eq!(stampede_testkit::lua::check_headers(folder).unwrap(), 1);
}

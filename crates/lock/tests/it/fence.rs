use std::time::Duration;

use stampede_lock::{Lock, Locks, Owner};
use stampede_testkit::{count, redis};

use crate::support::{SHORT, ask, connect, example, long};

async fn token(lock: &Lock) -> u64 {
    let guard = lock.lock().await.unwrap();
    let fence = guard.fence().unwrap();
    guard.release().await.unwrap();
    fence
}

fn fenced(locks: &Locks) -> Vec<Lock> {
    let me = Owner::new();
    vec![
        locks.reentrant("reentrant", &me).unwrap(),
        locks.fair("fair", &me).unwrap(),
        locks.read_write("write", &me).unwrap().write().clone(),
        locks.read_write("read", &me).unwrap().read().clone(),
    ]
}

#[tokio::test]
async fn tokens_rise_with_every_holder_and_not_when_entering_again() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for lock in fenced(&locks) {
        let mut last = 0;
        for _ in 0..count(10_000, 300) {
            let next = token(&lock).await;
            assert!(next > last, "{next} after {last}");
            last = next;
        }
    }
    let lock = locks.reentrant("reentrant", &Owner::new()).unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    assert_eq!(outer.fence(), inner.fence());
    assert_eq!(locks.simple("simple").unwrap().lock().await.unwrap().fence(), None);
}

#[tokio::test]
async fn tokens_rise_when_redis_forgets_everything() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for lock in fenced(&locks) {
        let mut last = token(&lock).await;
        for forget in 0..count(20, 4) {
            if forget % 2 == 0 {
                ask(&server, &["flushall"]);
            } else {
                server.kill().unwrap();
                server.restart().unwrap();
            }
            let next = token(&lock).await;
            assert!(next > last, "{next} after {last}");
            last = next;
        }
    }
}

/// A clock that went back cannot be made here, but a token from the future can.
#[tokio::test]
async fn tokens_rise_though_the_clock_went_back_and_their_memory_ends() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let ahead = 4_000_000_000_000_000_u64;
    ask(&server, &["set", "lock:{reentrant}:fence", &ahead.to_string()]);
    let lock = locks.reentrant("reentrant", &Owner::new()).unwrap();
    assert_eq!(token(&lock).await, ahead + 1);
    assert_eq!(token(&lock).await, ahead + 2);
    let left_ms: u64 = ask(&server, &["pttl", "lock:{reentrant}:fence"]).parse().unwrap();
    assert!(left_ms > 0 && left_ms <= 24 * 60 * 60 * 1000);
}

/// A process sleeps through its lease and does not know it. The value that it writes does.
#[tokio::test]
async fn a_holder_that_was_stopped_for_longer_than_its_lease_is_refused() {
    let server = redis::start().unwrap();
    let url = redis::url(server.port());
    let locks = connect(&server, long()).await;
    let lease_ms = SHORT.as_millis().to_string();
    let mut node = example("fenced_writer", &[&url, &lease_ms], None);
    let held = |line: &str| line.strip_prefix("held ").and_then(|token| token.parse::<u64>().ok());
    let stale = node.wait_for(Duration::from_secs(10), held).unwrap();
    node.signal("STOP").unwrap();
    let lock = locks.reentrant("value", &Owner::new()).unwrap();
    let guard = lock.lock_within(Duration::from_secs(10)).await.expect("the lease has ended");
    let fence = guard.fence().unwrap();
    assert!(fence > stale);
    ask(&server, &["hset", "value", "fence", &fence.to_string(), "value", "theirs"]);
    node.signal("CONT").unwrap();
    node.wait_for(Duration::from_secs(10), |line| (line == "refused").then_some(())).unwrap();
    let said = node.wait_for(Duration::from_secs(10), |line| line.strip_prefix("release: ").map(str::to_owned));
    assert_eq!(said.unwrap(), "the lock is lost: it belongs to somebody else now");
    assert!(node.wait(Duration::from_secs(10)).unwrap().success());
    assert_eq!(ask(&server, &["hget", "value", "value"]), "theirs");
    assert!(guard.is_sure());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn the_example_of_a_stale_writer_runs() {
    let server = redis::start().unwrap();
    let mut node = example("stale_writer", &[&redis::url(server.port())], None);
    node.wait_for(Duration::from_secs(10), |line| line.ends_with("refused").then_some(())).unwrap();
    assert!(node.wait(Duration::from_secs(10)).unwrap().success());
}

use std::time::Duration;

use stampede_lock::{Lock, Locks, Owner};
use stampede_testkit::{count, redis};

use crate::support::{SHORT, ask, connect, example, long};

async fn token(lock: &Lock) -> u64 {
    let guard = lock.lock().await.unwrap();
    let fence = guard.fencing_token().unwrap();
    guard.release().await.unwrap();
    fence
}

fn fenced(locks: &Locks) -> Vec<Lock> {
    let owner = Owner::new();
    vec![
        locks.reentrant("reentrant", &owner).unwrap(),
        locks.fair("fair", &owner).unwrap(),
        locks.read_write("write", &owner).unwrap().write().clone(),
        locks.read_write("read", &owner).unwrap().read().clone(),
    ]
}

#[tokio::test]
async fn tokens_increase_with_every_holder_and_stay_the_same_on_reentry() {
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
    assert_eq!(outer.fencing_token(), inner.fencing_token());
    assert_eq!(locks.simple("simple").unwrap().lock().await.unwrap().fencing_token(), None);
}

#[tokio::test]
async fn tokens_increase_when_redis_loses_its_data() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for lock in fenced(&locks) {
        let mut last = token(&lock).await;
        for round in 0..count(20, 4) {
            if round % 2 == 0 {
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

/// The test cannot set the clock of Redis back, but a token from the future has the same effect.
#[tokio::test]
async fn tokens_increase_when_the_clock_goes_back_and_expire() {
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

/// A stopped process does not notice that its lease has expired. The resource refuses its token.
#[tokio::test]
async fn writes_of_a_holder_stopped_for_longer_than_its_ttl_are_refused() {
    let server = redis::start().unwrap();
    let url = redis::url(server.port());
    let locks = connect(&server, long()).await;
    let ttl_ms = SHORT.as_millis().to_string();
    let mut node = example("fenced_writer", &[&url, &ttl_ms], None);
    let held = |line: &str| line.strip_prefix("held ").and_then(|token| token.parse::<u64>().ok());
    let stale = node.wait_for(Duration::from_secs(10), held).unwrap();
    node.signal("STOP").unwrap();
    let lock = locks.reentrant("value", &Owner::new()).unwrap();
    let guard = lock.try_lock_for(Duration::from_secs(10)).await.expect("the lease has expired");
    let fence = guard.fencing_token().unwrap();
    assert!(fence > stale);
    ask(&server, &["hset", "value", "fence", &fence.to_string(), "value", "theirs"]);
    node.signal("CONT").unwrap();
    node.wait_for(Duration::from_secs(10), |line| (line == "refused").then_some(())).unwrap();
    let release = node.wait_for(Duration::from_secs(10), |line| line.strip_prefix("release: ").map(str::to_owned));
    assert_eq!(release.unwrap(), "the lock is lost: it is held by another owner");
    assert!(node.wait(Duration::from_secs(10)).unwrap().success());
    assert_eq!(ask(&server, &["hget", "value", "value"]), "theirs");
    assert!(guard.is_valid());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn stale_writer_example_runs() {
    let server = redis::start().unwrap();
    let mut node = example("stale_writer", &[&redis::url(server.port())], None);
    node.wait_for(Duration::from_secs(10), |line| line.ends_with("refused").then_some(())).unwrap();
    assert!(node.wait(Duration::from_secs(10)).unwrap().success());
}

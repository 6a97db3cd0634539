//! Closing the client, and asking which owner holds a lock.

use std::time::Duration;

use stampede_lock::{Config, Error, Locks};
use stampede_testkit::{count, redis};

use crate::kinds::{KINDS, SINGLE, acquire, lock};
use crate::support::{ask, connect, until};

/// The TTL is 30 s. Without `close` the runtime shuts down before the releases are sent.
#[test]
fn close_waits_until_dropped_guards_are_released() {
    let servers: Vec<_> = (0..3).map(|_| redis::start().unwrap()).collect();
    for round in 0..count(20, 3) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let mut locks = Vec::new();
            for server in &servers {
                locks.push(connect(server, Config::default()).await);
            }
            let mut held = Vec::new();
            for kind in KINDS {
                held.push(acquire(kind, &locks, Duration::from_secs(5)).await.unwrap());
            }
            drop(held);
            for locks in locks {
                locks.close().await.unwrap();
            }
        });
        drop(runtime);
        for server in &servers {
            let left = ask(server, &["--raw", "keys", "lock:*"]);
            assert!(left.lines().all(|key| key.ends_with(":fence")), "round {round} left {left}");
        }
    }
}

#[tokio::test]
async fn closed_client_refuses_new_locks_and_wakes_waiters_but_keeps_held_locks() {
    let server = redis::start().unwrap();
    let (locks, other) = (connect(&server, Config::default()).await, connect(&server, Config::default()).await);
    let held = other.simple("work").unwrap().lock().await.unwrap();
    let guard = locks.simple("mine").unwrap().lock().await.unwrap();
    let waited = locks.simple("work").unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("the waiter is subscribed", async || ask(&server, &["pubsub", "channels"]).contains("work")).await;
    locks.close().await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(Error::Closed)));
    assert!(matches!(locks.simple("new").unwrap().try_lock().await, Err(Error::Closed)));
    assert!(guard.is_valid());
    guard.release().await.unwrap();
    held.release().await.unwrap();
}

#[tokio::test]
async fn is_held_is_true_only_for_the_owner_that_holds_the_lock() {
    let server = redis::start().unwrap();
    let locks: Locks = connect(&server, Config::default()).await;
    for kind in SINGLE {
        let (mine, theirs) = (lock(kind, &locks, kind), lock(kind, &locks, kind));
        assert!(!mine.is_held().await.unwrap(), "{kind}: free");
        let guard = mine.lock().await.unwrap();
        assert!(mine.is_held().await.unwrap() && mine.clone().is_held().await.unwrap(), "{kind}");
        assert!(!theirs.is_held().await.unwrap(), "{kind}: another owner");
        guard.release().await.unwrap();
        assert!(!mine.is_held().await.unwrap(), "{kind}: released");
        let guard = theirs.lock().await.unwrap();
        assert!(!mine.is_held().await.unwrap(), "{kind}: held by another owner");
        guard.release().await.unwrap();
    }
}

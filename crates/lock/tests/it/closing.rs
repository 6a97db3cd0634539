//! The end of a program, and who holds what.

use std::time::Duration;

use stampede_lock::{Config, Error, Locks};
use stampede_testkit::{count, redis};

use crate::kinds::{KINDS, SINGLE, hold, lock};
use crate::support::{ask, connect, until};

/// The lease is 30 s: without waiting, the runtime ends before the releases are sent.
#[test]
fn guards_dropped_at_the_end_of_a_program_are_released_before_close_returns() {
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
                held.push(hold(kind, &locks, Duration::from_secs(5)).await.unwrap());
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
async fn closed_locks_give_no_more_and_those_who_wait_hear_of_it() {
    let server = redis::start().unwrap();
    let (locks, other) = (connect(&server, Config::default()).await, connect(&server, Config::default()).await);
    let held = other.simple("work").unwrap().lock().await.unwrap();
    let in_hand = locks.simple("mine").unwrap().lock().await.unwrap();
    let waited = locks.simple("work").unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("it waits", || ask(&server, &["pubsub", "channels"]).contains("work")).await;
    locks.close().await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(Error::Closed)));
    assert!(matches!(locks.simple("new").unwrap().try_lock().await, Err(Error::Closed)));
    assert!(in_hand.is_sure());
    in_hand.release().await.unwrap();
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_lock_tells_whether_it_is_held_by_its_owner() {
    let server = redis::start().unwrap();
    let locks: Locks = connect(&server, Config::default()).await;
    for kind in SINGLE {
        let (mine, theirs) = (lock(kind, &locks, kind), lock(kind, &locks, kind));
        assert!(!mine.is_held().await.unwrap(), "{kind}: nobody holds it");
        let guard = mine.lock().await.unwrap();
        assert!(mine.is_held().await.unwrap() && mine.clone().is_held().await.unwrap(), "{kind}");
        assert!(!theirs.is_held().await.unwrap(), "{kind}: another's");
        guard.release().await.unwrap();
        assert!(!mine.is_held().await.unwrap(), "{kind}: released");
        let guard = theirs.lock().await.unwrap();
        assert!(!mine.is_held().await.unwrap(), "{kind}: another holds it");
        guard.release().await.unwrap();
    }
}

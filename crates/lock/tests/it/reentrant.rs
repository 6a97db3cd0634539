use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Lock, Locks, Owner};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{ask, connect, long, through, until};

const KEY: &str = "lock:{work}";

/// The number of leases in Redis. Besides them the hash has the owner and the fencing token.
fn lease_count(server: &stampede_testkit::Server) -> usize {
    let fields: usize = ask(server, &["hlen", KEY]).parse().unwrap();
    fields.saturating_sub(2)
}

/// The four exclusive kinds, all with the same name.
fn kinds(locks: &Locks) -> [Lock; 4] {
    let owner = Owner::new();
    [
        locks.simple("work").unwrap(),
        locks.reentrant("work", &owner).unwrap(),
        locks.fair("work", &owner).unwrap(),
        locks.read_write("work", &owner).unwrap().write().clone(),
    ]
}

#[tokio::test]
async fn only_the_owner_may_reenter() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for (kind, make) in [("reentrant", true), ("fair", false)] {
        let lock = |owner: &Owner| {
            if make { locks.reentrant("work", owner).unwrap() } else { locks.fair("work", owner).unwrap() }
        };
        let (owner, other) = (Owner::new(), Owner::new());
        let mut held = Vec::new();
        for depth in 1..=5 {
            held.push(lock(&owner).lock().await.unwrap());
            assert_eq!(lease_count(&server), depth, "{kind}");
        }
        // A clone of the owner re-enters from another task.
        let (mine, clone) = (lock(&owner), owner.clone());
        let inside = tokio::spawn(async move { (mine.try_lock().await, clone) }).await.unwrap().0.unwrap();
        assert!(lock(&owner).is_held().await.unwrap() && !lock(&other).is_held().await.unwrap());
        inside.release().await.unwrap();
        while let Some(guard) = held.pop() {
            assert!(lock(&other).try_lock().await.is_err(), "{kind}: held {} times", held.len() + 1);
            guard.release().await.unwrap();
        }
        assert!(!lock(&owner).is_held().await.unwrap());
        lock(&other).try_lock().await.unwrap().release().await.unwrap();
    }
}

/// A known bug of other implementations: the count is wrong after a release that was sent twice. Here the reply of the first is lost.
#[tokio::test]
async fn release_sent_twice_counts_once() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let config = Config { response_timeout: Duration::from_millis(100), ..Config::default() };
    let locks = through(&proxy, config).await;
    let lock = locks.reentrant("work", &Owner::new()).unwrap();
    lock.lock().await.unwrap().release().await.unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    proxy.set(Fault::DropResponses);
    let releasing = tokio::spawn(inner.release());
    until("Redis has executed it", async || lease_count(&server) == 1).await;
    proxy.set(Fault::None);
    proxy.cut_all();
    releasing.await.unwrap().unwrap();
    assert_eq!(lease_count(&server), 1, "the outer one is still held");
    assert!(lock.is_held().await.unwrap());
    outer.release().await.unwrap();
    assert_eq!(ask(&server, &["exists", KEY]), "0");
}

#[tokio::test]
async fn acquire_sent_twice_counts_once() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let config = Config { response_timeout: Duration::from_millis(100), ..Config::default() };
    let locks = through(&proxy, config).await;
    for lock in kinds(&locks) {
        // Loads the scripts; otherwise the lost reply would be NOSCRIPT.
        lock.lock().await.unwrap().release().await.unwrap();
        proxy.set(Fault::DropResponses);
        let waiting = lock.clone();
        let waiting = tokio::spawn(async move { waiting.try_lock_for(Duration::from_secs(10)).await });
        until("Redis has executed it", async || ask(&server, &["exists", KEY]) == "1").await;
        proxy.set(Fault::None);
        proxy.cut_all();
        let guard = waiting.await.unwrap().expect("the repeated request finds that the lock is held");
        if ask(&server, &["type", KEY]) == "hash" {
            assert_eq!(lease_count(&server), 1);
        }
        guard.release().await.unwrap();
        assert_eq!(ask(&server, &["exists", KEY]), "0");
    }
}

/// The TTL is 30 s, but the lock is free long before.
#[tokio::test]
async fn acquire_without_a_reply_is_released_in_the_background() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let config = Config { response_timeout: Duration::from_millis(100), ..Config::default() };
    let locks = through(&proxy, config).await;
    for lock in kinds(&locks) {
        lock.lock().await.unwrap().release().await.unwrap();
        for fault in [Fault::DropResponses, Fault::Hang] {
            proxy.set(fault);
            let started = Instant::now();
            let unknown = lock.try_lock().await.unwrap_err();
            assert!(matches!(unknown, Error::Unreachable(_)), "{unknown}");
            proxy.set(Fault::None);
            // The delayed request arrives now.
            if fault == Fault::DropResponses {
                assert_eq!(ask(&server, &["exists", KEY]), "1", "it was acquired, but the reply was lost");
                proxy.cut_all();
            }
            until("the lock is free", async || ask(&server, &["exists", KEY]) == "0").await;
            // It stays free.
            tokio::time::sleep(Duration::from_millis(1200)).await;
            assert_eq!(ask(&server, &["exists", KEY]), "0");
            assert!(started.elapsed() < Duration::from_secs(10));
        }
    }
}

/// Callers are cancelled at arbitrary moments.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cancelled_callers_leave_nothing_locked() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let owner = Owner::new();
    let lock_of = |kind: u64| match kind {
        0 => locks.simple("work-simple").unwrap(),
        1 => locks.reentrant("work-reentrant", &Owner::new()).unwrap(),
        2 => locks.fair("work-fair", &Owner::new()).unwrap(),
        3 => locks.read_write("work-rw", &Owner::new()).unwrap().write().clone(),
        _ => locks.read_write("work-rw", &owner).unwrap().read().clone(),
    };
    let (got, cancelled) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let rounds = count(200, 20);
    let tasks: Vec<_> = (0..60u64)
        .map(|task| {
            let lock = lock_of(task % 5);
            let (got, cancelled) = (got.clone(), cancelled.clone());
            tokio::spawn(async move {
                for round in 0..rounds {
                    let timeout = Duration::from_micros((task * 131 + round * 617) % 12_000);
                    match tokio::time::timeout(timeout, lock.lock()).await {
                        Ok(guard) => {
                            got.fetch_add(1, Ordering::SeqCst);
                            drop(guard.unwrap());
                        }
                        Err(_) => _ = cancelled.fetch_add(1, Ordering::SeqCst),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let counts = (got.load(Ordering::SeqCst), cancelled.load(Ordering::SeqCst));
    assert!(counts.0 > 0 && counts.1 > 0, "{counts:?}: the test proves nothing");
    let mut left = String::new();
    until("all locks are free", async || {
        left = ask(&server, &["--raw", "keys", "*"]);
        left.lines().all(|key| key.is_empty() || key.ends_with(":fence"))
    })
    .await;
    assert_eq!(locks.watched_count(), 0);
}

/// Several tasks of one owner wait; when one of them has acquired the lock, all may enter.
#[tokio::test]
async fn waiters_of_one_owner_enter_together() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for fair in [false, true] {
        let lock = |owner: &Owner| {
            if fair { locks.fair("work", owner).unwrap() } else { locks.reentrant("work", owner).unwrap() }
        };
        let guard = lock(&Owner::new()).lock().await.unwrap();
        let owner = Owner::new();
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let lock = lock(&owner);
                tokio::spawn(async move { lock.lock().await.unwrap() })
            })
            .collect();
        crate::support::quiet(&server).await;
        guard.release().await.unwrap();
        let mut held = Vec::new();
        for task in waiting {
            held.push(tokio::time::timeout(Duration::from_secs(5), task).await.unwrap().unwrap());
        }
        assert_eq!(lease_count(&server), 3);
        for guard in held {
            guard.release().await.unwrap();
        }
    }
}

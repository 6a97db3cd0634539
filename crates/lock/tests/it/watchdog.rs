use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, Owner};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{SHORT, ask, connect, long, short, through, until};

const KEY: &str = "lock:{work}";

#[tokio::test]
async fn lock_without_a_fixed_ttl_is_renewed_while_its_guard_exists() {
    let server = redis::start().unwrap();
    let (locks, competing) = (connect(&server, short()).await, connect(&server, short()).await);
    let owner = Owner::new();
    let held = [
        locks.simple("simple").unwrap().lock().await.unwrap(),
        locks.reentrant("reentrant", &owner).unwrap().lock().await.unwrap(),
        locks.fair("fair", &owner).unwrap().lock().await.unwrap(),
        locks.read_write("read", &owner).unwrap().read().lock().await.unwrap(),
        locks.read_write("write", &owner).unwrap().write().lock().await.unwrap(),
    ];
    let other = Owner::new();
    let started = Instant::now();
    while started.elapsed() < 3 * SHORT {
        assert!(competing.simple("simple").unwrap().try_lock().await.is_err());
        assert!(competing.reentrant("reentrant", &other).unwrap().try_lock().await.is_err());
        assert!(competing.fair("fair", &other).unwrap().try_lock().await.is_err());
        assert!(competing.read_write("read", &other).unwrap().write().try_lock().await.is_err());
        assert!(competing.read_write("write", &other).unwrap().read().try_lock().await.is_err());
        assert!(held.iter().all(|guard| guard.is_valid()));
        tokio::time::sleep(SHORT / 10).await;
    }
    for guard in held {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn lost_completes_when_a_lease_expires() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    let ttl = Duration::from_millis(200);
    let lock = || locks.reentrant("work", &Owner::new()).unwrap().with_ttl(ttl).unwrap();
    let started = Instant::now();
    let guard = lock().lock().await.unwrap();
    assert!(guard.is_valid() && guard.valid_for() <= ttl);
    guard.lost().await;
    assert!(started.elapsed() <= ttl + Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(!guard.is_valid() && guard.valid_for().is_zero());
    until("the key has expired", async || ask(&server, &["exists", KEY]) == "0").await;
    assert!(matches!(guard.release().await, Err(Error::Lost)));

    let guard = lock().lock().await.unwrap();
    guard.lost().await;
    let next = lock().lock().await.unwrap();
    assert!(matches!(guard.release().await, Err(Error::HeldByOther)), "held by another lease");
    assert!(next.is_valid());
    next.release().await.unwrap();
}

/// A known bug of other implementations: a renewal in flight during the release restores the lock, or renewal never ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_stops_with_the_release() {
    let server = redis::start().unwrap();
    let config = Config { watchdog_ttl: Duration::from_millis(480), ..Config::default() };
    let locks = connect(&server, config).await;
    for round in 0..count(500, 40) {
        let lock = locks.reentrant("work", &Owner::new()).unwrap();
        let guard = lock.lock().await.unwrap();
        // The watchdog checks every 80 ms: the release happens before, during and after its renewals.
        tokio::time::sleep(Duration::from_micros(round * 7_393 % 180_000)).await;
        guard.release().await.unwrap();
        assert_eq!(ask(&server, &["exists", KEY]), "0");
        assert_eq!(locks.watched_count(), 0);
    }
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(ask(&server, &["exists", KEY]), "0");
}

#[tokio::test]
async fn dropped_guard_is_released_in_the_background() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let lock = locks.simple("work").unwrap();
    drop(lock.lock().await.unwrap());
    // The TTL is 30 s, so a waiter that acquires the lock before was notified.
    let guard = lock.try_lock_for(Duration::from_secs(5)).await.unwrap();
    drop((guard, lock, locks));
    until("released, although the client is dropped", async || ask(&server, &["exists", KEY]) == "0").await;
}

/// Without a runtime there is no background release.
#[test]
fn guard_that_outlives_its_runtime_expires() {
    let server = redis::start().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let url = redis::url(server.port());
    let guard = runtime.block_on(async {
        let locks = Locks::connect(url, short()).await.unwrap();
        locks.simple("work").unwrap().lock().await.unwrap()
    });
    drop(runtime);
    assert_eq!(ask(&server, &["exists", KEY]), "1");
    drop(guard);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // The lease expires.
    runtime.block_on(until("the lock is free", async || ask(&server, &["exists", KEY]) == "0"));
}

/// A known bug of other implementations: renewal stops after a reconnect.
#[tokio::test]
async fn renewal_continues_after_a_broken_connection() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let locks = through(&proxy, short()).await;
    let guard = locks.simple("work").unwrap().lock().await.unwrap();
    for _ in 0..count(50, 5) {
        proxy.cut_all();
        proxy.set(Fault::Cut);
        tokio::time::sleep(SHORT / 8).await;
        proxy.set(Fault::None);
        tokio::time::sleep(SHORT).await;
        assert!(guard.is_valid(), "not renewed after the cut");
    }
    guard.release().await.unwrap();
}

/// A known bug of other implementations: two holders after a lost renewal. The first must know before there is a second.
#[tokio::test]
async fn holder_that_is_cut_off_knows_before_another_owner_acquires_the_lock() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let (locks, competing) = (through(&proxy, short()).await, connect(&server, short()).await);
    for fault in [Fault::Cut, Fault::Hang, Fault::DropResponses] {
        let guard = locks.simple("work").unwrap().lock().await.unwrap();
        let lost = tokio::spawn(guard.lost());
        tokio::time::sleep(SHORT / 2).await;
        proxy.set(fault);
        if fault == Fault::DropResponses {
            // The renewals arrive, so the lock stays, but the holder cannot know that.
            lost.await.unwrap();
            assert!(!guard.is_valid());
        } else {
            let second = competing.simple("work").unwrap().try_lock_for(Duration::from_secs(5)).await.unwrap();
            assert!(!guard.is_valid(), "{fault:?}: valid for two owners");
            lost.await.unwrap();
            second.release().await.unwrap();
        }
        proxy.set(Fault::None);
        proxy.cut_all();
        // The release may fail, but the lock becomes free.
        let _ = guard.release().await;
        until("the lock is free", async || ask(&server, &["exists", KEY]) == "0").await;
    }
}

#[tokio::test]
async fn holder_learns_of_lost_data_with_the_next_renewal() {
    let server = redis::start().unwrap();
    let config = Config { watchdog_ttl: Duration::from_secs(6), ..Config::default() };
    let locks = connect(&server, config).await;
    let owner = Owner::new();
    let held = [
        locks.simple("simple").unwrap().lock().await.unwrap(),
        locks.reentrant("reentrant", &owner).unwrap().lock().await.unwrap(),
        locks.read_write("read", &owner).unwrap().read().lock().await.unwrap(),
    ];
    ask(&server, &["flushall"]);
    let started = Instant::now();
    for guard in &held {
        guard.lost().await;
    }
    // After a third of the TTL, not the whole.
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(locks.watched_count(), 0);
    for guard in held {
        assert!(matches!(guard.release().await, Err(Error::Lost)));
    }
}

#[tokio::test]
async fn thousand_locks_are_renewed_together() {
    let server = redis::start().unwrap();
    let locks = connect(&server, Config { watchdog_ttl: Duration::from_secs(1), ..Config::default() }).await;
    let mut held = Vec::new();
    for number in 0..1000 {
        held.push(locks.simple(&format!("lock-{number}")).unwrap().lock().await.unwrap());
    }
    assert_eq!(locks.watched_count(), 1000);
    tokio::time::sleep(Duration::from_secs(count(10, 2))).await;
    assert!(held.iter().all(|guard| guard.is_valid()));
    drop(held);
    until("all locks are free", async || ask(&server, &["dbsize"]) == "0").await;
}

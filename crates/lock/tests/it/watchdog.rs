use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, Owner};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{SHORT, ask, connect, long, short, through, until};

const KEY: &str = "lock:{work}";

#[tokio::test]
async fn a_lock_without_a_lease_is_renewed_as_long_as_its_guard_lives() {
    let server = redis::start().unwrap();
    let (mine, other) = (connect(&server, short()).await, connect(&server, short()).await);
    let me = Owner::new();
    let held = [
        mine.simple("simple").unwrap().lock().await.unwrap(),
        mine.reentrant("reentrant", &me).unwrap().lock().await.unwrap(),
        mine.fair("fair", &me).unwrap().lock().await.unwrap(),
        mine.read_write("read", &me).unwrap().read().lock().await.unwrap(),
        mine.read_write("write", &me).unwrap().write().lock().await.unwrap(),
    ];
    let them = Owner::new();
    let started = Instant::now();
    while started.elapsed() < 3 * SHORT {
        assert!(other.simple("simple").unwrap().try_lock().await.is_err());
        assert!(other.reentrant("reentrant", &them).unwrap().try_lock().await.is_err());
        assert!(other.fair("fair", &them).unwrap().try_lock().await.is_err());
        assert!(other.read_write("read", &them).unwrap().write().try_lock().await.is_err());
        assert!(other.read_write("write", &them).unwrap().read().try_lock().await.is_err());
        assert!(held.iter().all(|guard| guard.is_sure()));
        tokio::time::sleep(SHORT / 10).await;
    }
    for guard in held {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_lease_ends_and_says_so() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    let lease = Duration::from_millis(200);
    let lock = || locks.reentrant("work", &Owner::new()).unwrap().with_lease(lease).unwrap();
    let started = Instant::now();
    let guard = lock().lock().await.unwrap();
    assert!(guard.is_sure() && guard.sure_for() <= lease);
    guard.lost().await;
    assert!(started.elapsed() <= lease + Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(!guard.is_sure() && guard.sure_for().is_zero());
    until("Redis has forgotten it", || ask(&server, &["exists", KEY]) == "0").await;
    assert!(matches!(guard.release().await, Err(Error::Lost)));

    let guard = lock().lock().await.unwrap();
    guard.lost().await;
    let next = lock().lock().await.unwrap();
    assert!(matches!(guard.release().await, Err(Error::WrongOwner)), "not theirs to release");
    assert!(next.is_sure());
    next.release().await.unwrap();
}

/// Known from elsewhere: a renewal that is under way while the lock is released brings it back, or goes on for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_renewed_after_the_release() {
    let server = redis::start().unwrap();
    let config = Config { watchdog_lease: Duration::from_millis(480), ..Config::default() };
    let locks = connect(&server, config).await;
    for round in 0..count(500, 40) {
        let lock = locks.reentrant("work", &Owner::new()).unwrap();
        let guard = lock.lock().await.unwrap();
        // The watchdog looks every 80 ms: the release falls beside, into and after its renewals.
        tokio::time::sleep(Duration::from_micros(round * 7_393 % 180_000)).await;
        guard.release().await.unwrap();
        assert_eq!(ask(&server, &["exists", KEY]), "0");
        assert_eq!(locks.watched(), 0);
    }
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(ask(&server, &["exists", KEY]), "0");
}

#[tokio::test]
async fn a_dropped_guard_is_released_in_the_background() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let lock = locks.simple("work").unwrap();
    drop(lock.lock().await.unwrap());
    // The lease is 30 s: whoever gets it before was told.
    let guard = lock.lock_within(Duration::from_secs(5)).await.unwrap();
    drop((guard, lock, locks));
    until("released, though nothing of the client is left", || ask(&server, &["exists", KEY]) == "0").await;
}

/// On a runtime that is gone there is no background.
#[test]
fn a_guard_that_outlives_its_runtime_does_no_harm() {
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
    // The lease ends it.
    runtime.block_on(until("it is free", || ask(&server, &["exists", KEY]) == "0"));
}

/// Known from elsewhere: renewal dies after a reconnect.
#[tokio::test]
async fn renewal_goes_on_after_a_broken_connection() {
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
        assert!(guard.is_sure(), "not renewed after the cut");
    }
    guard.release().await.unwrap();
}

/// Known from elsewhere: two holders after a lost renewal. The first must know before there is a second.
#[tokio::test]
async fn who_is_cut_off_knows_it_before_another_gets_the_lock() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let (mine, other) = (through(&proxy, short()).await, connect(&server, short()).await);
    for fault in [Fault::Cut, Fault::Hang, Fault::DropAnswers] {
        let guard = mine.simple("work").unwrap().lock().await.unwrap();
        let lost = tokio::spawn(guard.lost());
        tokio::time::sleep(SHORT / 2).await;
        proxy.set(fault);
        if fault == Fault::DropAnswers {
            // The renewals arrive, so the lock stays; but nobody can be sure of that.
            lost.await.unwrap();
            assert!(!guard.is_sure());
        } else {
            let second = other.simple("work").unwrap().lock_within(Duration::from_secs(5)).await.unwrap();
            assert!(!guard.is_sure(), "{fault:?}: two are sure");
            lost.await.unwrap();
            second.release().await.unwrap();
        }
        proxy.set(Fault::None);
        proxy.cut_all();
        // Whatever it says, it comes to an end, and the lock is free.
        let _ = guard.release().await;
        until("it is free", || ask(&server, &["exists", KEY]) == "0").await;
    }
}

#[tokio::test]
async fn who_was_forgotten_hears_it_with_the_next_renewal() {
    let server = redis::start().unwrap();
    let config = Config { watchdog_lease: Duration::from_secs(6), ..Config::default() };
    let locks = connect(&server, config).await;
    let me = Owner::new();
    let held = [
        locks.simple("simple").unwrap().lock().await.unwrap(),
        locks.reentrant("reentrant", &me).unwrap().lock().await.unwrap(),
        locks.read_write("read", &me).unwrap().read().lock().await.unwrap(),
    ];
    ask(&server, &["flushall"]);
    let started = Instant::now();
    for guard in &held {
        guard.lost().await;
    }
    // A third of the lease, and not the whole of it.
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(locks.watched(), 0);
    for guard in held {
        assert!(matches!(guard.release().await, Err(Error::Lost)));
    }
}

#[tokio::test]
async fn a_thousand_locks_are_renewed_together() {
    let server = redis::start().unwrap();
    let locks = connect(&server, Config { watchdog_lease: Duration::from_secs(1), ..Config::default() }).await;
    let mut held = Vec::new();
    for number in 0..1000 {
        held.push(locks.simple(&format!("lock-{number}")).unwrap().lock().await.unwrap());
    }
    assert_eq!(locks.watched(), 1000);
    tokio::time::sleep(Duration::from_secs(count(10, 2))).await;
    assert!(held.iter().all(|guard| guard.is_sure()));
    drop(held);
    until("all are free", || ask(&server, &["dbsize"]) == "0").await;
}

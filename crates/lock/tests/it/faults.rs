//! Redis dies, restarts and is replaced, while locks are held and waited for.

use std::time::Duration;

use stampede_lock::{Config, Error, Locks, Multi, Owner, Red, Servers};
use stampede_testkit::redis::{MASTER, Watched};
use stampede_testkit::{count, redis};

use crate::support::{ask, connect, long, short, until};

#[tokio::test]
async fn redis_dies_and_forgets_while_the_lock_is_held() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    for _ in 0..count(20, 3) {
        let guard = locks.reentrant("work", &Owner::new()).unwrap().lock().await.unwrap();
        server.kill().unwrap();
        server.restart().unwrap();
        guard.lost().await;
        assert!(matches!(guard.release().await, Err(Error::Lost)));
    }
}

/// With every write on the disk, a restart within the lease is not noticed.
#[tokio::test]
async fn redis_dies_and_remembers_while_the_lock_is_held() {
    let server = redis::start_durable().unwrap();
    let config = Config { watchdog_lease: Duration::from_secs(3), ..short() };
    let locks = connect(&server, config).await;
    let lock = locks.reentrant("work", &Owner::new()).unwrap();
    let guard = lock.lock().await.unwrap();
    for _ in 0..count(20, 3) {
        server.kill().unwrap();
        server.restart().unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(guard.is_sure());
        assert!(lock.is_held().await.unwrap());
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn redis_dies_while_the_lock_is_waited_for() {
    let server = redis::start_durable().unwrap();
    let locks = connect(&server, short()).await;
    let kinds = |locks: &Locks| {
        let owner = Owner::new();
        [
            locks.simple("simple").unwrap(),
            locks.reentrant("reentrant", &owner).unwrap(),
            locks.fair("fair", &owner).unwrap(),
            locks.read_write("write", &owner).unwrap().write().clone(),
        ]
    };
    for _ in 0..count(10, 1) {
        for (held, waited) in kinds(&locks).into_iter().zip(kinds(&locks)) {
            let guard = held.with_lease(Duration::from_secs(2)).unwrap().lock().await.unwrap();
            let waiting = tokio::spawn(async move { waited.lock().await });
            until("it waits", || !ask(&server, &["pubsub", "channels"]).is_empty()).await;
            server.kill().unwrap();
            // For a while nobody answers.
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!waiting.is_finished());
            server.restart().unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            // Lost or released in time: either way it ends.
            let _ = guard.release().await;
        }
    }
}

#[tokio::test]
async fn redis_stands_still_for_longer_than_the_lease() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    let guard = locks.simple("work").unwrap().lock().await.unwrap();
    server.signal("STOP").unwrap();
    guard.lost().await;
    assert!(matches!(locks.simple("other").unwrap().try_lock().await, Err(Error::Unreachable(_))));
    server.signal("CONT").unwrap();
    let next = locks.simple("work").unwrap().lock_within(Duration::from_secs(5)).await.unwrap();
    assert!(!guard.is_sure());
    next.release().await.unwrap();
    assert!(guard.release().await.is_err());
    // What was asked of it while it stood still leaves nothing behind.
    until("all is free", || ask(&server, &["dbsize"]) == "0").await;
}

#[tokio::test]
async fn without_redis_trying_fails_quickly_and_waiting_ends_in_time() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    server.kill().unwrap();
    let lock = locks.simple("work").unwrap();
    let tried = tokio::time::timeout(Duration::from_secs(3), lock.try_lock()).await.unwrap();
    assert!(matches!(tried, Err(Error::Unreachable(_))));
    let waited = lock.lock_within(Duration::from_millis(300));
    let waited = tokio::time::timeout(Duration::from_secs(3), waited).await.unwrap();
    assert!(matches!(waited, Err(Error::Unreachable(_))));
    assert!(Locks::connect(redis::url(server.port()), long()).await.is_err());
}

/// From now on the replica hears nothing of what the master is told.
fn cut_replication(watched: &Watched) {
    ask(&watched.master, &["acl", "setuser", "default", "-sync", "-psync"]);
    ask(&watched.master, &["client", "kill", "type", "replica"]);
}

/// The master dies, and the replica takes its place.
async fn fail_over(watched: &Watched) {
    watched.master.kill().unwrap();
    // The sentinel cuts all connections of the replica when it becomes the master, perhaps this one too.
    let role = || redis::ask(watched.replica.port(), &["role"]);
    until("the replica is the master", || role().is_ok_and(|role| role.starts_with("master"))).await;
    let port = watched.replica.port().to_string();
    until("the sentinel tells so", || {
        ask(&watched.sentinel, &["sentinel", "get-master-addr-by-name", MASTER]).contains(&port)
    })
    .await;
}

async fn by_sentinel(watched: &Watched, config: Config) -> Locks {
    let sentinels = vec![redis::url(watched.sentinel.port())];
    let servers = Servers::Sentinel { sentinels, master: MASTER.to_owned(), node: None };
    Locks::connect(servers, config).await.unwrap()
}

#[tokio::test]
async fn a_replica_that_takes_over_may_not_know_of_a_lock_but_multi_and_red_keep_their_promise() {
    let (watched, second, third) = (redis::start_watched().unwrap(), redis::start().unwrap(), redis::start().unwrap());
    // Leases that outlast the change, so that it is the promise that holds, and not the time.
    let config = Config { watchdog_lease: Duration::from_secs(60), ..short() };
    let changing = by_sentinel(&watched, config.clone()).await;
    let second = connect(&second, config.clone()).await;
    let third = connect(&third, config).await;
    let multi = |me: &Owner| {
        let both = [&changing, &second].map(|locks| locks.reentrant("multi", me).unwrap());
        Multi::new(both.to_vec()).unwrap()
    };
    let red = || Red::new(&[changing.clone(), second.clone(), third.clone()], "red").unwrap();
    cut_replication(&watched);
    let simple_held = changing.simple("simple").unwrap().lock().await.unwrap();
    let multi_held = multi(&Owner::new()).lock().await.unwrap();
    let red_held = red().lock().await.unwrap();
    fail_over(&watched).await;

    let again = changing.simple("simple").unwrap().lock_within(Duration::from_secs(10)).await;
    assert!(again.is_ok() && simple_held.is_sure(), "as documented: two hold the simple lock");
    assert!(matches!(multi(&Owner::new()).try_lock().await, Err(Error::NotAcquired { .. })), "two hold the multi-lock");
    assert!(matches!(red().try_lock().await, Err(Error::NotAcquired { .. })), "two hold the red lock");
    assert!(red_held.is_sure() && multi_held.is_sure());
    red_held.release().await.unwrap();
    drop((simple_held, multi_held));
}

/// A lock that the replica knows of is renewed and released there; one that it does not is told to be lost.
#[tokio::test]
async fn held_and_waited_for_while_a_replica_takes_over() {
    let watched = redis::start_watched().unwrap();
    let config = Config { watchdog_lease: Duration::from_secs(6), ..short() };
    let locks = by_sentinel(&watched, config).await;
    let known = locks.reentrant("known", &Owner::new()).unwrap().lock().await.unwrap();
    until("the replica knows it", || ask(&watched.replica, &["exists", "lock:{known}"]) == "1").await;
    let waited = locks.reentrant("known", &Owner::new()).unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("it waits", || ask(&watched.master, &["pubsub", "channels"]).contains("known")).await;
    cut_replication(&watched);
    let unknown = locks.reentrant("unknown", &Owner::new()).unwrap().lock().await.unwrap();
    fail_over(&watched).await;
    unknown.lost().await;
    assert!(known.is_sure(), "it was renewed on the new master");
    known.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    assert_eq!(ask(&watched.replica, &["exists", "lock:{known}"]), "0");
}

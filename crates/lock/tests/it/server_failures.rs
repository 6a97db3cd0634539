//! Redis dies, restarts and fails over while locks are held and waited for.

use std::time::Duration;

use stampede_lock::{Config, Error, Locks, MultiLock, Owner, RedLock, Servers};
use stampede_testkit::redis::{MASTER, Replicated};
use stampede_testkit::{count, redis};

use crate::support::{ask, connect, long, short, until};

#[tokio::test]
async fn lock_is_lost_when_redis_restarts_empty() {
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

/// With every write synced to disk, a restart within the TTL goes unnoticed.
#[tokio::test]
async fn lock_survives_a_restart_of_redis_with_its_data() {
    let server = redis::start_durable().unwrap();
    let config = Config { watchdog_ttl: Duration::from_secs(3), ..short() };
    let locks = connect(&server, config).await;
    let lock = locks.reentrant("work", &Owner::new()).unwrap();
    let guard = lock.lock().await.unwrap();
    for _ in 0..count(20, 3) {
        server.kill().unwrap();
        server.restart().unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(guard.is_valid());
        assert!(lock.is_held().await.unwrap());
    }
    guard.release().await.unwrap();
}

#[tokio::test]
async fn waiters_acquire_the_lock_after_redis_restarts() {
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
            let guard = held.with_ttl(Duration::from_secs(2)).unwrap().lock().await.unwrap();
            let waiting = tokio::spawn(async move { waited.lock().await });
            until("the waiter is subscribed", async || !ask(&server, &["pubsub", "channels"]).is_empty()).await;
            server.kill().unwrap();
            // Redis is down for a while.
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!waiting.is_finished());
            server.restart().unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
            // It may be lost or released in time.
            let _ = guard.release().await;
        }
    }
}

#[tokio::test]
async fn lock_is_lost_when_redis_hangs_for_longer_than_the_ttl() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    let guard = locks.simple("work").unwrap().lock().await.unwrap();
    server.signal("STOP").unwrap();
    guard.lost().await;
    assert!(matches!(locks.simple("other").unwrap().try_lock().await, Err(Error::Unreachable(_))));
    server.signal("CONT").unwrap();
    let next = locks.simple("work").unwrap().try_lock_for(Duration::from_secs(5)).await.unwrap();
    assert!(!guard.is_valid());
    next.release().await.unwrap();
    assert!(guard.release().await.is_err());
    // The requests that arrived while it hung leave nothing behind.
    until("all locks are free", async || ask(&server, &["dbsize"]) == "0").await;
}

#[tokio::test]
async fn calls_fail_in_time_without_redis() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    server.kill().unwrap();
    let lock = locks.simple("work").unwrap();
    let tried = tokio::time::timeout(Duration::from_secs(3), lock.try_lock()).await.unwrap();
    assert!(matches!(tried, Err(Error::Unreachable(_))));
    let waited = lock.try_lock_for(Duration::from_millis(300));
    let waited = tokio::time::timeout(Duration::from_secs(3), waited).await.unwrap();
    assert!(matches!(waited, Err(Error::Unreachable(_))));
    assert!(Locks::connect(redis::url(server.port()), long()).await.is_err());
}

/// Stops replication from the master to the replica.
fn cut_replication(servers: &Replicated) {
    ask(&servers.master, &["acl", "setuser", "default", "-sync", "-psync"]);
    ask(&servers.master, &["client", "kill", "type", "replica"]);
}

/// Kills the master and waits until the replica has taken over.
async fn fail_over(servers: &Replicated) {
    servers.master.kill().unwrap();
    // The sentinel closes all connections of the replica when it becomes the master, possibly including this one.
    let role = || redis::ask(servers.replica.port(), &["role"]);
    until("the replica is the master", async || role().is_ok_and(|role| role.starts_with("master"))).await;
    let port = servers.replica.port().to_string();
    until("the sentinel announces it", async || {
        ask(&servers.sentinel, &["sentinel", "get-master-addr-by-name", MASTER]).contains(&port)
    })
    .await;
}

async fn by_sentinel(servers: &Replicated, config: Config) -> Locks {
    let sentinels = vec![redis::url(servers.sentinel.port())];
    let servers = Servers::Sentinel { sentinels, master: MASTER.to_owned(), node: None };
    Locks::connect(servers, config).await.unwrap()
}

#[tokio::test]
async fn failover_may_lose_a_simple_lock_but_not_a_multi_lock_or_a_redlock() {
    let (servers, second, third) =
        (redis::start_replicated().unwrap(), redis::start().unwrap(), redis::start().unwrap());
    // The TTL outlasts the failover, so that exclusion does not depend on the expiry of leases.
    let config = Config { watchdog_ttl: Duration::from_secs(60), ..short() };
    let failing_over = by_sentinel(&servers, config.clone()).await;
    let second = connect(&second, config.clone()).await;
    let third = connect(&third, config).await;
    let multi = |owner: &Owner| {
        let both = [&failing_over, &second].map(|locks| locks.reentrant("multi", owner).unwrap());
        MultiLock::new(both.to_vec()).unwrap()
    };
    let redlock = || RedLock::new(&[failing_over.clone(), second.clone(), third.clone()], "redlock").unwrap();
    cut_replication(&servers);
    let simple_held = failing_over.simple("simple").unwrap().lock().await.unwrap();
    let multi_held = multi(&Owner::new()).lock().await.unwrap();
    let redlock_held = redlock().lock().await.unwrap();
    fail_over(&servers).await;

    let again = failing_over.simple("simple").unwrap().try_lock_for(Duration::from_secs(10)).await;
    assert!(again.is_ok() && simple_held.is_valid(), "as documented: two owners hold the simple lock");
    assert!(
        matches!(multi(&Owner::new()).try_lock().await, Err(Error::NotAcquired { .. })),
        "two owners hold the multi-lock"
    );
    assert!(matches!(redlock().try_lock().await, Err(Error::NotAcquired { .. })), "two owners hold the Redlock");
    assert!(redlock_held.is_valid() && multi_held.is_valid());
    redlock_held.release().await.unwrap();
    drop((simple_held, multi_held));
}

/// A lock that was replicated is renewed and released on the new master; one that was not is reported as lost.
#[tokio::test]
async fn replicated_lock_survives_a_failover_and_unreplicated_lock_is_lost() {
    let servers = redis::start_replicated().unwrap();
    let config = Config { watchdog_ttl: Duration::from_secs(6), ..short() };
    let locks = by_sentinel(&servers, config).await;
    let replicated = locks.reentrant("replicated", &Owner::new()).unwrap().lock().await.unwrap();
    until("the replica has it", async || ask(&servers.replica, &["exists", "lock:{replicated}"]) == "1").await;
    let waited = locks.reentrant("replicated", &Owner::new()).unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("the waiter is subscribed", async || ask(&servers.master, &["pubsub", "channels"]).contains("replicated"))
        .await;
    cut_replication(&servers);
    let unreplicated = locks.reentrant("unreplicated", &Owner::new()).unwrap().lock().await.unwrap();
    fail_over(&servers).await;
    unreplicated.lost().await;
    assert!(replicated.is_valid(), "it was renewed on the new master");
    replicated.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    assert_eq!(ask(&servers.replica, &["exists", "lock:{replicated}"]), "0");
}

use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, MultiLock, Owner, RedLock};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, redis};

use crate::support::{SHORT, ask, connect, long, short, through, until};

async fn servers(number: usize) -> (Vec<Server>, Vec<Locks>) {
    let servers: Vec<Server> = (0..number).map(|_| redis::start().unwrap()).collect();
    let mut locks = Vec::new();
    for server in &servers {
        locks.push(connect(server, short()).await);
    }
    (servers, locks)
}

fn nothing_held(servers: &[Server]) -> bool {
    servers.iter().all(|server| ask(server, &["--raw", "keys", "lock:*"]).lines().all(|key| key.ends_with(":fence")))
}

#[tokio::test]
async fn multi_lock_is_all_or_none_and_reentrant() {
    let (servers, locks) = servers(2).await;
    let multi = |owner: &Owner| {
        let all =
            [("a", 0), ("b", 1), ("c", 0)].map(|(name, on): (_, usize)| locks[on].reentrant(name, owner).unwrap());
        MultiLock::new(all.to_vec()).unwrap()
    };
    let (owner, other) = (Owner::new(), Owner::new());
    // If one lock is busy, none is held.
    let blocking = locks[1].reentrant("b", &other).unwrap().lock().await.unwrap();
    assert!(matches!(multi(&owner).try_lock().await, Err(Error::NotAcquired { .. })));
    assert!(matches!(multi(&owner).try_lock_for(Duration::from_millis(100)).await, Err(Error::NotAcquired { .. })));
    locks[0].reentrant("a", &other).unwrap().try_lock().await.unwrap().release().await.unwrap();
    let waiting = tokio::spawn({
        let multi = multi(&owner);
        async move { multi.lock().await }
    });
    blocking.release().await.unwrap();
    let outer = waiting.await.unwrap().unwrap();
    let inner = multi(&owner).try_lock().await.unwrap();
    inner.release().await.unwrap();
    assert!(outer.is_valid() && outer.guards().len() == 3);
    assert!(multi(&other).try_lock().await.is_err());
    outer.release().await.unwrap();
    until("all locks are free", async || nothing_held(&servers)).await;

    // If one lock is lost, the multi-lock is lost.
    let held = multi(&owner).lock().await.unwrap();
    ask(&servers[1], &["flushall"]);
    held.lost().await;
    assert!(!held.is_valid());
    assert!(matches!(held.release().await, Err(Error::Lost)));
    until("the other locks are free too", async || nothing_held(&servers)).await;
}

#[tokio::test]
async fn multi_lock_and_redlock_reject_invalid_members() {
    let (_servers, locks) = servers(2).await;
    let owner = Owner::new();
    let assert_invalid = |lock: Result<MultiLock, Error>| assert!(matches!(lock, Err(Error::InvalidArgument(_))));
    assert_invalid(MultiLock::new(Vec::new()));
    assert_invalid(MultiLock::new(vec![locks[0].simple("a").unwrap(), locks[0].simple("a").unwrap()]));
    assert_invalid(MultiLock::new(vec![
        locks[0].reentrant("a", &owner).unwrap(),
        locks[0].reentrant("a", &Owner::new()).unwrap(),
    ]));
    assert_invalid(MultiLock::new(vec![locks[0].fair("a", &owner).unwrap()]));
    assert!(
        MultiLock::new(vec![locks[0].reentrant("a", &owner).unwrap(), locks[0].reentrant("a", &owner).unwrap()])
            .is_ok()
    );
    assert!(matches!(RedLock::new(&locks, "a"), Err(Error::InvalidArgument(_))), "the majority of two servers is both");
    let twice = [locks[0].clone(), locks[1].clone(), locks[0].clone()];
    assert!(matches!(RedLock::new(&twice, "a"), Err(Error::InvalidArgument(_))));
}

#[tokio::test]
async fn redlock_is_valid_with_a_majority_of_servers_and_not_with_fewer() {
    let (servers, locks) = servers(3).await;
    let redlock = || RedLock::new(&locks, "leader").unwrap();
    let guard = redlock().lock().await.unwrap();
    assert!(matches!(redlock().try_lock().await, Err(Error::NotAcquired { .. })));
    // One of three servers may fail.
    servers[0].kill().unwrap();
    tokio::time::sleep(2 * SHORT).await;
    assert!(guard.is_valid());
    assert!(redlock().try_lock().await.is_err());
    guard.release().await.unwrap();
    let guard = redlock().try_lock_for(Duration::from_secs(5)).await.unwrap();
    // Two may not: the holder is notified, and no other owner acquires the lock.
    servers[1].kill().unwrap();
    guard.lost().await;
    assert!(!guard.is_valid());
    let refused = redlock().try_lock().await.unwrap_err();
    assert!(matches!(refused, Error::Unreachable(_) | Error::NotAcquired { .. }), "{refused}");
    assert!(guard.release().await.is_err());
    until("the partial acquisition is released", async || nothing_held(&servers[2..])).await;
    servers[0].restart().unwrap();
    servers[1].restart().unwrap();
    redlock().try_lock_for(Duration::from_secs(5)).await.unwrap().release().await.unwrap();
    until("all locks are free", async || nothing_held(&servers)).await;
}

#[tokio::test]
async fn redlock_waiter_is_notified_when_the_lock_is_free() {
    let (servers, _) = servers(3).await;
    let mut locks = Vec::new();
    for server in &servers {
        locks.push(connect(server, long()).await);
    }
    let redlock = || RedLock::new(&locks, "leader").unwrap();
    let guard = redlock().lock().await.unwrap();
    let waiting = redlock();
    let waiting = tokio::spawn(async move { waiting.lock().await });
    // On whichever server has refused it: the first guard may have been granted by the other two.
    let is_subscribed = |server| ask(server, &["pubsub", "channels"]).contains("leader");
    until("the waiter is subscribed", async || servers.iter().any(is_subscribed)).await;
    guard.release().await.unwrap();
    // The TTL is 30 s.
    let guard = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    let ttl = Duration::from_millis(200);
    let guard = redlock().with_ttl(ttl).unwrap().lock().await.unwrap();
    guard.lost().await;
    redlock().try_lock_for(Duration::from_secs(5)).await.unwrap().release().await.unwrap();
}

/// One server hangs. The others are enough, and calls do not wait for it longer than the TTL allows.
#[tokio::test]
async fn redlock_does_not_wait_for_a_hanging_server() {
    let (servers, mut locks) = servers(3).await;
    let proxy = Proxy::start(servers[2].address()).await.unwrap();
    locks[2] = through(&proxy, Config { response_timeout: Duration::from_secs(5), ..short() }).await;
    proxy.set(Fault::Hang);
    let ttl = Duration::from_millis(300);
    let redlock = || RedLock::new(&locks, "leader").unwrap().with_ttl(ttl).unwrap();
    for _ in 0..3 {
        let started = Instant::now();
        let guard = redlock().lock().await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        assert!(guard.is_valid());
        guard.release().await.unwrap();
    }
    // With two hanging servers there is no majority.
    servers[1].signal("STOP").unwrap();
    let refused = redlock().try_lock_for(Duration::from_millis(500)).await.unwrap_err();
    servers[1].signal("CONT").unwrap();
    assert!(matches!(refused, Error::Unreachable(_)), "{refused}");
}

/// A server that replies with errors is treated like one that is down.
#[tokio::test]
async fn redlock_works_if_one_server_replies_with_errors() {
    let (servers, locks) = servers(3).await;
    let redlock = || RedLock::new(&locks, "leader").unwrap();
    ask(&servers[2], &["lpush", "lock:{leader}", "something else"]);
    let guard = redlock().lock().await.unwrap();
    let waited = redlock();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("the waiter is subscribed", async || ask(&servers[0], &["pubsub", "channels"]).contains("leader")).await;
    guard.release().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    ask(&servers[1], &["lpush", "lock:{leader}", "something else"]);
    assert!(matches!(redlock().lock().await, Err(Error::Refused(_))));
}

use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, Multi, Owner, Red};
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
async fn multi_is_all_or_none_and_re_entrant() {
    let (servers, locks) = servers(2).await;
    let multi = |me: &Owner| {
        let all = [("a", 0), ("b", 1), ("c", 0)].map(|(name, on): (_, usize)| locks[on].reentrant(name, me).unwrap());
        Multi::new(all.to_vec()).unwrap()
    };
    let (me, them) = (Owner::new(), Owner::new());
    // One in the way is enough, and the others are not kept.
    let in_the_way = locks[1].reentrant("b", &them).unwrap().lock().await.unwrap();
    assert!(matches!(multi(&me).try_lock().await, Err(Error::NotAcquired { .. })));
    assert!(matches!(multi(&me).lock_within(Duration::from_millis(100)).await, Err(Error::NotAcquired { .. })));
    locks[0].reentrant("a", &them).unwrap().try_lock().await.unwrap().release().await.unwrap();
    let waiting = tokio::spawn({
        let multi = multi(&me);
        async move { multi.lock().await }
    });
    in_the_way.release().await.unwrap();
    let outer = waiting.await.unwrap().unwrap();
    let inner = multi(&me).try_lock().await.unwrap();
    inner.release().await.unwrap();
    assert!(outer.is_sure() && outer.guards().len() == 3);
    assert!(multi(&them).try_lock().await.is_err());
    outer.release().await.unwrap();
    until("all are free", || nothing_held(&servers)).await;

    // Losing one is losing all.
    let held = multi(&me).lock().await.unwrap();
    ask(&servers[1], &["flushall"]);
    held.lost().await;
    assert!(!held.is_sure());
    assert!(matches!(held.release().await, Err(Error::Lost)));
    until("the others are free too", || nothing_held(&servers)).await;
}

#[tokio::test]
async fn multi_and_red_refuse_what_cannot_work() {
    let (_servers, locks) = servers(2).await;
    let me = Owner::new();
    let setting = |made: Result<Multi, Error>| assert!(matches!(made, Err(Error::Setting(_))));
    setting(Multi::new(Vec::new()));
    setting(Multi::new(vec![locks[0].simple("a").unwrap(), locks[0].simple("a").unwrap()]));
    setting(Multi::new(vec![locks[0].reentrant("a", &me).unwrap(), locks[0].reentrant("a", &Owner::new()).unwrap()]));
    setting(Multi::new(vec![locks[0].fair("a", &me).unwrap()]));
    assert!(Multi::new(vec![locks[0].reentrant("a", &me).unwrap(), locks[0].reentrant("a", &me).unwrap()]).is_ok());
    assert!(matches!(Red::new(&locks, "a"), Err(Error::Setting(_))), "two servers have no majority but both");
    let twice = [locks[0].clone(), locks[1].clone(), locks[0].clone()];
    assert!(matches!(Red::new(&twice, "a"), Err(Error::Setting(_))));
}

#[tokio::test]
async fn red_holds_with_most_of_its_servers_and_not_with_fewer() {
    let (servers, locks) = servers(3).await;
    let red = || Red::new(&locks, "leader").unwrap();
    let guard = red().lock().await.unwrap();
    assert!(matches!(red().try_lock().await, Err(Error::NotAcquired { .. })));
    // One of three may die.
    servers[0].kill().unwrap();
    tokio::time::sleep(2 * SHORT).await;
    assert!(guard.is_sure());
    assert!(red().try_lock().await.is_err());
    guard.release().await.unwrap();
    let guard = red().lock_within(Duration::from_secs(5)).await.unwrap();
    // Two may not: the holder hears of it, and nobody else gets it.
    servers[1].kill().unwrap();
    guard.lost().await;
    assert!(!guard.is_sure());
    let refused = red().try_lock().await.unwrap_err();
    assert!(matches!(refused, Error::Unreachable(_) | Error::NotAcquired { .. }), "{refused}");
    assert!(guard.release().await.is_err());
    until("what was got of it is released again", || nothing_held(&servers[2..])).await;
    servers[0].restart().unwrap();
    servers[1].restart().unwrap();
    red().lock_within(Duration::from_secs(5)).await.unwrap().release().await.unwrap();
    until("all are free", || nothing_held(&servers)).await;
}

#[tokio::test]
async fn red_is_told_when_the_lock_is_free() {
    let (servers, _) = servers(3).await;
    let mut locks = Vec::new();
    for server in &servers {
        locks.push(connect(server, long()).await);
    }
    let red = || Red::new(&locks, "leader").unwrap();
    let guard = red().lock().await.unwrap();
    let waiting = red();
    let waiting = tokio::spawn(async move { waiting.lock().await });
    until("it waits", || ask(&servers[0], &["pubsub", "channels"]).contains("leader")).await;
    guard.release().await.unwrap();
    // The lease is 30 s.
    let guard = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    let lease = Duration::from_millis(200);
    let guard = red().with_lease(lease).unwrap().lock().await.unwrap();
    guard.lost().await;
    red().lock_within(Duration::from_secs(5)).await.unwrap().release().await.unwrap();
}

/// One server hangs. The others are enough, and nobody waits for it longer than the lease allows.
#[tokio::test]
async fn red_does_not_wait_for_a_server_that_hangs() {
    let (servers, mut locks) = servers(3).await;
    let proxy = Proxy::start(servers[2].address()).await.unwrap();
    locks[2] = through(&proxy, Config { answer_within: Duration::from_secs(5), ..short() }).await;
    proxy.set(Fault::Hang);
    let lease = Duration::from_millis(300);
    let red = || Red::new(&locks, "leader").unwrap().with_lease(lease).unwrap();
    for _ in 0..3 {
        let started = Instant::now();
        let guard = red().lock().await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
        assert!(guard.is_sure());
        guard.release().await.unwrap();
    }
    // Two that hang are too many.
    servers[1].signal("STOP").unwrap();
    let refused = red().lock_within(Duration::from_millis(500)).await.unwrap_err();
    servers[1].signal("CONT").unwrap();
    assert!(matches!(refused, Error::Unreachable(_)), "{refused}");
}

/// A server that refuses is like one that is away: the others decide.
#[tokio::test]
async fn red_waits_though_one_server_refuses() {
    let (servers, locks) = servers(3).await;
    let red = || Red::new(&locks, "leader").unwrap();
    ask(&servers[2], &["lpush", "lock:{leader}", "something else"]);
    let guard = red().lock().await.unwrap();
    let waited = red();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("it waits", || ask(&servers[0], &["pubsub", "channels"]).contains("leader")).await;
    guard.release().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    ask(&servers[1], &["lpush", "lock:{leader}", "something else"]);
    assert!(matches!(red().lock().await, Err(Error::Refused(_))));
}

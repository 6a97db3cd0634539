//! A Redlock while its servers hang, fail and restart empty.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, RedLock};
use stampede_testkit::{Server, count, redis};

use crate::support::{ask, connect, until};

async fn three_servers(config: &Config) -> (Vec<Server>, Vec<Locks>, Vec<Locks>) {
    let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for server in &servers {
        mine.push(connect(server, config.clone()).await);
        theirs.push(connect(server, config.clone()).await);
    }
    (servers, mine, theirs)
}

fn is_held_on(server: &Server) -> bool {
    redis::ask(server.port(), &["exists", "lock:{leader}"]).is_ok_and(|exists| exists == "1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restart_of_empty_servers_keeps_the_lock() {
    let default = Config::default();
    let watchdog_ttl = if count(1, 0) == 1 { default.watchdog_ttl } else { Duration::from_secs(3) };
    let config = Config { watchdog_ttl, ..default };
    let (servers, mine, theirs) = three_servers(&config).await;
    let guard = RedLock::new(&mine, "leader").unwrap().lock().await.unwrap();
    // A competing owner tries continuously.
    let (attempts, rival) = (Arc::new(AtomicU64::new(0)), RedLock::new(&theirs, "leader").unwrap());
    let trying = tokio::spawn({
        let attempts = attempts.clone();
        async move {
            loop {
                match rival.try_lock().await {
                    Ok(guard) => return guard,
                    Err(Error::NotAcquired { .. } | Error::Unreachable(_)) => attempts.fetch_add(1, Ordering::SeqCst),
                    Err(error) => panic!("{error}"),
                };
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    });
    for _ in 0..2 {
        for server in &servers {
            server.kill().unwrap();
            server.restart().unwrap();
            // A renewal interval passes before the next restart, plus a margin for a slow machine.
            tokio::time::sleep(watchdog_ttl / 3 + Duration::from_millis(300)).await;
            assert!(guard.is_valid(), "lost");
            assert!(!trying.is_finished(), "two owners hold the lock");
        }
    }
    assert!(attempts.load(Ordering::SeqCst) > 100);
    until("the watchdog has acquired all servers again", async || guard.held_servers() == 3).await;
    guard.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(10), trying).await.unwrap().unwrap();
    next.release().await.unwrap();
    until("all locks are free", async || !servers.iter().any(is_held_on)).await;
}

/// Two servers are a majority: another owner may have held the lock.
#[tokio::test]
async fn lock_is_lost_for_good_when_two_servers_lose_their_data_at_once() {
    let config = Config { watchdog_ttl: Duration::from_secs(6), ..Config::default() };
    let (servers, mine, theirs) = three_servers(&config).await;
    let guard = RedLock::new(&mine, "leader").unwrap().lock().await.unwrap();
    for server in &servers[..2] {
        ask(server, &["flushall"]);
    }
    let started = Instant::now();
    guard.lost().await;
    assert!(started.elapsed() < Duration::from_secs(4), "lost with the next renewal, not when the lease expires");
    assert!(!guard.is_valid());
    assert!(matches!(guard.release().await, Err(Error::Lost | Error::HeldByOther)));
    let rival = RedLock::new(&theirs, "leader").unwrap().try_lock_for(Duration::from_secs(10)).await.unwrap();
    rival.release().await.unwrap();
    until("all locks are free", async || !servers.iter().any(is_held_on)).await;
}

/// One of three servers hangs: with the default settings, calls do not wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_server_does_not_slow_down_a_redlock() {
    let (servers, mine, theirs) = three_servers(&Config::default()).await;
    let redlock = || RedLock::new(&mine, "leader").unwrap();
    redlock().lock().await.unwrap().release().await.unwrap();
    servers[1].signal("STOP").unwrap();
    let mut slowest = Duration::ZERO;
    for round in 0..count(200, 20) {
        let started = Instant::now();
        let guard = redlock().lock().await.unwrap();
        slowest = slowest.max(started.elapsed());
        assert!(guard.is_valid() && guard.held_servers() == 2);
        if round % 4 == 0 {
            assert!(RedLock::new(&theirs, "leader").unwrap().try_lock().await.is_err(), "two owners hold the lock");
        }
        let started = Instant::now();
        guard.release().await.unwrap();
        slowest = slowest.max(started.elapsed());
    }
    // A client that has never connected to it, and one that waits while another holds the lock.
    let mut fresh = Vec::new();
    for server in &servers {
        fresh.push(Locks::new(redis::url(server.port()), Config::default()).unwrap());
    }
    let waited = RedLock::new(&fresh, "leader").unwrap();
    let started = Instant::now();
    let guard = waited.lock().await.unwrap();
    slowest = slowest.max(started.elapsed());
    let next = redlock();
    let waiting = tokio::spawn(async move { next.lock().await });
    until("the waiter is subscribed", async || ask(&servers[0], &["pubsub", "channels"]).contains("leader")).await;
    guard.release().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    servers[1].signal("CONT").unwrap();
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    // The requests that arrived while the server hung leave nothing behind, and it is used again.
    until("all locks are free", async || !servers.iter().any(is_held_on)).await;
    let guard = redlock().lock().await.unwrap();
    until("it is held on all three servers", async || guard.held_servers() == 3).await;
    guard.release().await.unwrap();
}

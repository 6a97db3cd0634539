//! A red lock while its servers hang, die and come back empty.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, Red};
use stampede_testkit::{Server, count, redis};

use crate::support::{ask, connect, until};

async fn three(config: &Config) -> (Vec<Server>, Vec<Locks>, Vec<Locks>) {
    let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for server in &servers {
        mine.push(connect(server, config.clone()).await);
        theirs.push(connect(server, config.clone()).await);
    }
    (servers, mine, theirs)
}

fn holds(server: &Server) -> bool {
    redis::ask(server.port(), &["exists", "lock:{leader}"]).is_ok_and(|exists| exists == "1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_servers_that_forget_does_not_break_exclusion() {
    let default = Config::default();
    let watchdog_lease = if count(1, 0) == 1 { default.watchdog_lease } else { Duration::from_secs(3) };
    let config = Config { watchdog_lease, ..default };
    let (servers, mine, theirs) = three(&config).await;
    let guard = Red::new(&mine, "leader").unwrap().lock().await.unwrap();
    // Somebody else tries all the time.
    let (tries, rival) = (Arc::new(AtomicU64::new(0)), Red::new(&theirs, "leader").unwrap());
    let trying = tokio::spawn({
        let tries = tries.clone();
        async move {
            loop {
                match rival.try_lock().await {
                    Ok(guard) => return guard,
                    Err(Error::NotAcquired { .. } | Error::Unreachable(_)) => tries.fetch_add(1, Ordering::SeqCst),
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
            // A renewal interval passes before the next one goes, and a little for a slow machine.
            tokio::time::sleep(watchdog_lease / 3 + Duration::from_millis(300)).await;
            assert!(guard.is_sure(), "lost");
            assert!(!trying.is_finished(), "two hold the lock");
        }
    }
    assert!(tries.load(Ordering::SeqCst) > 100);
    until("the watchdog has acquired all of them again", || guard.held_on() == 3).await;
    guard.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(10), trying).await.unwrap().unwrap();
    next.release().await.unwrap();
    until("all is free", || !servers.iter().any(holds)).await;
}

/// Two at once are the majority: somebody else may have had it.
#[tokio::test]
async fn two_servers_that_forget_at_once_lose_the_lock_for_good() {
    let config = Config { watchdog_lease: Duration::from_secs(6), ..Config::default() };
    let (servers, mine, theirs) = three(&config).await;
    let guard = Red::new(&mine, "leader").unwrap().lock().await.unwrap();
    for server in &servers[..2] {
        ask(server, &["flushall"]);
    }
    let started = Instant::now();
    guard.lost().await;
    assert!(started.elapsed() < Duration::from_secs(4), "with the next renewal, not with the lease");
    assert!(!guard.is_sure());
    assert!(matches!(guard.release().await, Err(Error::Lost | Error::WrongOwner)));
    let rival = Red::new(&theirs, "leader").unwrap().lock_within(Duration::from_secs(10)).await.unwrap();
    rival.release().await.unwrap();
    until("all is free", || !servers.iter().any(holds)).await;
}

/// One of three hangs: the others are the majority, and nobody waits for it, with the settings of the default.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_server_does_not_slow_a_red_lock_down() {
    let (servers, mine, theirs) = three(&Config::default()).await;
    let red = || Red::new(&mine, "leader").unwrap();
    red().lock().await.unwrap().release().await.unwrap();
    servers[1].signal("STOP").unwrap();
    let mut slowest = Duration::ZERO;
    for round in 0..count(200, 20) {
        let started = Instant::now();
        let guard = red().lock().await.unwrap();
        slowest = slowest.max(started.elapsed());
        assert!(guard.is_sure() && guard.held_on() == 2);
        if round % 4 == 0 {
            assert!(Red::new(&theirs, "leader").unwrap().try_lock().await.is_err(), "two hold the lock");
        }
        let started = Instant::now();
        guard.release().await.unwrap();
        slowest = slowest.max(started.elapsed());
    }
    // A client that has never reached it, and one that waits while another holds.
    let mut fresh = Vec::new();
    for server in &servers {
        fresh.push(Locks::new(redis::url(server.port()), Config::default()).unwrap());
    }
    let waited = Red::new(&fresh, "leader").unwrap();
    let started = Instant::now();
    let guard = waited.lock().await.unwrap();
    slowest = slowest.max(started.elapsed());
    let next = red();
    let waiting = tokio::spawn(async move { next.lock().await });
    until("it waits", || ask(&servers[0], &["pubsub", "channels"]).contains("leader")).await;
    guard.release().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
    servers[1].signal("CONT").unwrap();
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    // What the third was asked while it hung leaves nothing behind, and it is used again.
    until("all is free", || !servers.iter().any(holds)).await;
    let guard = red().lock().await.unwrap();
    until("all three hold it", || guard.held_on() == 3).await;
    guard.release().await.unwrap();
}

use std::time::{Duration, Instant};

use stampede_lock::{Config, Owner};
use stampede_testkit::{count, redis};
use tokio::sync::mpsc;

use crate::support::{SHORT, ask, connect, example, long, short, until};

fn in_line(server: &stampede_testkit::Server) -> u64 {
    ask(server, &["zcard", "lock:{work}:line"]).parse().unwrap()
}

#[tokio::test]
async fn first_come_first_served_over_several_clients() {
    let server = redis::start().unwrap();
    let clients = [connect(&server, long()).await, connect(&server, long()).await, connect(&server, long()).await];
    let guard = clients[0].fair("work", &Owner::new()).unwrap().lock().await.unwrap();
    let (told, mut heard) = mpsc::channel(100);
    let waiters = count(90, 15);
    for (turn, client) in (0..waiters).zip(clients.iter().cycle()) {
        let (lock, told) = (client.fair("work", &Owner::new()).unwrap(), told.clone());
        tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            told.send(turn).await.unwrap();
            guard.release().await.unwrap();
        });
        until("it stands in line", || in_line(&server) == turn + 1).await;
    }
    // Who only tries does not jump the line.
    guard.release().await.unwrap();
    for turn in 0..waiters {
        assert_eq!(heard.recv().await, Some(turn));
    }
    until("everything is gone", || ask(&server, &["--raw", "keys", "lock:{work}*"]) == "lock:{work}:fence").await;
}

/// Known from elsewhere: those who wait behind somebody who died wait for ever.
#[tokio::test]
async fn who_dies_in_line_is_passed_over() {
    let server = redis::start().unwrap();
    let (url, locks) = (redis::url(server.port()), connect(&server, short()).await);
    for round in 0..count(10, 2) {
        let guard = locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap();
        let mut dead: Vec<_> =
            (0..2).map(|_| example("contend", &["fair", "work", "1", "1", &url], Some(SHORT))).collect();
        until("both stand in line", || in_line(&server) == 2).await;
        let lock = locks.fair("work", &Owner::new()).unwrap();
        let waiting = tokio::spawn(async move { lock.lock().await });
        until("so do we", || in_line(&server) == 3).await;
        // In half of the rounds everybody outlives its place several times before.
        if round % 2 == 0 {
            tokio::time::sleep(3 * SHORT).await;
            assert_eq!(in_line(&server), 3, "the living keep their places");
        }
        for node in &mut dead {
            node.kill().unwrap();
        }
        guard.release().await.unwrap();
        let started = Instant::now();
        let guard = waiting.await.unwrap().unwrap();
        assert!(started.elapsed() < 4 * SHORT, "{:?}", started.elapsed());
        guard.release().await.unwrap();
        assert_eq!(ask(&server, &["exists", "lock:{work}", "lock:{work}:line", "lock:{work}:living"]), "0");
    }
}

#[tokio::test]
async fn who_gives_up_leaves_the_line_and_the_next_is_told() {
    let server = redis::start().unwrap();
    // If anybody had to wait for a lease or a place to end, it would be half a minute.
    let locks = connect(&server, Config { watchdog_lease: Duration::from_secs(30), ..long() }).await;
    let lock = || locks.fair("work", &Owner::new()).unwrap();
    let guard = lock().lock().await.unwrap();
    let first = tokio::spawn({
        let lock = lock();
        async move { lock.lock().await }
    });
    until("the first waits", || in_line(&server) == 1).await;
    assert!(lock().lock_within(Duration::from_millis(50)).await.is_err());
    until("the second has left", || in_line(&server) == 1).await;
    let third = tokio::spawn({
        let lock = lock();
        async move { lock.lock().await }
    });
    until("the third waits", || in_line(&server) == 2).await;
    // The first goes away in the moment in which it is its turn.
    guard.release().await.unwrap();
    first.abort();
    if let Ok(got) = first.await {
        drop(got);
    }
    let started = Instant::now();
    third.await.unwrap().unwrap().release().await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5));
}

use std::time::{Duration, Instant};

use stampede_lock::{Config, Owner};
use stampede_testkit::{count, redis};
use tokio::sync::mpsc;

use crate::support::{SHORT, ask, connect, example, long, quiet, short, until};

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
    let tries = clients[1].clone();
    let trying = tokio::spawn(async move {
        while tries.fair("work", &Owner::new()).unwrap().try_lock().await.is_err() {}
        99
    });
    guard.release().await.unwrap();
    for turn in 0..waiters {
        assert_eq!(heard.recv().await, Some(turn));
    }
    assert_eq!(trying.await.unwrap(), 99);
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

/// While Redis is away for longer than a place lasts, who waits in line waits, and does nothing else.
#[tokio::test]
async fn who_waits_in_line_sleeps_while_redis_is_away() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let guard = locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap();
    let mut node = example("contend", &["fair", "work", "8", "1", &redis::url(server.port())], Some(SHORT));
    until("they stand in line", || in_line(&server) == 8).await;
    server.kill().unwrap();
    tokio::time::sleep(3 * SHORT).await;
    let before = cpu_ms(node.pid());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let spent = cpu_ms(node.pid()) - before;
    assert!(spent < 300, "{spent} ms of processor time in a second of waiting");
    assert!(node.ended().unwrap().is_none());
    drop(guard);
}

fn cpu_ms(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // In hundredths of a second, user and system.
    10 * (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
}

/// Redis may evict one of the keys and keep the other.
#[tokio::test]
async fn a_line_without_its_living_does_not_block() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let guard = locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap();
    ask(&server, &["zadd", "lock:{work}:line", "1", "nobody"]);
    let waited = locks.fair("work", &Owner::new()).unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    quiet(&server).await;
    guard.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
}

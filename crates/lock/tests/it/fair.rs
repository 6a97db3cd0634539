use std::time::{Duration, Instant};

use stampede_lock::{Config, Owner};
use stampede_testkit::{count, redis};
use tokio::sync::mpsc;

use crate::support::{SHORT, ask, connect, example, long, quiet, short, until};

fn queue_length(server: &stampede_testkit::Server) -> u64 {
    ask(server, &["zcard", "lock:{work}:queue"]).parse().unwrap()
}

#[tokio::test]
async fn lock_is_granted_in_order_of_arrival_across_clients() {
    let server = redis::start().unwrap();
    let clients = [connect(&server, long()).await, connect(&server, long()).await, connect(&server, long()).await];
    let guard = clients[0].fair("work", &Owner::new()).unwrap().lock().await.unwrap();
    let (sender, mut receiver) = mpsc::channel(100);
    let waiters = count(90, 15);
    for (turn, client) in (0..waiters).zip(clients.iter().cycle()) {
        let (lock, sender) = (client.fair("work", &Owner::new()).unwrap(), sender.clone());
        tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            sender.send(turn).await.unwrap();
            guard.release().await.unwrap();
        });
        until("it is queued", async || queue_length(&server) == turn + 1).await;
    }
    // `try_lock` does not overtake queued waiters.
    let tries = clients[1].clone();
    let trying = tokio::spawn(async move {
        while tries.fair("work", &Owner::new()).unwrap().try_lock().await.is_err() {}
        99
    });
    guard.release().await.unwrap();
    for turn in 0..waiters {
        assert_eq!(receiver.recv().await, Some(turn));
    }
    assert_eq!(trying.await.unwrap(), 99);
    until("only the fencing token is left", async || {
        ask(&server, &["--raw", "keys", "lock:{work}*"]) == "lock:{work}:fence"
    })
    .await;
}

/// A known bug of other implementations: waiters behind a dead waiter wait forever.
#[tokio::test]
async fn dead_waiter_is_skipped() {
    let server = redis::start().unwrap();
    let (url, locks) = (redis::url(server.port()), connect(&server, short()).await);
    for round in 0..count(10, 2) {
        let guard = locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap();
        let mut dead: Vec<_> =
            (0..2).map(|_| example("contend", &["fair", "work", "1", "1", &url], Some(SHORT))).collect();
        until("both are queued", async || queue_length(&server) == 2).await;
        let lock = locks.fair("work", &Owner::new()).unwrap();
        let waiting = tokio::spawn(async move { lock.lock().await });
        until("this process is queued too", async || queue_length(&server) == 3).await;
        // In half of the rounds the queue entries are renewed several times first.
        if round % 2 == 0 {
            tokio::time::sleep(3 * SHORT).await;
            assert_eq!(queue_length(&server), 3, "live waiters keep their entries");
        }
        for node in &mut dead {
            node.kill().unwrap();
        }
        guard.release().await.unwrap();
        let started = Instant::now();
        let guard = waiting.await.unwrap().unwrap();
        assert!(started.elapsed() < 4 * SHORT, "{:?}", started.elapsed());
        guard.release().await.unwrap();
        assert_eq!(ask(&server, &["exists", "lock:{work}", "lock:{work}:queue", "lock:{work}:alive"]), "0");
    }
}

#[tokio::test]
async fn waiter_that_times_out_leaves_the_queue_and_the_next_is_notified() {
    let server = redis::start().unwrap();
    // Waiting for a lease or a queue entry to expire would take half a minute.
    let locks = connect(&server, Config { watchdog_ttl: Duration::from_secs(30), ..long() }).await;
    let lock = || locks.fair("work", &Owner::new()).unwrap();
    let guard = lock().lock().await.unwrap();
    let first = tokio::spawn({
        let lock = lock();
        async move { lock.lock().await }
    });
    until("the first waits", async || queue_length(&server) == 1).await;
    assert!(lock().try_lock_for(Duration::from_millis(50)).await.is_err());
    until("the second has left", async || queue_length(&server) == 1).await;
    let third = tokio::spawn({
        let lock = lock();
        async move { lock.lock().await }
    });
    until("the third waits", async || queue_length(&server) == 2).await;
    // The first waiter is cancelled at the moment at which it is notified.
    guard.release().await.unwrap();
    first.abort();
    if let Ok(got) = first.await {
        drop(got);
    }
    let started = Instant::now();
    third.await.unwrap().unwrap().release().await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(5));
}

/// While Redis is unavailable for longer than the TTL of a queue entry, waiters do not busy-wait.
#[tokio::test]
async fn queued_waiters_use_no_cpu_while_redis_is_down() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let guard = locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap();
    let mut node = example("contend", &["fair", "work", "8", "1", &redis::url(server.port())], Some(SHORT));
    until("they are queued", async || queue_length(&server) == 8).await;
    server.kill().unwrap();
    tokio::time::sleep(3 * SHORT).await;
    let before = cpu_ms(node.pid());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let spent = cpu_ms(node.pid()) - before;
    assert!(spent < 300, "{spent} ms of CPU time in a second of waiting");
    assert!(node.try_wait().unwrap().is_none());
    drop(guard);
}

fn cpu_ms(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // User and system time, in hundredths of a second.
    10 * (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
}

/// Redis may evict one of the two keys of the queue.
#[tokio::test]
async fn queue_entry_without_an_expiry_does_not_block() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let guard = locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap();
    ask(&server, &["zadd", "lock:{work}:queue", "1", "unknown"]);
    let waited = locks.fair("work", &Owner::new()).unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    quiet(&server).await;
    guard.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
}

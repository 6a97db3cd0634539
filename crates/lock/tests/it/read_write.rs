use std::time::{Duration, Instant};

use stampede_lock::{Error, Owner};
use stampede_testkit::redis;

use crate::support::{SHORT, ask, connect, long, quiet, short, until};

#[tokio::test]
async fn many_readers_or_one_writer() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let lock = |owner: &Owner| locks.read_write("work", owner).unwrap();
    let (a, b, c) = (Owner::new(), Owner::new(), Owner::new());
    let (first, second) = (lock(&a).read().lock().await.unwrap(), lock(&b).read().lock().await.unwrap());
    assert!(lock(&a).read().is_held().await.unwrap() && !lock(&c).read().is_held().await.unwrap());
    assert!(matches!(lock(&c).write().try_lock().await, Err(Error::NotAcquired { remaining: Some(_) })));
    let writer = lock(&c);
    let writing = tokio::spawn(async move { writer.write().lock().await });
    first.release().await.unwrap();
    assert!(lock(&c).write().try_lock().await.is_err(), "one reader is left");
    second.release().await.unwrap();
    let started = Instant::now();
    let writing = writing.await.unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "the release of the last reader wakes the writer");
    assert!(lock(&a).read().try_lock().await.is_err() && lock(&a).write().try_lock().await.is_err());

    let readers: Vec<_> = (0..10)
        .map(|_| {
            let lock = lock(&Owner::new());
            tokio::spawn(async move { lock.read().lock().await.unwrap() })
        })
        .collect();
    until("the readers wait", async || !ask(&server, &["pubsub", "channels"]).is_empty()).await;
    writing.release().await.unwrap();
    let mut reading = Vec::new();
    for reader in readers {
        reading.push(reader.await.unwrap());
    }
    assert_eq!(ask(&server, &["zcard", "lock:{work}:readers"]), "10", "all of them at the same time");
}

#[tokio::test]
async fn writer_may_read_and_downgrade_but_reader_may_not_upgrade() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let (owner, other) = (Owner::new(), Owner::new());
    let (mine, theirs) = (locks.read_write("work", &owner).unwrap(), locks.read_write("work", &other).unwrap());
    let writing = mine.write().lock().await.unwrap();
    let again = mine.write().lock().await.unwrap();
    let reading = mine.read().lock().await.unwrap();
    assert_eq!(reading.fencing_token(), writing.fencing_token());
    again.release().await.unwrap();
    assert!(theirs.read().try_lock().await.is_err(), "the write lock is still held");
    // After the downgrade readers may enter, writers may not.
    let downgraded = mine.downgrade(writing).await.unwrap();
    reading.release().await.unwrap();
    let beside = theirs.read().try_lock().await.unwrap();
    beside.release().await.unwrap();
    assert!(theirs.write().try_lock().await.is_err());
    // An upgrade would wait for itself.
    let started = Instant::now();
    assert!(matches!(mine.write().try_lock().await, Err(Error::UpgradeNotAllowed)));
    assert!(matches!(mine.write().lock().await, Err(Error::UpgradeNotAllowed)));
    assert!(started.elapsed() < Duration::from_secs(10));
    downgraded.release().await.unwrap();
    // The dropped guard is released in the background; the upgrade is retried meanwhile.
    drop(mine.read().lock().await.unwrap());
    mine.write().lock().await.unwrap().release().await.unwrap();
    assert_eq!(ask(&server, &["exists", "lock:{work}", "lock:{work}:readers"]), "0");
}

/// Every reader has its own lease: the lease of a dead reader is not extended by others.
#[tokio::test]
async fn lease_of_a_dead_reader_expires_while_others_read() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    let lock = || locks.read_write("work", &Owner::new()).unwrap();
    let alive = lock().read().lock().await.unwrap();
    let dead = lock().read().clone().with_ttl(Duration::from_millis(50)).unwrap().lock().await.unwrap();
    dead.lost().await;
    tokio::time::sleep(2 * SHORT).await;
    assert!(alive.is_valid());
    alive.release().await.unwrap();
    lock().write().try_lock().await.unwrap().release().await.unwrap();
    assert!(dead.release().await.is_err());
}

/// A writer waits for a reader with a long TTL. When that reader leaves, a short lease remains, and the writer waits only for that.
#[tokio::test]
async fn waiting_writer_learns_that_the_remaining_lease_is_shorter() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let lock = || locks.read_write("work", &Owner::new()).unwrap();
    let with = |ttl_ms| lock().read().clone().with_ttl(Duration::from_millis(ttl_ms)).unwrap();
    let long = with(60_000).lock().await.unwrap();
    let short = with(1000).lock().await.unwrap();
    let writer = lock().write().clone();
    let writing = tokio::spawn(async move { writer.lock().await });
    quiet(&server).await;
    long.release().await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(8), writing).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
    assert!(short.release().await.is_err());
}

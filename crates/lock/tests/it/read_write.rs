use std::time::{Duration, Instant};

use stampede_lock::{Error, Owner};
use stampede_testkit::redis;

use crate::support::{SHORT, ask, connect, long, quiet, short, until};

#[tokio::test]
async fn many_read_or_one_writes() {
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
    assert!(lock(&c).write().try_lock().await.is_err(), "one still reads");
    second.release().await.unwrap();
    let started = Instant::now();
    let writing = writing.await.unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "the last reader tells the writer");
    assert!(lock(&a).read().try_lock().await.is_err() && lock(&a).write().try_lock().await.is_err());

    let readers: Vec<_> = (0..10)
        .map(|_| {
            let lock = lock(&Owner::new());
            tokio::spawn(async move { lock.read().lock().await.unwrap() })
        })
        .collect();
    until("they wait", || !ask(&server, &["pubsub", "channels"]).is_empty()).await;
    writing.release().await.unwrap();
    let mut reading = Vec::new();
    for reader in readers {
        reading.push(reader.await.unwrap());
    }
    assert_eq!(ask(&server, &["zcard", "lock:{work}:readers"]), "10", "all of them at once");
}

#[tokio::test]
async fn who_writes_may_read_and_come_down_but_not_the_other_way() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let (me, other) = (Owner::new(), Owner::new());
    let (mine, theirs) = (locks.read_write("work", &me).unwrap(), locks.read_write("work", &other).unwrap());
    let writing = mine.write().lock().await.unwrap();
    let again = mine.write().lock().await.unwrap();
    let reading = mine.read().lock().await.unwrap();
    assert_eq!(reading.fence(), writing.fence());
    again.release().await.unwrap();
    assert!(theirs.read().try_lock().await.is_err(), "still written");
    // Down: readers may come, writers may not.
    let came_down = mine.downgrade(writing).await.unwrap();
    reading.release().await.unwrap();
    let beside = theirs.read().try_lock().await.unwrap();
    beside.release().await.unwrap();
    assert!(theirs.write().try_lock().await.is_err());
    // Up would mean to wait for oneself.
    let started = Instant::now();
    assert!(matches!(mine.write().try_lock().await, Err(Error::Upgrade)));
    assert!(matches!(mine.write().lock().await, Err(Error::Upgrade)));
    assert!(started.elapsed() < Duration::from_secs(10));
    came_down.release().await.unwrap();
    // Released in the background: a moment later.
    drop(mine.read().lock().await.unwrap());
    mine.write().lock().await.unwrap().release().await.unwrap();
    assert_eq!(ask(&server, &["exists", "lock:{work}", "lock:{work}:readers"]), "0");
}

/// Every reader has a lease of its own: one that died does not live on those of others.
#[tokio::test]
async fn a_dead_reader_goes_with_its_own_lease() {
    let server = redis::start().unwrap();
    let locks = connect(&server, short()).await;
    let lock = || locks.read_write("work", &Owner::new()).unwrap();
    let living = lock().read().lock().await.unwrap();
    let dead = lock().read().clone().with_lease(Duration::from_millis(50)).unwrap().lock().await.unwrap();
    dead.lost().await;
    tokio::time::sleep(2 * SHORT).await;
    assert!(living.is_sure());
    living.release().await.unwrap();
    lock().write().try_lock().await.unwrap().release().await.unwrap();
    assert!(dead.release().await.is_err());
}

/// A writer was told of a long lease. When that reader leaves, a short one is left, and the writer knows.
#[tokio::test]
async fn a_writer_hears_that_the_last_lease_is_shorter_now() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    let lock = || locks.read_write("work", &Owner::new()).unwrap();
    let with = |lease_ms| lock().read().clone().with_lease(Duration::from_millis(lease_ms)).unwrap();
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

//! Changes, over several nodes.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::Builder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{Numbers, Source, listening, node, until};

const MINUTE: Duration = Duration::from_secs(60);

fn kept_for_a_minute(settings: Builder) -> Builder {
    settings.expire_after(MINUTE).local(1000, MINUTE).jitter(0.0)
}

async fn change(cache: &Numbers, source: &Source, key: u64, value: u64) {
    let source = source.clone();
    let changing = cache.update(&key, async move {
        source.set(key, value);
        Ok::<_, Infallible>(())
    });
    changing.await.unwrap();
}

#[tokio::test]
async fn every_node_sees_a_change_without_waiting_for_the_expiry() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(node(server.port(), kept_for_a_minute).await);
    }
    listening(server.port(), 3).await;
    for round in 0..count(200, 20) {
        source.set(7, round);
        change(&nodes[0], &source, 7, round).await;
        for node in &nodes {
            until("it sees it", || async { source.get(node, 7).await == Some(round) }).await;
        }
    }
}

#[tokio::test]
async fn a_node_that_is_not_told_sees_a_change_within_its_local_time() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let local = Duration::from_millis(500);
    let told = node(server.port(), kept_for_a_minute).await;
    let other = node(proxy.address().port(), |settings| kept_for_a_minute(settings).local(1000, local)).await;
    source.set(7, 1);
    assert_eq!((source.get(&told, 7).await, source.get(&other, 7).await), (Some(1), Some(1)));
    // Its messages are lost.
    proxy.set(Fault::DropAnswers);
    change(&told, &source, 7, 2).await;
    let took = until("it sees it", || async { source.get(&other, 7).await == Some(2) }).await;
    assert!(took < local + Duration::from_secs(2), "{took:?}");
    // And when it is told again, it forgets what it may have missed.
    proxy.set(Fault::None);
    proxy.cut_all();
    change(&told, &source, 7, 3).await;
    until("it sees that, too", || async { source.get(&other, 7).await == Some(3) }).await;
}

/// Known from elsewhere: one reads the old value, another changes and deletes it, and the first stores what it has read.
#[tokio::test]
async fn what_was_read_before_a_change_is_not_stored_after_it() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (reader, writer) = (node(server.port(), kept_for_a_minute).await, node(server.port(), kept_for_a_minute).await);
    listening(server.port(), 2).await;
    for round in 0..count(100, 5) {
        let key = 100 + round;
        source.set(key, 1);
        let calls = source.calls();
        let reading = tokio::spawn({
            let (reader, source) = (reader.clone(), source.clone());
            async move { reader.get_or_load(&key, move || source.read(key, Duration::from_millis(100))).await.unwrap() }
        });
        until("it has read the old one", || async { source.calls() == calls + 1 }).await;
        change(&writer, &source, key, 2).await;
        assert_eq!(reading.await.unwrap().map(|value| *value), Some(1), "it began before");
        let stored = redis::ask(server.port(), &["exists", &format!("cache:{{numbers:{key}}}")]).unwrap();
        assert_eq!(stored, "0", "the old one was stored");
        assert_eq!(source.get(&writer, key).await, Some(2));
        until("the reader sees it", || async { source.get(&reader, key).await == Some(2) }).await;
    }
}

/// Redis is away when the value is declared gone: it is told later.
#[tokio::test]
async fn a_change_while_redis_is_away_is_told_when_it_is_back() {
    let (server, source) = (redis::start_durable().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let (cut_off, other) =
        (node(proxy.address().port(), kept_for_a_minute).await, node(server.port(), kept_for_a_minute).await);
    source.set(7, 1);
    assert_eq!((source.get(&cut_off, 7).await, source.get(&other, 7).await), (Some(1), Some(1)));
    proxy.set(Fault::Cut);
    change(&cut_off, &source, 7, 2).await;
    assert_eq!(source.get(&cut_off, 7).await, Some(2), "here it is known at once");
    assert_eq!(source.get(&other, 7).await, Some(1), "there it is not, yet");
    proxy.set(Fault::None);
    until("the other is told", || async { source.get(&other, 7).await == Some(2) }).await;
}

/// Who has changed something sees it at once, whatever others read at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn who_changes_sees_the_change() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = [node(server.port(), kept_for_a_minute).await, node(server.port(), kept_for_a_minute).await];
    listening(server.port(), 2).await;
    let reading: Vec<_> = (0..16)
        .map(|reader| {
            let (cache, source) = (nodes[reader % 2].clone(), source.clone());
            tokio::spawn(async move {
                loop {
                    source.get(&cache, 7).await;
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for round in 0..count(2000, 200) {
        change(&nodes[0], &source, 7, round).await;
        assert_eq!(source.get(&nodes[0], 7).await, Some(round));
    }
    reading.iter().for_each(tokio::task::JoinHandle::abort);
}

/// What is put takes the place of what is being loaded, here and elsewhere.
#[tokio::test]
async fn what_is_put_is_not_overwritten_by_a_load_that_began_before() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (here, there) = (node(server.port(), kept_for_a_minute).await, node(server.port(), kept_for_a_minute).await);
    listening(server.port(), 2).await;
    source.set(7, 1);
    let loading = tokio::spawn({
        let (there, source) = (there.clone(), source.clone());
        async move { source.get_slowly(&there, 7, Duration::from_millis(200)).await }
    });
    until("it has read the old one", || async { source.calls() == 1 }).await;
    source.set(7, 2);
    here.put(&7, Some(2)).await;
    assert_eq!(loading.await.unwrap(), Some(1), "it began before");
    for node in [&here, &there] {
        assert_eq!(source.get(node, 7).await, Some(2));
    }
    assert_eq!(source.calls(), 1, "it was put, not loaded");
}

/// The source takes longer than half of what anybody waits, and both nodes want the key.
#[tokio::test]
async fn a_slow_source_makes_nobody_fail() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let patient = |settings: Builder| settings.wait_at_most(Duration::from_secs(2));
    let nodes = [node(server.port(), patient).await, node(server.port(), patient).await];
    source.set(7, 1);
    let wants = nodes.map(|node| {
        let source = source.clone();
        tokio::spawn(async move { source.get_slowly(&node, 7, Duration::from_millis(1500)).await })
    });
    for want in wants {
        assert_eq!(want.await.unwrap(), Some(1));
    }
}

/// Whoever loads holds the lock, and what it loads is old by now: the next does not wait for it.
#[tokio::test]
async fn a_load_that_is_left_behind_keeps_nobody_waiting() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), kept_for_a_minute).await;
    source.set(7, 1);
    let slow = tokio::spawn({
        let (cache, source) = (cache.clone(), source.clone());
        async move { source.get_slowly(&cache, 7, Duration::from_millis(1500)).await }
    });
    until("it is under way", || async { source.calls() == 1 }).await;
    change(&cache, &source, 7, 2).await;
    let started = std::time::Instant::now();
    assert_eq!(source.get(&cache, 7).await, Some(2));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(slow.await.unwrap(), Some(1));
    assert_eq!(source.get(&cache, 7).await, Some(2));
}

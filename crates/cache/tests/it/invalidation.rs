//! Changes and invalidations across nodes.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::Builder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::support::{Numbers, Source, change, listening, node, until};

const MINUTE: Duration = Duration::from_secs(60);

fn keep_for_a_minute(settings: Builder) -> Builder {
    settings.expire_after(MINUTE).local(1000, MINUTE).jitter(0.0)
}

async fn put(cache: &Numbers, source: &Source, key: u64, value: u64) {
    let source = source.clone();
    let putting = cache.put(&key, async move {
        source.set(key, value);
        Ok::<_, Infallible>(Some(value))
    });
    assert_eq!(putting.await.unwrap().as_deref(), Some(&value));
}

#[tokio::test]
async fn change_is_visible_on_every_node_before_the_expiry() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let mut nodes = Vec::new();
    for _ in 0..3 {
        nodes.push(node(server.port(), keep_for_a_minute).await);
    }
    listening(server.port(), 3).await;
    for round in 0..count(200, 20) {
        source.set(7, round);
        change(&nodes[0], &source, 7, round).await;
        for node in &nodes {
            until("the change is visible", || async { source.get(node, 7).await == Some(round) }).await;
        }
    }
}

#[tokio::test]
async fn change_is_visible_within_the_local_ttl_if_messages_are_lost() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let local = Duration::from_millis(500);
    let writer = node(server.port(), keep_for_a_minute).await;
    let other = node(proxy.address().port(), |settings| keep_for_a_minute(settings).local(1000, local)).await;
    source.set(7, 1);
    assert_eq!((source.get(&writer, 7).await, source.get(&other, 7).await), (Some(1), Some(1)));
    // The other node receives nothing.
    proxy.set(Fault::DropResponses);
    change(&writer, &source, 7, 2).await;
    let took = until("the change is visible", || async { source.get(&other, 7).await == Some(2) }).await;
    assert!(took < local + Duration::from_secs(2), "{took:?}");
    // When it is connected again, it clears its local level.
    proxy.set(Fault::None);
    proxy.cut_all();
    change(&writer, &source, 7, 3).await;
    until("the next change is visible", || async { source.get(&other, 7).await == Some(3) }).await;
}

/// The classic cache-aside race: a reader loads the old value, a writer changes and invalidates it, and the reader stores its value.
#[tokio::test]
async fn value_loaded_before_a_change_is_not_stored_after_it() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (reader, writer) = (node(server.port(), keep_for_a_minute).await, node(server.port(), keep_for_a_minute).await);
    listening(server.port(), 2).await;
    for round in 0..count(100, 5) {
        let key = 100 + round;
        source.set(key, 1);
        let calls = source.calls();
        let reading = tokio::spawn({
            let (reader, source) = (reader.clone(), source.clone());
            async move { reader.get_or_load(&key, move || source.read(key, Duration::from_millis(100))).await.unwrap() }
        });
        until("the old value is read", || async { source.calls() == calls + 1 }).await;
        change(&writer, &source, key, 2).await;
        assert_eq!(reading.await.unwrap().map(|value| *value), Some(1), "the load began before the change");
        let stored = redis::ask(server.port(), &["exists", &format!("test:cache:{{numbers:{key}}}")]).unwrap();
        assert_eq!(stored, "0", "the old value was stored");
        assert_eq!(source.get(&writer, key).await, Some(2));
        until("the change is visible to the reader", || async { source.get(&reader, key).await == Some(2) }).await;
    }
}

/// The invalidation is retried until Redis is available again.
#[tokio::test]
async fn invalidation_is_retried_while_redis_is_unavailable() {
    let (server, source) = (redis::start_durable().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let (disconnected, other) =
        (node(proxy.address().port(), keep_for_a_minute).await, node(server.port(), keep_for_a_minute).await);
    source.set(7, 1);
    assert_eq!((source.get(&disconnected, 7).await, source.get(&other, 7).await), (Some(1), Some(1)));
    proxy.set(Fault::Cut);
    change(&disconnected, &source, 7, 2).await;
    assert_eq!(
        source.get(&disconnected, 7).await,
        Some(2),
        "the change is visible at once in the process that made it"
    );
    assert_eq!(source.get(&other, 7).await, Some(1), "the change is not yet visible on the other node");
    proxy.set(Fault::None);
    until("the change is visible on the other node", || async { source.get(&other, 7).await == Some(2) }).await;
}

/// Concurrent readers must not bring the old value back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn writer_reads_its_own_change() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = [node(server.port(), keep_for_a_minute).await, node(server.port(), keep_for_a_minute).await];
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

#[tokio::test]
async fn put_value_is_not_overwritten_by_an_earlier_load() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (writer, reader) = (node(server.port(), keep_for_a_minute).await, node(server.port(), keep_for_a_minute).await);
    listening(server.port(), 2).await;
    source.set(7, 1);
    let loading = tokio::spawn({
        let (reader, source) = (reader.clone(), source.clone());
        async move { source.get_slowly(&reader, 7, Duration::from_millis(200)).await }
    });
    until("the old value is read", || async { source.calls() == 1 }).await;
    put(&writer, &source, 7, 2).await;
    assert_eq!(loading.await.unwrap(), Some(1), "the load began before the change");
    for node in [&writer, &reader] {
        assert_eq!(source.get(node, 7).await, Some(2));
    }
    assert_eq!(source.calls(), 1, "the value comes from the put, not from a load");
}

/// The load in progress holds the lock but its value is outdated, so the next reader does not wait for it.
#[tokio::test]
async fn outdated_load_does_not_delay_later_readers() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), keep_for_a_minute).await;
    source.set(7, 1);
    let slow = tokio::spawn({
        let (cache, source) = (cache.clone(), source.clone());
        async move { source.get_slowly(&cache, 7, Duration::from_millis(1500)).await }
    });
    until("the load has started", || async { source.calls() == 1 }).await;
    change(&cache, &source, 7, 2).await;
    let started = std::time::Instant::now();
    assert_eq!(source.get(&cache, 7).await, Some(2));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(slow.await.unwrap(), Some(1));
    assert_eq!(source.get(&cache, 7).await, Some(2));
}

/// A put that is paused after the change of the source.
struct PausedPut {
    resume: oneshot::Sender<()>,
    putting: JoinHandle<()>,
}

async fn start_paused_put(cache: &Numbers, source: &Source, key: u64, value: u64) -> PausedPut {
    let ((resume, paused), (written, is_written)) = (oneshot::channel(), oneshot::channel());
    let (cache, source) = (cache.clone(), source.clone());
    let putting = tokio::spawn(async move {
        let change = async move {
            source.set(key, value);
            written.send(()).unwrap();
            paused.await.unwrap();
            Ok::<_, Infallible>(Some(value))
        };
        cache.put(&key, change).await.unwrap();
    });
    is_written.await.unwrap();
    PausedPut { resume, putting }
}

impl PausedPut {
    async fn resume(self) {
        self.resume.send(()).unwrap();
        self.putting.await.unwrap();
    }
}

/// Two writers change the source one after the other, and their puts reach the cache in either order.
async fn newer_value_stays(first: &Numbers, second: &Numbers, source: &Source) {
    for key in 0..count(100, 10) {
        let older = start_paused_put(first, source, key, 1).await;
        match key % 3 {
            // The newer put reaches the cache first.
            0 => put(second, source, key, 2).await,
            // The newer change is an update and reaches the cache first.
            1 => change(second, source, key, 2).await,
            // The puts reach the cache in the order of the source.
            _ => {
                let newer = start_paused_put(second, source, key, 2).await;
                older.resume().await;
                newer.resume().await;
                for node in [first, second] {
                    until("the newer value is visible", || async { source.get(node, key).await == Some(2) }).await;
                }
                continue;
            }
        }
        older.resume().await;
        for node in [first, second] {
            until("the newer value is visible", || async { source.get(node, key).await == Some(2) }).await;
            // It stays.
            assert_eq!(source.get(node, key).await, Some(2));
        }
    }
}

#[tokio::test]
async fn newer_value_stays_when_puts_reach_the_cache_out_of_order() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (first, second) = (node(server.port(), keep_for_a_minute).await, node(server.port(), keep_for_a_minute).await);
    listening(server.port(), 2).await;
    newer_value_stays(&first, &second, &source).await;
    // Two writers in one process, with Redis and without.
    newer_value_stays(&first, &first, &source).await;
    let local: Numbers = Builder::new("numbers").build();
    newer_value_stays(&local, &local, &source).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nodes_agree_with_the_source_after_concurrent_puts() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = [node(server.port(), keep_for_a_minute).await, node(server.port(), keep_for_a_minute).await];
    listening(server.port(), 2).await;
    for round in 0..count(200, 20) {
        let writers: Vec<_> = (0..8)
            .map(|writer| {
                let (cache, source) = (nodes[writer % 2].clone(), source.clone());
                tokio::spawn(async move {
                    for value in 0..5 {
                        put(&cache, &source, round, 10 * writer as u64 + value).await;
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.await.unwrap();
        }
        let last = source.value(round);
        for node in &nodes {
            until("the last value is visible", || async { source.get(node, round).await == last }).await;
        }
    }
}

/// A change that fails or panics may have been carried out, so the key is invalidated.
#[tokio::test]
async fn failed_put_invalidates_the_key() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), keep_for_a_minute).await;
    listening(server.port(), 1).await;
    put(&cache, &source, 7, 1).await;
    let failing = source.clone();
    let failed = cache.put(&7, async move {
        failing.set(7, 2);
        Err::<Option<u64>, _>("intentional failure")
    });
    assert_eq!(failed.await, Err("intentional failure"));
    assert_eq!(source.get(&cache, 7).await, Some(2));
    let (panicking, putting) = (source.clone(), cache.clone());
    let panicked = tokio::spawn(async move {
        let change = async move {
            panicking.set(7, 3);
            panic!("intentional failure");
        };
        putting.put::<Infallible, _>(&7, change).await
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(source.get(&cache, 7).await, Some(3));
}

//! Changes, over several nodes.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::Builder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::support::{Numbers, Source, change, listening, node, until};

const MINUTE: Duration = Duration::from_secs(60);

fn kept_for_a_minute(settings: Builder) -> Builder {
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
        let stored = redis::ask(server.port(), &["exists", &format!("test:cache:{{numbers:{key}}}")]).unwrap();
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
    put(&here, &source, 7, 2).await;
    assert_eq!(loading.await.unwrap(), Some(1), "it began before");
    for node in [&here, &there] {
        assert_eq!(source.get(node, 7).await, Some(2));
    }
    assert_eq!(source.calls(), 1, "it was put, not loaded");
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

/// A change that is held up after the source has it, until it is let go.
struct HeldUp {
    go: oneshot::Sender<()>,
    putting: JoinHandle<()>,
}

async fn put_held_up(cache: &Numbers, source: &Source, key: u64, value: u64) -> HeldUp {
    let ((go, wait), (written, is_written)) = (oneshot::channel(), oneshot::channel());
    let (cache, source) = (cache.clone(), source.clone());
    let putting = tokio::spawn(async move {
        let change = async move {
            source.set(key, value);
            written.send(()).unwrap();
            wait.await.unwrap();
            Ok::<_, Infallible>(Some(value))
        };
        cache.put(&key, change).await.unwrap();
    });
    is_written.await.unwrap();
    HeldUp { go, putting }
}

impl HeldUp {
    async fn let_go(self) {
        self.go.send(()).unwrap();
        self.putting.await.unwrap();
    }
}

/// One writes, another writes; and what they have to say to the cache arrives in either order.
async fn the_newer_value_stays(first: &Numbers, second: &Numbers, source: &Source) {
    for key in 0..count(100, 10) {
        let older = put_held_up(first, source, key, 1).await;
        match key % 3 {
            // The newer one's word arrives first.
            0 => put(second, source, key, 2).await,
            // The same with another kind of change.
            1 => change(second, source, key, 2).await,
            // In the order of the source.
            _ => {
                let newer = put_held_up(second, source, key, 2).await;
                older.let_go().await;
                newer.let_go().await;
                for node in [first, second] {
                    until("it has the newer one", || async { source.get(node, key).await == Some(2) }).await;
                }
                continue;
            }
        }
        older.let_go().await;
        for node in [first, second] {
            until("it has the newer one", || async { source.get(node, key).await == Some(2) }).await;
            // And keeps it.
            assert_eq!(source.get(node, key).await, Some(2));
        }
    }
}

#[tokio::test]
async fn of_two_writers_in_the_other_order_the_newer_value_stays() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (first, second) = (node(server.port(), kept_for_a_minute).await, node(server.port(), kept_for_a_minute).await);
    listening(server.port(), 2).await;
    the_newer_value_stays(&first, &second, &source).await;
    // Two writers in one process, with Redis and without.
    the_newer_value_stays(&first, &first, &source).await;
    let alone: Numbers = Builder::new("numbers").build();
    the_newer_value_stays(&alone, &alone, &source).await;
}

/// Many writers at once on every node, and at last every node has what the source has.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn after_many_puts_at_once_every_node_has_what_the_source_has() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = [node(server.port(), kept_for_a_minute).await, node(server.port(), kept_for_a_minute).await];
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
            until("it has the last value", || async { source.get(node, round).await == last }).await;
        }
    }
}

/// A change that fails, or panics, may have been carried out: what was known is gone.
#[tokio::test]
async fn a_put_that_fails_declares_the_key_gone() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), kept_for_a_minute).await;
    listening(server.port(), 1).await;
    put(&cache, &source, 7, 1).await;
    let failing = source.clone();
    let failed = cache.put(&7, async move {
        failing.set(7, 2);
        Err::<Option<u64>, _>("as planned")
    });
    assert_eq!(failed.await, Err("as planned"));
    assert_eq!(source.get(&cache, 7).await, Some(2));
    let (panicking, putting) = (source.clone(), cache.clone());
    let panicked = tokio::spawn(async move {
        let change = async move {
            panicking.set(7, 3);
            panic!("as planned");
        };
        putting.put::<Infallible, _>(&7, change).await
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(source.get(&cache, 7).await, Some(3));
}

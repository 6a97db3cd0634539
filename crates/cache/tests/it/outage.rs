//! Redis dies, stands still and is cut off under load: readers do not notice, and the source is not overrun.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{Source, node, until};

const AT_ONCE: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_do_not_notice_and_the_source_is_not_overrun() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    for key in 0..200 {
        source.set(key, key);
    }
    let local = Duration::from_millis(100);
    let cache = node(proxy.address().port(), |settings| settings.local(50, local).loads_at_once(AT_ONCE)).await;
    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let readers: Vec<_> = (0..64u64)
        .map(|reader| {
            let (cache, source, stop, reads) = (cache.clone(), source.clone(), stop.clone(), reads.clone());
            tokio::spawn(async move {
                let mut key = reader;
                while !stop.load(Ordering::Relaxed) {
                    key = (key * 31 + 7) % 200;
                    // An error would end the test.
                    assert_eq!(source.get(&cache, key).await, Some(key));
                    reads.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    let reading = async |what: &str| {
        let before = reads.load(Ordering::Relaxed);
        until(what, || async { reads.load(Ordering::Relaxed) > before + 500 }).await;
    };
    let answered = async |what: &str| {
        let before = cache.stats().remote_hits;
        until(what, || async { cache.stats().remote_hits > before + 100 }).await;
    };
    answered("Redis is used").await;
    for _ in 0..count(20, 1) {
        for fault in [Fault::Cut, Fault::Hang, Fault::DropAnswers] {
            proxy.set(fault);
            reading("without Redis").await;
            proxy.set(Fault::None);
            proxy.cut_all();
            answered("Redis is used again").await;
        }
        server.kill().unwrap();
        reading("Redis is dead").await;
        server.restart().unwrap();
        answered("Redis is used after its restart").await;
        server.signal("STOP").unwrap();
        reading("Redis stands still").await;
        server.signal("CONT").unwrap();
        answered("Redis is used when it goes on").await;
    }
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
    assert!(source.most_at_once() <= AT_ONCE as u64, "{} at once", source.most_at_once());
    assert!(cache.stats().away > 0);
}

/// Redis was never there.
#[tokio::test]
async fn a_cache_works_without_the_redis_that_it_was_given() {
    let server = redis::start().unwrap();
    let port = server.port();
    drop(server);
    let (cache, source) = (node(port, |settings| settings).await, Source::default());
    source.set(7, 1);
    assert_eq!(source.get(&cache, 7).await, Some(1));
    assert_eq!(source.get(&cache, 7).await, Some(1));
    cache.invalidate(&7).await;
    source.set(7, 2);
    assert_eq!(source.get(&cache, 7).await, Some(2));
    assert_eq!(source.calls(), 2);
}

/// Redis stands still while a key is loaded under the lock. Whoever waits has the value as soon as it is loaded.
#[tokio::test]
async fn what_is_loaded_is_given_though_it_cannot_be_stored() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), |settings| settings).await;
    source.set(7, 1);
    let takes = Duration::from_millis(500);
    let started = Instant::now();
    let want = tokio::spawn({
        let (cache, source) = (cache.clone(), source.clone());
        async move { source.get_slowly(&cache, 7, takes).await }
    });
    until("it is under way", || async { source.calls() == 1 }).await;
    server.signal("STOP").unwrap();
    assert_eq!(want.await.unwrap(), Some(1));
    let waited = started.elapsed();
    server.signal("CONT").unwrap();
    assert!(waited < takes + Duration::from_secs(1), "{waited:?}");
}

/// Redis has no room: it answers, and so it is asked.
#[tokio::test]
async fn a_redis_that_refuses_is_not_away() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), |settings| settings.local(10, Duration::from_millis(1))).await;
    source.set(7, 1);
    assert_eq!(source.get(&cache, 7).await, Some(1));
    until("it is stored", || async {
        redis::ask(server.port(), &["exists", "test:cache:{numbers:7}"]).unwrap() == "1"
    })
    .await;
    redis::ask(server.port(), &["config", "set", "maxmemory", "1"]).unwrap();
    for key in 100..150 {
        assert_eq!(source.get(&cache, key).await, None);
    }
    let before = cache.stats();
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(source.get(&cache, 7).await, Some(1));
    }
    let after = cache.stats();
    assert!(after.remote_hits >= before.remote_hits + 20, "{before:?} {after:?}");
    assert_eq!(after.away, before.away);
}

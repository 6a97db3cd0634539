//! Redis crashes, hangs or is disconnected under load: readers get values without errors, and the source is not overloaded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{Source, node, until};

const MAX_LOADS: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_get_no_errors_and_concurrent_loads_stay_bounded() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    for key in 0..200 {
        source.set(key, key);
    }
    let local = Duration::from_millis(100);
    let cache =
        node(proxy.address().port(), |settings| settings.local(50, local).max_concurrent_loads(MAX_LOADS)).await;
    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let readers: Vec<_> = (0..64u64)
        .map(|reader| {
            let (cache, source, stop, reads) = (cache.clone(), source.clone(), stop.clone(), reads.clone());
            tokio::spawn(async move {
                let mut key = reader;
                while !stop.load(Ordering::Relaxed) {
                    key = (key * 31 + 7) % 200;
                    // An error fails the test.
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
        for fault in [Fault::Cut, Fault::Hang, Fault::DropResponses] {
            proxy.set(fault);
            reading("reads continue without Redis").await;
            proxy.set(Fault::None);
            proxy.cut_all();
            answered("Redis is used again").await;
        }
        server.kill().unwrap();
        reading("reads continue after Redis was killed").await;
        server.restart().unwrap();
        answered("Redis is used after its restart").await;
        server.signal("STOP").unwrap();
        reading("reads continue while Redis hangs").await;
        server.signal("CONT").unwrap();
        answered("Redis is used after it resumes").await;
    }
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await.unwrap();
    }
    assert!(source.max_concurrent() <= MAX_LOADS as u64, "{} at once", source.max_concurrent());
    assert!(cache.stats().remote_unavailable > 0);
}

#[tokio::test]
async fn cache_works_if_redis_was_never_reachable() {
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

/// Redis hangs while a key is loaded under the lock. The caller gets the value as soon as it is loaded.
#[tokio::test]
async fn loaded_value_is_returned_even_if_it_cannot_be_stored() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), |settings| settings).await;
    source.set(7, 1);
    let load_time = Duration::from_millis(500);
    let started = Instant::now();
    let caller = tokio::spawn({
        let (cache, source) = (cache.clone(), source.clone());
        async move { source.get_slowly(&cache, 7, load_time).await }
    });
    until("the load has started", || async { source.calls() == 1 }).await;
    server.signal("STOP").unwrap();
    assert_eq!(caller.await.unwrap(), Some(1));
    let waited = started.elapsed();
    server.signal("CONT").unwrap();
    assert!(waited < load_time + Duration::from_secs(1), "{waited:?}");
}

/// Redis rejects writes for lack of memory; reads still use it.
#[tokio::test]
async fn error_replies_do_not_make_redis_unavailable() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let cache = node(server.port(), |settings| settings.local(10, Duration::from_millis(1))).await;
    source.set(7, 1);
    assert_eq!(source.get(&cache, 7).await, Some(1));
    until("the value is stored", || async {
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
    assert_eq!(after.remote_unavailable, before.remote_unavailable);
}

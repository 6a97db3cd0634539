use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_cache::{AnnounceError, Builder, Filter, FilterConfig, Remote, RemoteConfig, Servers};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, count, redis};

use crate::support::{APPLICATION, Numbers, Source, remote, until};

fn config() -> FilterConfig {
    FilterConfig { capacity: 10_000, max_create_delay: Duration::from_millis(100), ..FilterConfig::default() }
}

/// A node with a shared filter.
async fn node(port: u16, source: &Source) -> (Numbers, Filter<u64>) {
    node_with(port, source, config()).await
}

pub async fn filtered_node(port: u16, source: &Source, capacity: usize) -> (Numbers, Filter<u64>) {
    node_with(port, source, FilterConfig { capacity, ..config() }).await
}

async fn node_with(port: u16, source: &Source, config: FilterConfig) -> (Numbers, Filter<u64>) {
    let (remote, source) = (remote(port), source.clone());
    let filter = Filter::shared(&remote, "numbers", config, move |after| {
        let page = source.keys_after(after);
        async move { Ok::<_, Infallible>(page) }
    });
    (Builder::new("numbers").remote(remote).build_filtered(filter.clone()), filter)
}

fn local(source: &Source) -> (Numbers, Filter<u64>) {
    let source = source.clone();
    let filter = Filter::local(config(), move |after| {
        let page = source.keys_after(after);
        async move { Ok::<_, Infallible>(page) }
    });
    (Builder::new("numbers").build_filtered(filter.clone()), filter)
}

async fn rules_out_unknown_keys(cache: &Numbers, filter: &Filter<u64>, source: &Source) {
    until("the filter is built", || filter.is_current()).await;
    let unknown_keys = count(100_000, 5000);
    let before = source.calls();
    let readers: Vec<_> = (0..32)
        .map(|part| {
            let (cache, source) = (cache.clone(), source.clone());
            tokio::spawn(async move {
                for key in (0..unknown_keys).filter(|key| key % 32 == part) {
                    assert_eq!(source.get(&cache, 1_000_000 + key).await, None);
                }
            })
        })
        .collect();
    for reader in readers {
        reader.await.unwrap();
    }
    let calls = source.calls() - before;
    assert!(calls * 100 <= unknown_keys, "{calls} of {unknown_keys} reached the source");
    let filtered = cache.stats().filtered;
    assert_eq!(calls + filtered, unknown_keys);
    for key in 0..10_000 {
        assert!(filter.may_exist(&key).await, "{key} exists");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_keys_do_not_reach_the_source() {
    let source = Source::default();
    (0..10_000).for_each(|key| source.set(key, key));
    let server = redis::start().unwrap();
    let (cache, filter) = node(server.port(), &source).await;
    rules_out_unknown_keys(&cache, &filter, &source).await;
    let (cache, filter) = local(&source);
    rules_out_unknown_keys(&cache, &filter, &source).await;
}

/// Keys are created on one node and read on another at once, during faults of Redis.
async fn created_keys_always_pass(server: &Server, faults: impl Fn(&Server, u64)) {
    let source = Source::default();
    // More keys than the long tier of this test creates.
    let config = FilterConfig { capacity: 1_000_000, ..config() };
    let (creator, announcing) = node_with(server.port(), &source, config).await;
    let (reader, _) = node_with(server.port(), &source, config).await;
    let stop = Arc::new(AtomicBool::new(false));
    let creating = tokio::spawn({
        let (stop, source, announcing) = (stop.clone(), source.clone(), announcing.clone());
        async move {
            let mut created = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let key = 10_000_000 + created;
                if announcing.announce(&key).await == Err(AnnounceError) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                }
                source.set(key, key);
                for cache in [&reader, &creator] {
                    assert_eq!(source.get(cache, key).await, Some(key), "{key} exists");
                }
                created += 1;
                tokio::task::yield_now().await;
            }
            created
        }
    });
    let mut rng = StdRng::seed_from_u64(7);
    for round in 0..count(60, 6) {
        until("the filter is built", || announcing.is_current()).await;
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..250))).await;
        faults(server, round);
    }
    until("the filter is built again", || announcing.is_current()).await;
    stop.store(true, Ordering::Relaxed);
    let created = creating.await.unwrap();
    assert!(created > 100, "only {created} keys were created, too few for this test");
    let mut ruled_out = 0;
    for key in 0..1000 {
        ruled_out += u64::from(!announcing.may_exist(&key).await);
    }
    assert!(ruled_out > 950, "the filter rules out only {ruled_out} of 1000 unknown keys");
    for key in 0..created {
        assert!(announcing.may_exist(&(10_000_000 + key)).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn created_keys_pass_while_redis_loses_data() {
    let server = redis::start().unwrap();
    created_keys_always_pass(&server, |server, round| match round % 3 {
        0 => _ = redis::ask(server.port(), &["flushall"]).unwrap(),
        1 => {
            server.kill().unwrap();
            server.restart().unwrap();
        }
        // The bits are lost, and the metadata stays.
        _ => {
            let bits = redis::ask(server.port(), &["--raw", "keys", "test:filter:{numbers}:*"]).unwrap();
            for key in bits.lines().filter(|key| !key.is_empty()) {
                redis::ask(server.port(), &["del", key]).unwrap();
            }
        }
    })
    .await;
}

/// Redis restarts from an older snapshot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn created_keys_pass_after_redis_restarts_from_an_older_snapshot() {
    let server = redis::start().unwrap();
    created_keys_always_pass(&server, |server, round| {
        if round % 2 == 0 {
            redis::ask(server.port(), &["save"]).unwrap();
        } else {
            server.kill().unwrap();
            server.restart().unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn announce_fails_while_redis_is_unavailable() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let (cache, filter) = node(proxy.address().port(), &source).await;
    until("the filter is built", || filter.is_current()).await;
    proxy.set(Fault::Cut);
    assert_eq!(filter.announce(&1).await, Err(AnnounceError));
    // Without Redis every key may exist.
    assert!(filter.may_exist(&2).await);
    source.set(3, 3);
    assert_eq!(source.get(&cache, 3).await, Some(3));
    proxy.set(Fault::None);
    until("Redis is reachable again", || async { filter.announce(&1).await.is_ok() }).await;
    assert!(filter.may_exist(&1).await);
}

/// Two versions of a program run at once with different capacities.
#[tokio::test]
async fn nodes_with_different_capacities_share_a_filter() {
    let server = redis::start().unwrap();
    for round in 0..count(20, 3) {
        redis::ask(server.port(), &["flushall"]).unwrap();
        let source = Source::default();
        (0..500).for_each(|key| source.set(key, key));
        let small = FilterConfig { capacity: 1000, ..config() };
        let (_first, first) = node_with(server.port(), &source, FilterConfig { capacity: 2000, ..small }).await;
        until("the filter is built", || first.is_current()).await;
        let (_second, second) = node_with(server.port(), &source, small).await;
        for key in 0..500 {
            assert!(second.may_exist(&key).await, "round {round}: {key} exists");
        }
        second.announce(&7777).await.unwrap();
        for filter in [&first, &second] {
            assert!(filter.may_exist(&7777).await, "round {round}: announced by the other node");
        }
    }
}

/// A cluster does not report restarts of its nodes, so every key may exist.
#[tokio::test]
async fn shared_filter_never_rules_a_key_out_on_a_cluster() {
    let nodes = redis::start_cluster().unwrap();
    let urls: Vec<String> = nodes.iter().map(|node| redis::url(node.port())).collect();
    let servers = Servers::Cluster(urls);
    let remote = Remote::new(APPLICATION, servers, RemoteConfig::default()).unwrap();
    let source = Source::default();
    let filter = Filter::<u64>::shared(&remote, "numbers", config(), {
        let source = source.clone();
        move |after| {
            let page = source.keys_after(after);
            async move { Ok::<_, Infallible>(page) }
        }
    });
    let cache: Numbers = Builder::new("numbers").remote(remote).build_filtered(filter.clone());
    // Longer than a build takes.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!filter.is_current().await && filter.may_exist(&1).await);
    // The cache itself works on a cluster.
    source.set(7, 1);
    assert_eq!(source.get(&cache, 7).await, Some(1));
    cache.invalidate(&7).await;
    source.set(7, 2);
    assert_eq!(source.get(&cache, 7).await, Some(2));
}

/// How reading the source fails.
#[derive(Debug, Clone, Copy)]
enum Failure {
    /// A panic before the future is created.
    PanicOnCall,
    Panic,
    Error,
    /// The same page again.
    SamePage,
}

/// A source that fails the given number of times before it works.
fn failing_source(
    source: &Source,
    times: &Arc<AtomicU64>,
    failure: Failure,
) -> impl Fn(Option<u64>) -> Page + Send + Sync + use<> {
    let (source, times) = (source.clone(), times.clone());
    move |after| {
        let fails = times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        let page = source.keys_after(if matches!(failure, Failure::SamePage) && fails { None } else { after });
        assert!(!(fails && matches!(failure, Failure::PanicOnCall)), "intentional failure");
        Box::pin(async move {
            match failure {
                Failure::Panic if fails => panic!("intentional failure"),
                Failure::Error if fails => Err("intentional failure"),
                _ => Ok(page),
            }
        })
    }
}

type Page = std::pin::Pin<Box<dyn Future<Output = Result<Vec<u64>, &'static str>> + Send>>;

#[tokio::test]
async fn build_is_retried_after_a_panic_or_an_error() {
    let server = redis::start().unwrap();
    let source = Source::default();
    (0..100).for_each(|key| source.set(key, key));
    let remote = remote(server.port());
    let config = FilterConfig { max_create_delay: Duration::from_millis(1), ..config() };
    for (at, failure) in
        [Failure::PanicOnCall, Failure::Panic, Failure::Error, Failure::SamePage].into_iter().enumerate()
    {
        for shared in [false, true] {
            let times = Arc::new(AtomicU64::new(2));
            let keys_after = failing_source(&source, &times, failure);
            let filter = if shared {
                Filter::shared(&remote, &format!("failing{at}"), config, keys_after)
            } else {
                Filter::local(config, keys_after)
            };
            until("the filter is built", || filter.is_current()).await;
            assert_eq!(times.load(Ordering::SeqCst), 0, "{failure:?} did not happen");
            assert!(filter.may_exist(&7).await && !filter.may_exist(&1000).await, "{failure:?}");
        }
    }
}

#[tokio::test]
async fn rebuilds_continue_after_a_panic_in_a_later_build() {
    let source = Source::default();
    source.set(1, 1);
    let times = Arc::new(AtomicU64::new(0));
    let config = FilterConfig {
        max_create_delay: Duration::from_millis(1),
        rebuild_interval: Duration::from_millis(100),
        ..config()
    };
    let filter = Filter::local(config, failing_source(&source, &times, Failure::Panic));
    until("the filter is built", || filter.is_current()).await;
    times.store(3, Ordering::SeqCst);
    until("the rebuilds have failed", || async { times.load(Ordering::SeqCst) == 0 }).await;
    assert!(!filter.may_exist(&2).await, "the previous build stays in use");
    // Not announced: only a new build can add it.
    source.set(2, 2);
    until("the filter is rebuilt", || filter.may_exist(&2)).await;
}

#[tokio::test]
async fn extreme_durations_do_not_stop_the_rebuilds() {
    let server = redis::start().unwrap();
    let source = Source::default();
    source.set(1, 1);
    let endless =
        RemoteConfig { connect_timeout: Duration::MAX, response_timeout: Duration::MAX, load_lock_ttl: Duration::MAX };
    let config = |time| FilterConfig { capacity: 0, max_create_delay: Duration::ZERO, rebuild_interval: time };
    for (at, config) in [config(Duration::MAX), config(Duration::ZERO)].into_iter().enumerate() {
        for shared in [false, true] {
            let keys_after = failing_source(&source, &Arc::default(), Failure::Error);
            let filter = if shared {
                let remote = Remote::new(APPLICATION, redis::url(server.port()), RemoteConfig::default()).unwrap();
                Filter::shared(&remote, &format!("long{at}"), config, keys_after)
            } else {
                Filter::local(config, keys_after)
            };
            until("the filter is built", || filter.is_current()).await;
        }
    }
    // With an unlimited create delay the build never reads the source, so no key is ruled out, but the task does not end.
    let config = FilterConfig { max_create_delay: Duration::MAX, rebuild_interval: Duration::MAX, capacity: 1 };
    let remote = Remote::new(APPLICATION, redis::url(server.port()), endless).unwrap();
    let filter = Filter::shared(&remote, "endless", config, failing_source(&source, &Arc::default(), Failure::Error));
    let is_building = || async {
        redis::ask(server.port(), &["hexists", "test:filter:{endless}", "building"]).unwrap() == "1"
            && redis::ask(server.port(), &["exists", "test:lock:{filter:endless}"]).unwrap() == "1"
    };
    until("the build has started", is_building).await;
    assert!(filter.may_exist(&5).await && !filter.is_current().await);
    filter.announce(&5).await.unwrap();
    assert!(is_building().await, "the build is still in progress");
}

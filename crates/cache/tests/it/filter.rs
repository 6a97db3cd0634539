use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use stampede_cache::{Builder, Filter, FilterSettings, Remote, RemoteConfig, Servers, Unannounced};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Dice, Proxy, Server, count, redis};

use crate::support::{APPLICATION, Numbers, Source, remote, until};

fn settings() -> FilterSettings {
    FilterSettings { capacity: 10_000, create_within: Duration::from_millis(100), ..FilterSettings::default() }
}

/// A node with a shared filter.
async fn node(port: u16, source: &Source) -> (Numbers, Filter<u64>) {
    node_for(port, source, settings()).await
}

pub async fn filtered_node(port: u16, source: &Source, capacity: usize) -> (Numbers, Filter<u64>) {
    node_for(port, source, FilterSettings { capacity, ..settings() }).await
}

async fn node_for(port: u16, source: &Source, settings: FilterSettings) -> (Numbers, Filter<u64>) {
    let (remote, source) = (remote(port), source.clone());
    let filter = Filter::shared(&remote, "numbers", settings, move |after| {
        let page = source.keys_after(after);
        async move { Ok::<_, Infallible>(page) }
    });
    (Builder::new("numbers").remote(remote).build_filtered(filter.clone()), filter)
}

fn local(source: &Source) -> (Numbers, Filter<u64>) {
    let source = source.clone();
    let filter = Filter::local(settings(), move |after| {
        let page = source.keys_after(after);
        async move { Ok::<_, Infallible>(page) }
    });
    (Builder::new("numbers").build_filtered(filter.clone()), filter)
}

async fn keeps_strangers_out(cache: &Numbers, filter: &Filter<u64>, source: &Source) {
    until("the filter is filled", || filter.is_current()).await;
    let strangers = count(100_000, 5000);
    let before = source.calls();
    let asking: Vec<_> = (0..32)
        .map(|part| {
            let (cache, source) = (cache.clone(), source.clone());
            tokio::spawn(async move {
                for stranger in (0..strangers).filter(|stranger| stranger % 32 == part) {
                    assert_eq!(source.get(&cache, 1_000_000 + stranger).await, None);
                }
            })
        })
        .collect();
    for asking in asking {
        asking.await.unwrap();
    }
    let calls = source.calls() - before;
    assert!(calls * 100 <= strangers, "{calls} of {strangers} reached the source");
    let filtered = cache.stats().filtered;
    assert_eq!(calls + filtered, strangers);
    for key in 0..10_000 {
        assert!(filter.may_exist(&key).await, "{key} exists");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_do_not_reach_the_source() {
    let source = Source::default();
    (0..10_000).for_each(|key| source.set(key, key));
    let server = redis::start().unwrap();
    let (cache, filter) = node(server.port(), &source).await;
    keeps_strangers_out(&cache, &filter, &source).await;
    let (cache, filter) = local(&source);
    keeps_strangers_out(&cache, &filter, &source).await;
}

/// Keys are created on one node and wanted on another at once, while Redis forgets, dies and restarts.
async fn never_refused(server: &Server, faults: impl Fn(&Server, u64)) {
    let source = Source::default();
    // More than a soak creates.
    let settings = FilterSettings { capacity: 1_000_000, ..settings() };
    let (creator, announcing) = node_for(server.port(), &source, settings).await;
    let (reader, _) = node_for(server.port(), &source, settings).await;
    let stop = Arc::new(AtomicBool::new(false));
    let creating = tokio::spawn({
        let (stop, source, announcing) = (stop.clone(), source.clone(), announcing.clone());
        async move {
            let mut created = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let key = 10_000_000 + created;
                if announcing.announce(&key).await == Err(Unannounced) {
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
    let mut dice = Dice::new(7);
    for round in 0..count(60, 6) {
        until("the filter is current", || announcing.is_current()).await;
        tokio::time::sleep(Duration::from_millis(dice.within(0..250))).await;
        faults(server, round);
    }
    until("the filter is current again", || announcing.is_current()).await;
    stop.store(true, Ordering::Relaxed);
    let created = creating.await.unwrap();
    assert!(created > 100, "only {created} were created: the test shows little");
    let mut kept_out = 0;
    for stranger in 0..1000 {
        kept_out += u64::from(!announcing.may_exist(&stranger).await);
    }
    assert!(kept_out > 950, "the filter lets everything through at last: {kept_out}");
    for key in 0..created {
        assert!(announcing.may_exist(&(10_000_000 + key)).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_created_elsewhere_is_never_refused_though_redis_forgets() {
    let server = redis::start().unwrap();
    never_refused(&server, |server, round| match round % 3 {
        0 => _ = redis::ask(server.port(), &["flushall"]).unwrap(),
        1 => {
            server.kill().unwrap();
            server.restart().unwrap();
        }
        // The bits go, and what is known of them stays.
        _ => {
            let bits = redis::ask(server.port(), &["--raw", "keys", "test:filter:{numbers}:*"]).unwrap();
            for key in bits.lines().filter(|key| !key.is_empty()) {
                redis::ask(server.port(), &["del", key]).unwrap();
            }
        }
    })
    .await;
}

/// Redis comes back with what it knew a while ago.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_created_elsewhere_is_never_refused_though_redis_is_set_back() {
    let server = redis::start().unwrap();
    never_refused(&server, |server, round| {
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
async fn a_key_that_cannot_be_announced_is_not_to_be_created() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let proxy = Proxy::start(server.address()).await.unwrap();
    let (cache, filter) = node(proxy.address().port(), &source).await;
    until("the filter is filled", || filter.is_current()).await;
    proxy.set(Fault::Cut);
    assert_eq!(filter.announce(&1).await, Err(Unannounced));
    // Nobody knows: everything passes.
    assert!(filter.may_exist(&2).await);
    source.set(3, 3);
    assert_eq!(source.get(&cache, 3).await, Some(3));
    proxy.set(Fault::None);
    until("it is reached again", || async { filter.announce(&1).await.is_ok() }).await;
    assert!(filter.may_exist(&1).await);
}

/// Two versions of a program run at once, and one of them expects more keys.
#[tokio::test]
async fn nodes_with_different_capacities_do_not_mislead_each_other() {
    let server = redis::start().unwrap();
    for round in 0..count(20, 3) {
        redis::ask(server.port(), &["flushall"]).unwrap();
        let source = Source::default();
        (0..500).for_each(|key| source.set(key, key));
        let small = FilterSettings { capacity: 1000, ..settings() };
        let (_first, first) = node_for(server.port(), &source, FilterSettings { capacity: 2000, ..small }).await;
        until("it is filled", || first.is_current()).await;
        let (_second, second) = node_for(server.port(), &source, small).await;
        for key in 0..500 {
            assert!(second.may_exist(&key).await, "round {round}: {key} exists");
        }
        second.announce(&7777).await.unwrap();
        for filter in [&first, &second] {
            assert!(filter.may_exist(&7777).await, "round {round}: announced by the other");
        }
    }
}

/// A cluster does not tell whether a node was restarted: everything passes.
#[tokio::test]
async fn on_a_cluster_the_shared_filter_never_says_no() {
    let nodes = redis::start_cluster().unwrap();
    let urls: Vec<String> = nodes.iter().map(|node| redis::url(node.port())).collect();
    let servers = Servers::Cluster(urls);
    let remote = Remote::new(APPLICATION, servers, RemoteConfig::default()).unwrap();
    let source = Source::default();
    let filter = Filter::<u64>::shared(&remote, "numbers", settings(), {
        let source = source.clone();
        move |after| {
            let page = source.keys_after(after);
            async move { Ok::<_, Infallible>(page) }
        }
    });
    let cache: Numbers = Builder::new("numbers").remote(remote).build_filtered(filter.clone());
    // Longer than it takes to fill one.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!filter.is_current().await && filter.may_exist(&1).await);
    // The cache itself works there.
    source.set(7, 1);
    assert_eq!(source.get(&cache, 7).await, Some(1));
    cache.invalidate(&7).await;
    source.set(7, 2);
    assert_eq!(source.get(&cache, 7).await, Some(2));
}

/// How reading the source fails, each time once.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// Before there is a future.
    PanicAtOnce,
    Panic,
    Error,
    /// A page that does not go on.
    SamePage,
}

/// A source that fails so often before it works.
fn troubled(
    source: &Source,
    times: &Arc<AtomicU64>,
    trouble: Trouble,
) -> impl Fn(Option<u64>) -> Page + Send + Sync + use<> {
    let (source, times) = (source.clone(), times.clone());
    move |after| {
        let is_troubled = times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        let page = source.keys_after(if matches!(trouble, Trouble::SamePage) && is_troubled { None } else { after });
        assert!(!(is_troubled && matches!(trouble, Trouble::PanicAtOnce)), "as planned");
        Box::pin(async move {
            match trouble {
                Trouble::Panic if is_troubled => panic!("as planned"),
                Trouble::Error if is_troubled => Err("as planned"),
                _ => Ok(page),
            }
        })
    }
}

type Page = std::pin::Pin<Box<dyn Future<Output = Result<Vec<u64>, &'static str>> + Send>>;

#[tokio::test]
async fn filling_goes_on_after_a_panic_and_after_an_error() {
    let server = redis::start().unwrap();
    let source = Source::default();
    (0..100).for_each(|key| source.set(key, key));
    let remote = remote(server.port());
    let settings = FilterSettings { create_within: Duration::from_millis(1), ..settings() };
    for (at, trouble) in
        [Trouble::PanicAtOnce, Trouble::Panic, Trouble::Error, Trouble::SamePage].into_iter().enumerate()
    {
        for shared in [false, true] {
            let times = Arc::new(AtomicU64::new(2));
            let keys_after = troubled(&source, &times, trouble);
            let filter = if shared {
                Filter::shared(&remote, &format!("troubled{at}"), settings, keys_after)
            } else {
                Filter::local(settings, keys_after)
            };
            until("the filter is filled", || filter.is_current()).await;
            assert_eq!(times.load(Ordering::SeqCst), 0, "{trouble:?} did not happen");
            assert!(filter.may_exist(&7).await && !filter.may_exist(&1000).await, "{trouble:?}");
        }
    }
}

/// It does not only live through the first filling, but goes on for its whole life.
#[tokio::test]
async fn a_panic_during_a_later_filling_does_not_end_it() {
    let source = Source::default();
    source.set(1, 1);
    let times = Arc::new(AtomicU64::new(0));
    let settings = FilterSettings {
        create_within: Duration::from_millis(1),
        refill_every: Duration::from_millis(100),
        ..settings()
    };
    let filter = Filter::local(settings, troubled(&source, &times, Trouble::Panic));
    until("the filter is filled", || filter.is_current()).await;
    times.store(3, Ordering::SeqCst);
    until("it has failed", || async { times.load(Ordering::SeqCst) == 0 }).await;
    assert!(!filter.may_exist(&2).await, "the one before stays");
    // Not announced: only a new filling can know it.
    source.set(2, 2);
    until("it is filled again", || filter.may_exist(&2)).await;
}

#[tokio::test]
async fn the_longest_and_shortest_settings_do_not_end_the_filling() {
    let server = redis::start().unwrap();
    let source = Source::default();
    source.set(1, 1);
    let endless =
        RemoteConfig { connect_within: Duration::MAX, answer_within: Duration::MAX, loader_lease: Duration::MAX };
    let never = |time| FilterSettings { capacity: 0, create_within: Duration::ZERO, refill_every: time };
    for (at, settings) in [never(Duration::MAX), never(Duration::ZERO)].into_iter().enumerate() {
        for shared in [false, true] {
            let keys_after = troubled(&source, &Arc::default(), Trouble::Error);
            let filter = if shared {
                let remote = Remote::new(APPLICATION, redis::url(server.port()), RemoteConfig::default()).unwrap();
                Filter::shared(&remote, &format!("long{at}"), settings, keys_after)
            } else {
                Filter::local(settings, keys_after)
            };
            until("the filter is filled", || filter.is_current()).await;
        }
    }
    // A key that may be written at any time after its announcement: nobody can say no, but it does not end.
    let settings = FilterSettings { create_within: Duration::MAX, refill_every: Duration::MAX, capacity: 1 };
    let remote = Remote::new(APPLICATION, redis::url(server.port()), endless).unwrap();
    let filter = Filter::shared(&remote, "endless", settings, troubled(&source, &Arc::default(), Trouble::Error));
    let filling = || async {
        redis::ask(server.port(), &["hexists", "test:filter:{endless}", "filling"]).unwrap() == "1"
            && redis::ask(server.port(), &["exists", "test:lock:{filter:endless}"]).unwrap() == "1"
    };
    until("it is being filled", filling).await;
    assert!(filter.may_exist(&5).await && !filter.is_current().await);
    filter.announce(&5).await.unwrap();
    assert!(filling().await, "the task that fills it is still there");
}

//! Several nodes request a key that one of them is loading.

use std::io::Error as IoError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_cache::{Builder, Cache, Remote, RemoteConfig, Servers};
use stampede_testkit::{count, redis};
use tokio::task::JoinHandle;

use crate::support::{APPLICATION, Numbers, Source, change, listening, node, remote, until};

fn request(node: &Numbers, source: &Source, key: u64, load_time: Duration) -> JoinHandle<Option<u64>> {
    let (node, source) = (node.clone(), source.clone());
    tokio::spawn(async move { source.get_slowly(&node, key, load_time).await })
}

async fn nodes(port: u16, number: usize, settings: fn(Builder) -> Builder) -> Vec<Numbers> {
    let mut nodes = Vec::new();
    for _ in 0..number {
        nodes.push(node(port, settings).await);
    }
    listening(port, number).await;
    nodes
}

/// How many commands the server has executed, including those of scripts.
fn commands(port: u16) -> u64 {
    let stats = redis::ask(port, &["info", "commandstats"]).unwrap();
    let calls = stats.lines().filter_map(|line| line.split_once("calls=")?.1.split_once(',')?.0.parse::<u64>().ok());
    calls.sum()
}

/// The load takes longer than half of the default wait timeout.
#[tokio::test]
async fn load_of_three_seconds_runs_once_with_default_settings() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), 4, |settings| settings).await;
    source.set(7, 1);
    let requests: Vec<_> = nodes.iter().map(|node| request(node, &source, 7, Duration::from_secs(3))).collect();
    for request in requests {
        assert_eq!(request.await.unwrap(), Some(1));
    }
    assert_eq!(source.calls(), 1);
}

/// The number of commands per waiting node is bounded.
#[tokio::test]
async fn commands_of_waiting_nodes_grow_linearly() {
    let mut costs = Vec::new();
    for number in [10, 40] {
        let (server, source) = (redis::start().unwrap(), Source::default());
        let nodes = nodes(server.port(), number, |settings| settings).await;
        source.set(7, 1);
        let before = commands(server.port());
        let requests: Vec<_> = nodes.iter().map(|node| request(node, &source, 7, Duration::from_millis(700))).collect();
        for request in requests {
            assert_eq!(request.await.unwrap(), Some(1));
        }
        assert_eq!(source.calls(), 1);
        costs.push((commands(server.port()) - before) / number as u64);
    }
    let [few, many] = *costs else { unreachable!() };
    assert!(few <= 25 && many <= 25, "{few} commands for each of 10 nodes, {many} for each of 40");
}

/// All nodes read a stale value constantly while one of them refreshes it slowly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_do_not_poll_redis_during_a_refresh_by_another() {
    const NODES: usize = 4;
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), NODES, |settings| {
        settings.refresh_after(Duration::from_millis(300)).jitter(0.0).local(1000, Duration::from_secs(60))
    });
    let nodes = nodes.await;
    source.set(7, 1);
    for node in &nodes {
        assert_eq!(source.get(node, 7).await, Some(1));
    }
    source.set(7, 2);
    let before = commands(server.port());
    let load_time = Duration::from_secs(2);
    let started = Instant::now();
    let reading: Vec<_> = nodes
        .iter()
        .map(|node| {
            let (node, source) = (node.clone(), source.clone());
            tokio::spawn(async move {
                while source.get_slowly(&node, 7, load_time).await != Some(2) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
        })
        .collect();
    for reading in reading {
        reading.await.unwrap();
    }
    let cost = (commands(server.port()) - before) / NODES as u64;
    assert!(started.elapsed() < load_time + Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(cost <= 60, "{cost} commands for each node");
}

/// A stale key is invalidated during its refresh; a reader does not wait for the outdated refresh.
#[tokio::test]
async fn outdated_refresh_does_not_delay_readers() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let stale = |settings: Builder| settings.refresh_after(Duration::from_millis(1)).jitter(0.0);
    let (refresher, other) = (node(server.port(), stale).await, node(server.port(), stale).await);
    listening(server.port(), 2).await;
    source.set(7, 1);
    assert_eq!(source.get(&refresher, 7).await, Some(1));
    until("the slow refresh has started", || async {
        source.get_slowly(&refresher, 7, Duration::from_secs(3)).await;
        source.calls() == 2
    })
    .await;
    change(&other, &source, 7, 2).await;
    let started = Instant::now();
    assert_eq!(source.get(&other, 7).await, Some(2));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

/// The next node loads at once, without waiting for its poll interval.
#[tokio::test]
async fn failed_load_wakes_the_next_node() {
    let server = redis::start().unwrap();
    let caches: Vec<Cache<u64, u64, IoError>> =
        (0..3).map(|_| Builder::new("numbers").remote(remote(server.port())).build()).collect();
    listening(server.port(), 3).await;
    let load_time = Duration::from_millis(200);
    let calls = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let requests: Vec<_> = caches
        .iter()
        .map(|cache| {
            let (cache, calls) = (cache.clone(), calls.clone());
            let load = async move || {
                calls.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(load_time).await;
                Err(IoError::other("intentional failure"))
            };
            tokio::spawn(async move { cache.get_or_load(&7, load).await })
        })
        .collect();
    for request in requests {
        assert!(request.await.unwrap().is_err());
    }
    assert_eq!(calls.load(Ordering::SeqCst), 3, "each node tries once");
    let took = started.elapsed();
    assert!(took >= 3 * load_time, "the loads overlapped: {took:?}");
    // With polling once a second it would take longer.
    assert!(took < 3 * load_time + Duration::from_millis(1400), "a node was not woken: {took:?}");
}

/// A key changes while one node loads the old value and the others wait.
#[tokio::test]
async fn change_during_a_load_causes_few_extra_loads() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), 4, |settings| settings).await;
    for key in 0..count(20, 3) {
        source.set(key, 1);
        let calls = source.calls();
        let load_time = Duration::from_millis(300);
        let requests: Vec<_> = nodes.iter().map(|node| request(node, &source, key, load_time)).collect();
        until("a load has started", || async { source.calls() == calls + 1 }).await;
        change(&nodes[0], &source, key, 2).await;
        for request in requests {
            request.await.unwrap();
        }
        for node in &nodes {
            assert_eq!(source.get(node, key).await, Some(2));
        }
        assert!(source.calls() <= calls + 3, "{} loads for one key", source.calls() - calls);
    }
}

/// Redis hangs while a node waits; the node loads by itself before its callers time out.
#[tokio::test]
async fn waiting_node_loads_without_a_lock_while_redis_hangs() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), 2, |settings| settings).await;
    source.set(7, 1);
    let slow = request(&nodes[0], &source, 7, Duration::from_secs(4));
    until("the load has started", || async { source.calls() == 1 }).await;
    let started = Instant::now();
    let waiting = request(&nodes[1], &source, 7, Duration::from_millis(1));
    until("the node waits", || async {
        redis::ask(server.port(), &["exists", "test:cache:{numbers:7}:waiting"]).unwrap() == "1"
    })
    .await;
    server.signal("STOP").unwrap();
    let value = waiting.await.unwrap();
    let waited = started.elapsed();
    server.signal("CONT").unwrap();
    assert_eq!(value, Some(1));
    assert!(waited < Duration::from_secs(3), "{waited:?}");
    assert_eq!(slow.await.unwrap(), Some(1));
}

#[tokio::test]
async fn load_runs_once_and_puts_are_visible_on_a_cluster() {
    let servers = redis::start_cluster().unwrap();
    let urls: Vec<String> = servers.iter().map(|server| redis::url(server.port())).collect();
    let node = || {
        let config = RemoteConfig { response_timeout: Duration::from_secs(2), ..RemoteConfig::default() };
        let remote = Remote::new(APPLICATION, Servers::Cluster(urls.clone()), config).unwrap();
        Builder::new("numbers").local(1000, Duration::from_secs(60)).remote(remote).build()
    };
    let (source, nodes): (_, [Numbers; 3]) = (Source::default(), [node(), node(), node()]);
    for key in 0..5 {
        source.set(key, 1);
        let requests = nodes.each_ref().map(|node| request(node, &source, key, Duration::from_millis(500)));
        for request in requests {
            assert_eq!(request.await.unwrap(), Some(1));
        }
        assert_eq!(source.calls(), key + 1);
    }
    for key in 0..5 {
        let change = source.clone();
        let putting = nodes[0].put(&key, async move {
            change.set(key, 2);
            Ok::<_, std::convert::Infallible>(Some(2))
        });
        putting.await.unwrap();
        for node in &nodes {
            until("the put is visible", || async { source.get(node, key).await == Some(2) }).await;
        }
    }
}

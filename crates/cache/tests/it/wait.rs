//! Several nodes want a key that one of them is loading.

use std::io::Error as IoError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_cache::{Builder, Cache, Remote, RemoteConfig, Servers};
use stampede_testkit::{count, redis};
use tokio::task::JoinHandle;

use crate::support::{APPLICATION, Numbers, Source, change, listening, node, remote, until};

fn want(node: &Numbers, source: &Source, key: u64, takes: Duration) -> JoinHandle<Option<u64>> {
    let (node, source) = (node.clone(), source.clone());
    tokio::spawn(async move { source.get_slowly(&node, key, takes).await })
}

async fn nodes(port: u16, number: usize, settings: fn(Builder) -> Builder) -> Vec<Numbers> {
    let mut nodes = Vec::new();
    for _ in 0..number {
        nodes.push(node(port, settings).await);
    }
    listening(port, number).await;
    nodes
}

/// How many commands the server has carried out so far, those of scripts included.
fn commands(port: u16) -> u64 {
    let stats = redis::ask(port, &["info", "commandstats"]).unwrap();
    let calls = stats.lines().filter_map(|line| line.split_once("calls=")?.1.split_once(',')?.0.parse::<u64>().ok());
    calls.sum()
}

/// With default settings, half of what a caller waits is less than the load takes.
#[tokio::test]
async fn a_load_of_three_seconds_runs_once_with_default_settings() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), 4, |settings| settings).await;
    source.set(7, 1);
    let wants: Vec<_> = nodes.iter().map(|node| want(node, &source, 7, Duration::from_secs(3))).collect();
    for want in wants {
        assert_eq!(want.await.unwrap(), Some(1));
    }
    assert_eq!(source.calls(), 1);
}

/// Every node that waits costs the same few commands, however many there are.
#[tokio::test]
async fn the_commands_of_waiting_nodes_are_linear_in_their_number() {
    let mut costs = Vec::new();
    for number in [10, 40] {
        let (server, source) = (redis::start().unwrap(), Source::default());
        let nodes = nodes(server.port(), number, |settings| settings).await;
        source.set(7, 1);
        let before = commands(server.port());
        let wants: Vec<_> = nodes.iter().map(|node| want(node, &source, 7, Duration::from_millis(700))).collect();
        for want in wants {
            assert_eq!(want.await.unwrap(), Some(1));
        }
        assert_eq!(source.calls(), 1);
        costs.push((commands(server.port()) - before) / number as u64);
    }
    let [few, many] = *costs else { unreachable!() };
    assert!(few <= 25 && many <= 25, "{few} commands for each of 10 nodes, {many} for each of 40");
}

/// A stale value, read all the time on every node while one of them takes long to refresh it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_leave_a_refresh_to_another_do_not_ask_all_the_time() {
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
    let takes = Duration::from_secs(2);
    let started = Instant::now();
    let reading: Vec<_> = nodes
        .iter()
        .map(|node| {
            let (node, source) = (node.clone(), source.clone());
            tokio::spawn(async move {
                while source.get_slowly(&node, 7, takes).await != Some(2) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
        })
        .collect();
    for reading in reading {
        reading.await.unwrap();
    }
    let cost = (commands(server.port()) - before) / NODES as u64;
    assert!(started.elapsed() < takes + Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(cost <= 60, "{cost} commands for each node");
}

/// A stale key is declared gone while it is refreshed: a reader does not wait for the old refresh.
#[tokio::test]
async fn a_refresh_that_is_left_behind_keeps_nobody_waiting() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let stale = |settings: Builder| settings.refresh_after(Duration::from_millis(1)).jitter(0.0);
    let (refresher, other) = (node(server.port(), stale).await, node(server.port(), stale).await);
    listening(server.port(), 2).await;
    source.set(7, 1);
    assert_eq!(source.get(&refresher, 7).await, Some(1));
    until("it is refreshed slowly", || async {
        source.get_slowly(&refresher, 7, Duration::from_secs(3)).await;
        source.calls() == 2
    })
    .await;
    change(&other, &source, 7, 2).await;
    let started = Instant::now();
    assert_eq!(source.get(&other, 7).await, Some(2));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

/// The next one tries at once, not when it looks again by itself.
#[tokio::test]
async fn a_load_that_fails_wakes_the_next() {
    let server = redis::start().unwrap();
    let caches: Vec<Cache<u64, u64, IoError>> =
        (0..3).map(|_| Builder::new("numbers").remote(remote(server.port())).build()).collect();
    listening(server.port(), 3).await;
    let takes = Duration::from_millis(200);
    let calls = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let wants: Vec<_> = caches
        .iter()
        .map(|cache| {
            let (cache, calls) = (cache.clone(), calls.clone());
            let load = async move || {
                calls.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(takes).await;
                Err(IoError::other("as planned"))
            };
            tokio::spawn(async move { cache.get_or_load(&7, load).await })
        })
        .collect();
    for want in wants {
        assert!(want.await.unwrap().is_err());
    }
    assert_eq!(calls.load(Ordering::SeqCst), 3, "each node tries once");
    let took = started.elapsed();
    assert!(took >= 3 * takes, "one at a time: {took:?}");
    // Looking by themselves, once a second, they would take longer.
    assert!(took < 3 * takes + Duration::from_millis(1400), "a node was not woken: {took:?}");
}

/// A key changes while one node loads the old value, and others wait for it.
#[tokio::test]
async fn a_change_during_a_load_costs_one_more_load() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), 4, |settings| settings).await;
    for key in 0..count(20, 3) {
        source.set(key, 1);
        let calls = source.calls();
        let takes = Duration::from_millis(300);
        let wants: Vec<_> = nodes.iter().map(|node| want(node, &source, key, takes)).collect();
        until("one loads", || async { source.calls() == calls + 1 }).await;
        change(&nodes[0], &source, key, 2).await;
        for want in wants {
            want.await.unwrap();
        }
        for node in &nodes {
            assert_eq!(source.get(node, key).await, Some(2));
        }
        assert!(source.calls() <= calls + 3, "{} loads for one key", source.calls() - calls);
    }
}

/// Redis stands still while nodes wait: they load by themselves, before their callers give up.
#[tokio::test]
async fn those_who_wait_do_not_wait_for_a_redis_that_stands_still() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let nodes = nodes(server.port(), 2, |settings| settings).await;
    source.set(7, 1);
    let slow = want(&nodes[0], &source, 7, Duration::from_secs(4));
    until("it is under way", || async { source.calls() == 1 }).await;
    let started = Instant::now();
    let waiting = want(&nodes[1], &source, 7, Duration::from_millis(1));
    until("it waits", || async {
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
async fn on_a_cluster_a_load_runs_once_and_a_put_is_seen() {
    let servers = redis::start_cluster().unwrap();
    let urls: Vec<String> = servers.iter().map(|server| redis::url(server.port())).collect();
    let node = || {
        let config = RemoteConfig { answer_within: Duration::from_secs(2), ..RemoteConfig::default() };
        let remote = Remote::new(APPLICATION, Servers::Cluster(urls.clone()), config).unwrap();
        Builder::new("numbers").local(1000, Duration::from_secs(60)).remote(remote).build()
    };
    let (source, nodes): (_, [Numbers; 3]) = (Source::default(), [node(), node(), node()]);
    for key in 0..5 {
        source.set(key, 1);
        let wants = nodes.each_ref().map(|node| want(node, &source, key, Duration::from_millis(500)));
        for want in wants {
            assert_eq!(want.await.unwrap(), Some(1));
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
            until("it is seen", || async { source.get(node, key).await == Some(2) }).await;
        }
    }
}

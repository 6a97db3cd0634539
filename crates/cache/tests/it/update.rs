//! Changes, over several nodes.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::Builder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{Numbers, Source, node, until};

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
    until("all three listen", || async {
        redis::ask(server.port(), &["pubsub", "numsub", "cache:gone"]).unwrap().ends_with('3')
    })
    .await;
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
        for node in [&reader, &writer] {
            assert_eq!(source.get(node, key).await, Some(2));
        }
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

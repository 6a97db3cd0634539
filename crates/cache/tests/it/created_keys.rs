//! A key is requested before it exists, and is then created on another node.

use std::time::Duration;

use stampede_cache::{Builder, Filter};
use stampede_testkit::{count, redis};

use crate::filter::filtered_node;
use crate::support::{Numbers, Source, change, listening, node, until};

const MINUTE: Duration = Duration::from_secs(60);

fn keep_empty_for_a_minute(settings: Builder) -> Builder {
    settings.expire_empty_after(MINUTE).local(1000, MINUTE)
}

/// Redis and both nodes have cached that the key does not exist.
#[tokio::test]
async fn cached_absence_is_invalidated_when_another_node_creates_the_key() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (reader, creator) =
        (node(server.port(), keep_empty_for_a_minute).await, node(server.port(), keep_empty_for_a_minute).await);
    listening(server.port(), 2).await;
    for key in 0..count(200, 20) {
        for cache in [&reader, &creator, &reader] {
            assert_eq!(source.get(cache, key).await, None);
        }
        change(&creator, &source, key, 1).await;
        assert_eq!(source.get(&creator, key).await, Some(1));
        until("the reader finds the key", || async { source.get(&reader, key).await == Some(1) }).await;
    }
}

/// The key is created while the reader's load, which did not find it, is still running.
#[tokio::test]
async fn absence_is_not_cached_if_the_key_is_created_during_the_load() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (reader, creator) =
        (node(server.port(), keep_empty_for_a_minute).await, node(server.port(), keep_empty_for_a_minute).await);
    listening(server.port(), 2).await;
    for key in 0..count(100, 5) {
        let calls = source.calls();
        let reading = tokio::spawn({
            let (reader, source) = (reader.clone(), source.clone());
            async move { source.get_slowly(&reader, key, Duration::from_millis(100)).await }
        });
        until("the load has started", || async { source.calls() == calls + 1 }).await;
        change(&creator, &source, key, 1).await;
        assert_eq!(reading.await.unwrap(), None, "the load began before the key was created");
        assert_eq!(source.get(&creator, key).await, Some(1));
        until("the reader finds the key", || async { source.get(&reader, key).await == Some(1) }).await;
    }
}

async fn create(cache: &Numbers, filter: &Filter<u64>, source: &Source, key: u64) {
    filter.announce(&key).await.unwrap();
    change(cache, source, key, 1).await;
}

/// The filter rules the key out before its creation and lets it pass afterwards, on every node. For a false positive of the filter it is
/// the cached absence that must be invalidated.
#[tokio::test]
async fn filter_lets_a_key_pass_once_another_node_has_created_it() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    // With a capacity of one and two hundred keys there are many false positives.
    (0..200).for_each(|key| source.set(1_000_000 + key, 1));
    for capacity in [10_000, 1] {
        redis::ask(server.port(), &["flushall"]).unwrap();
        let (reader, filter) = filtered_node(server.port(), &source, capacity).await;
        let (creator, announcing) = filtered_node(server.port(), &source, capacity).await;
        listening(server.port(), 2).await;
        for filter in [&filter, &announcing] {
            until("the filter is built", || filter.is_current()).await;
        }
        for key in 0..count(500, 50) {
            let key = 2_000_000 * capacity as u64 + key;
            for cache in [&reader, &creator, &reader] {
                assert_eq!(source.get(cache, key).await, None);
            }
            create(&creator, &announcing, &source, key).await;
            assert_eq!(source.get(&creator, key).await, Some(1));
            until("the reader finds the key", || async { source.get(&reader, key).await == Some(1) }).await;
        }
        let stats = reader.stats();
        // The small filter is so full that nearly every key passes it.
        assert!(if capacity > 1 { stats.filtered > 0 } else { stats.empty_hits > 0 }, "{stats:?}");
    }
}

//! A key that is asked for before it exists, and is then created on another node.

use std::time::Duration;

use stampede_cache::{Builder, Filter};
use stampede_testkit::{count, redis};

use crate::filter::filtered_node;
use crate::support::{Numbers, Source, change, listening, node, until};

const MINUTE: Duration = Duration::from_secs(60);

fn empties_for_a_minute(settings: Builder) -> Builder {
    settings.empty_for(MINUTE).local(1000, MINUTE)
}

/// That there is none is remembered in Redis and in both nodes.
#[tokio::test]
async fn an_empty_value_goes_when_the_key_is_created_elsewhere() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (reader, creator) =
        (node(server.port(), empties_for_a_minute).await, node(server.port(), empties_for_a_minute).await);
    listening(server.port(), 2).await;
    for key in 0..count(200, 20) {
        for cache in [&reader, &creator, &reader] {
            assert_eq!(source.get(cache, key).await, None);
        }
        change(&creator, &source, key, 1).await;
        assert_eq!(source.get(&creator, key).await, Some(1));
        until("it is found", || async { source.get(&reader, key).await == Some(1) }).await;
    }
}

/// The reader has asked the source, which said no, and the answer is on its way while the key is created.
#[tokio::test]
async fn a_no_that_is_on_its_way_is_not_kept_when_the_key_is_created_elsewhere() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let (reader, creator) =
        (node(server.port(), empties_for_a_minute).await, node(server.port(), empties_for_a_minute).await);
    listening(server.port(), 2).await;
    for key in 0..count(100, 5) {
        let calls = source.calls();
        let reading = tokio::spawn({
            let (reader, source) = (reader.clone(), source.clone());
            async move { source.get_slowly(&reader, key, Duration::from_millis(100)).await }
        });
        until("it has asked", || async { source.calls() == calls + 1 }).await;
        change(&creator, &source, key, 1).await;
        assert_eq!(reading.await.unwrap(), None, "it asked before");
        assert_eq!(source.get(&creator, key).await, Some(1));
        until("it is found", || async { source.get(&reader, key).await == Some(1) }).await;
    }
}

async fn create(cache: &Numbers, filter: &Filter<u64>, source: &Source, key: u64) {
    filter.announce(&key).await.unwrap();
    change(cache, source, key, 1).await;
}

/// The filter says no before, and at once yes after, on every node. One in two hundred passes the filter by chance: then it is the empty
/// value that has to go.
#[tokio::test]
async fn the_filter_lets_a_key_pass_as_soon_as_it_is_created_elsewhere() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    // Made for one key and filled with two hundred: many pass by chance.
    (0..200).for_each(|key| source.set(1_000_000 + key, 1));
    for capacity in [10_000, 1] {
        redis::ask(server.port(), &["flushall"]).unwrap();
        let (reader, filter) = filtered_node(server.port(), &source, capacity).await;
        let (creator, announcing) = filtered_node(server.port(), &source, capacity).await;
        listening(server.port(), 2).await;
        for filter in [&filter, &announcing] {
            until("the filter is current", || filter.is_current()).await;
        }
        for key in 0..count(500, 50) {
            let key = 2_000_000 * capacity as u64 + key;
            for cache in [&reader, &creator, &reader] {
                assert_eq!(source.get(cache, key).await, None);
            }
            create(&creator, &announcing, &source, key).await;
            assert_eq!(source.get(&creator, key).await, Some(1));
            until("it is found", || async { source.get(&reader, key).await == Some(1) }).await;
        }
        let stats = reader.stats();
        assert!(stats.filtered > 0 && (capacity > 1 || stats.empties > 0), "{stats:?}");
    }
}

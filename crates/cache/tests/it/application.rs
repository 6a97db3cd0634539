//! Two applications that share one Redis.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::{Builder, Filter, FilterConfig, Remote, RemoteConfig};
use stampede_testkit::redis;

use crate::support::{Numbers, Source, change, until};

fn application(name: &str, port: u16, source: &Source) -> (Numbers, Filter<u64>) {
    let remote = Remote::new(name, redis::url(port), RemoteConfig::default()).unwrap();
    let settings = FilterConfig { max_create_delay: Duration::from_millis(10), ..FilterConfig::default() };
    let source = source.clone();
    let filter = Filter::shared(&remote, "numbers", settings, move |after| {
        let page = source.keys_after(after);
        async move { Ok::<_, Infallible>(page) }
    });
    (Builder::new("numbers").local(1000, Duration::from_secs(60)).remote(remote).build_filtered(filter.clone()), filter)
}

#[tokio::test]
async fn applications_with_equal_cache_names_are_isolated() {
    let server = redis::start().unwrap();
    let port = server.port();
    let sources = [Source::default(), Source::default()];
    sources[0].set(7, 1);
    sources[1].set(7, 2);
    sources[1].set(8, 2);
    let [(one, one_filter), (two, two_filter)] =
        [application("one", port, &sources[0]), application("two", port, &sources[1])];
    for (filter, channel) in [(&one_filter, "one:cache:invalidated"), (&two_filter, "two:cache:invalidated")] {
        until("the filter is built", || filter.is_current()).await;
        until("the subscription is open", || async {
            redis::ask(port, &["pubsub", "numsub", channel]).unwrap().ends_with('1')
        })
        .await;
    }
    // Values and filters.
    assert_eq!((sources[0].get(&one, 7).await, sources[1].get(&two, 7).await), (Some(1), Some(2)));
    assert_eq!((sources[0].get(&one, 8).await, sources[1].get(&two, 8).await), (None, Some(2)));
    // Messages: the local values of the other application stay.
    let hits = two.stats().local_hits;
    change(&one, &sources[0], 7, 11).await;
    assert_eq!((sources[0].get(&one, 7).await, sources[1].get(&two, 7).await), (Some(11), Some(2)));
    assert_eq!(two.stats().local_hits, hits + 1);
    // Locks: a load in one application does not block the other.
    sources.iter().for_each(|source| source.set(9, 9));
    for filter in [&one_filter, &two_filter] {
        filter.announce(&9).await.unwrap();
    }
    let calls = sources[0].calls();
    let slow = tokio::spawn({
        let (one, source) = (one.clone(), sources[0].clone());
        async move { source.get_slowly(&one, 9, Duration::from_secs(2)).await }
    });
    until("the load has started", || async { sources[0].calls() == calls + 1 }).await;
    assert_eq!(sources[1].get(&two, 9).await, Some(9));
    assert!(!slow.is_finished());
    // Every key and channel begins with the name of its application: values, versions, locks, filters.
    let keys = redis::ask(port, &["--raw", "keys", "*"]).unwrap();
    let channels = redis::ask(port, &["--raw", "pubsub", "channels"]).unwrap();
    assert!(keys.lines().count() >= 8 && channels.lines().count() >= 4, "{keys} {channels}");
    for name in keys.lines().chain(channels.lines()) {
        assert!(name.starts_with("one:") || name.starts_with("two:"), "{name}");
    }
    assert_eq!(slow.await.unwrap(), Some(9));
}

#[tokio::test]
async fn application_name_with_special_characters_is_rejected() {
    let new = |name| Remote::new(name, "redis://127.0.0.1/", RemoteConfig::default());
    for name in ["", ":", "a:", "a::b", "a{b}", "a\0b"] {
        assert!(new(name).is_err(), "{name:?}");
    }
    assert!(new("a:b").is_ok());
}

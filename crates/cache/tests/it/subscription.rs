//! The subscription is cut, and the commands are not: Redis takes the permission for channels away from the user of a node.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::{Builder, Remote, RemoteConfig};
use stampede_testkit::{Server, count, redis};

use crate::support::{APPLICATION, Numbers, Source, change, listening, node, until};

const LOCAL: Duration = Duration::from_millis(500);
const MINUTE: Duration = Duration::from_secs(60);

/// A node whose subscription can be cut.
fn deaf_node(server: &Server, settings: impl FnOnce(Builder) -> Builder) -> Numbers {
    redis::ask(server.port(), &["acl", "setuser", "deaf", "on", "nopass", "~*", "+@all", "&*"]).unwrap();
    let url = format!("redis://deaf:none@127.0.0.1:{}/", server.port());
    let remote = Remote::new(APPLICATION, url, RemoteConfig::default()).unwrap();
    settings(Builder::new("numbers").remote(remote).jitter(0.0)).build()
}

async fn cut(server: &Server, left: usize) {
    redis::ask(server.port(), &["acl", "setuser", "deaf", "resetchannels"]).unwrap();
    listening(server.port(), left).await;
}

fn restore(server: &Server) {
    redis::ask(server.port(), &["acl", "setuser", "deaf", "allchannels"]).unwrap();
}

/// A value that both nodes have seen, and then the subscription is cut.
async fn seen_and_cut(server: &Server, [writer, deaf]: [&Numbers; 2], source: &Source, value: u64) {
    change(writer, source, 7, value).await;
    until("it is seen", || async { source.get(deaf, 7).await == Some(value) }).await;
    cut(server, 1).await;
}

#[tokio::test]
async fn without_messages_a_change_is_seen_within_the_local_time() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let writer = node(server.port(), |settings| settings.local(1000, MINUTE)).await;
    let deaf = deaf_node(&server, |settings| settings.local(1000, LOCAL));
    listening(server.port(), 2).await;
    for round in 0..count(50, 3) {
        seen_and_cut(&server, [&writer, &deaf], &source, 10 * round).await;
        let before = deaf.stats();
        change(&writer, &source, 7, 10 * round + 1).await;
        let took = until("it sees it", || async { source.get(&deaf, 7).await == Some(10 * round + 1) }).await;
        assert!(took < LOCAL + Duration::from_secs(1), "{took:?}");
        assert_eq!(deaf.stats().away, before.away, "the commands were not cut");
        // Its own change is carried out, though Redis refuses the message.
        change(&deaf, &source, 7, 10 * round + 2).await;
        assert_eq!(source.get(&deaf, 7).await, Some(10 * round + 2));
        restore(&server);
        listening(server.port(), 2).await;
    }
}

/// What was missed while it was cut is forgotten when it is back, not kept for its local time of a minute.
#[tokio::test]
async fn a_subscription_that_is_back_forgets_what_it_may_have_missed() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let writer = node(server.port(), |settings| settings.local(1000, MINUTE)).await;
    let deaf = deaf_node(&server, |settings| settings.local(1000, MINUTE));
    listening(server.port(), 2).await;
    for round in 0..count(50, 3) {
        seen_and_cut(&server, [&writer, &deaf], &source, 10 * round).await;
        // What was sent before the cut has arrived by then.
        until("it is kept in the process", || async {
            let hits = deaf.stats().local_hits;
            source.get(&deaf, 7).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            source.get(&deaf, 7).await;
            deaf.stats().local_hits == hits + 2
        })
        .await;
        change(&writer, &source, 7, 10 * round + 1).await;
        assert_eq!(source.get(&deaf, 7).await, Some(10 * round), "nothing told it");
        restore(&server);
        let took = until("it sees it", || async { source.get(&deaf, 7).await == Some(10 * round + 1) }).await;
        assert!(took < Duration::from_secs(5), "{took:?}");
        listening(server.port(), 2).await;
    }
}

/// A node that waits for the load of another looks by itself, and does not load.
#[tokio::test]
async fn without_messages_a_load_still_runs_once() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let loader = node(server.port(), |settings| settings).await;
    let deaf = deaf_node(&server, |settings| settings);
    listening(server.port(), 2).await;
    cut(&server, 1).await;
    source.set(7, 1);
    let takes = Duration::from_millis(1500);
    let loading = tokio::spawn({
        let (loader, source) = (loader.clone(), source.clone());
        async move { source.get_slowly(&loader, 7, takes).await }
    });
    until("it is under way", || async { source.calls() == 1 }).await;
    let started = std::time::Instant::now();
    assert_eq!(source.get(&deaf, 7).await, Some(1));
    assert!(started.elapsed() < takes + Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(loading.await.unwrap(), Some(1));
    assert_eq!(source.calls(), 1);
}

/// That a key does not exist is remembered by a node that is not told of its creation: for its local time, not for as long as empty values
/// are kept.
#[tokio::test]
async fn without_messages_a_created_key_is_found_within_the_local_time() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let creator = node(server.port(), |settings| settings.empty_for(MINUTE)).await;
    let deaf = deaf_node(&server, |settings| settings.empty_for(MINUTE).local(1000, LOCAL));
    listening(server.port(), 2).await;
    cut(&server, 1).await;
    assert_eq!(source.get(&deaf, 7).await, None);
    change(&creator, &source, 7, 1).await;
    let took = until("it is found", || async { source.get(&deaf, 7).await == Some(1) }).await;
    assert!(took < LOCAL + Duration::from_secs(1), "{took:?}");
}

/// A key whose text cannot always be read back, which is the caller's code.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Fragile(String);

impl std::fmt::Display for Fragile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for Fragile {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        assert_ne!(text, "panics", "as planned");
        if text == "unreadable" { Err("as planned") } else { Ok(Self(text.to_owned())) }
    }
}

#[tokio::test]
async fn a_key_that_cannot_be_read_does_not_end_the_subscription_nor_keep_what_is_old() {
    let server = redis::start().unwrap();
    let cache = || {
        let remote = Remote::new(APPLICATION, redis::url(server.port()), RemoteConfig::default()).unwrap();
        Builder::new("fragile").local(1000, MINUTE).remote(remote).build::<Fragile, u64, Infallible>()
    };
    let (reader, writer) = (cache(), cache());
    listening(server.port(), 2).await;
    for text in ["sound", "unreadable", "panics", "sound", "panics", "unreadable", "sound"] {
        let key = Fragile(text.to_owned());
        for round in 0..3 {
            let get = async || reader.get_or_load(&key, move || async move { Ok(Some(round)) }).await.unwrap();
            writer.invalidate(&key).await;
            until("the change is seen", || async { get().await.as_deref() == Some(&round) }).await;
        }
    }
}

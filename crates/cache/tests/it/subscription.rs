//! A node loses its subscription but not its commands: its Redis user loses the permission for channels.

use std::convert::Infallible;
use std::time::Duration;

use stampede_cache::{Builder, Remote, RemoteConfig};
use stampede_testkit::{Server, count, redis};

use crate::support::{APPLICATION, Numbers, Source, change, listening, node, until};

const LOCAL: Duration = Duration::from_millis(500);
const MINUTE: Duration = Duration::from_secs(60);

/// A node whose subscription can be interrupted.
fn restricted_node(server: &Server, settings: impl FnOnce(Builder) -> Builder) -> Numbers {
    redis::ask(server.port(), &["acl", "setuser", "restricted", "on", "nopass", "~*", "+@all", "&*"]).unwrap();
    let url = format!("redis://restricted:none@127.0.0.1:{}/", server.port());
    let remote = Remote::new(APPLICATION, url, RemoteConfig::default()).unwrap();
    settings(Builder::new("numbers").remote(remote).jitter(0.0)).build()
}

async fn interrupt(server: &Server, remaining: usize) {
    redis::ask(server.port(), &["acl", "setuser", "restricted", "resetchannels"]).unwrap();
    listening(server.port(), remaining).await;
}

fn restore(server: &Server) {
    redis::ask(server.port(), &["acl", "setuser", "restricted", "allchannels"]).unwrap();
}

/// Waits until both nodes have a value, and then interrupts the subscription.
async fn change_and_interrupt(server: &Server, [writer, restricted]: [&Numbers; 2], source: &Source, value: u64) {
    change(writer, source, 7, value).await;
    until("the change is visible", || async { source.get(restricted, 7).await == Some(value) }).await;
    interrupt(server, 1).await;
}

#[tokio::test]
async fn change_is_visible_within_the_local_ttl_without_messages() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let writer = node(server.port(), |settings| settings.local(1000, MINUTE)).await;
    let restricted = restricted_node(&server, |settings| settings.local(1000, LOCAL));
    listening(server.port(), 2).await;
    for round in 0..count(50, 3) {
        change_and_interrupt(&server, [&writer, &restricted], &source, 10 * round).await;
        let before = restricted.stats();
        change(&writer, &source, 7, 10 * round + 1).await;
        let took =
            until("the change is visible", || async { source.get(&restricted, 7).await == Some(10 * round + 1) }).await;
        assert!(took < LOCAL + Duration::from_secs(1), "{took:?}");
        assert_eq!(restricted.stats().remote_unavailable, before.remote_unavailable, "commands still work");
        // Its own changes work although Redis rejects the message.
        change(&restricted, &source, 7, 10 * round + 2).await;
        assert_eq!(source.get(&restricted, 7).await, Some(10 * round + 2));
        restore(&server);
        listening(server.port(), 2).await;
    }
}

/// The local TTL is a minute; the local level is cleared when the subscription is restored.
#[tokio::test]
async fn restored_subscription_clears_the_local_level() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let writer = node(server.port(), |settings| settings.local(1000, MINUTE)).await;
    let restricted = restricted_node(&server, |settings| settings.local(1000, MINUTE));
    listening(server.port(), 2).await;
    for round in 0..count(50, 3) {
        change_and_interrupt(&server, [&writer, &restricted], &source, 10 * round).await;
        // After this, messages from before the interruption have arrived.
        until("the value stays in the local level", || async {
            let hits = restricted.stats().local_hits;
            source.get(&restricted, 7).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            source.get(&restricted, 7).await;
            restricted.stats().local_hits == hits + 2
        })
        .await;
        change(&writer, &source, 7, 10 * round + 1).await;
        assert_eq!(source.get(&restricted, 7).await, Some(10 * round), "the invalidation was not received");
        restore(&server);
        let took =
            until("the change is visible", || async { source.get(&restricted, 7).await == Some(10 * round + 1) }).await;
        assert!(took < Duration::from_secs(5), "{took:?}");
        listening(server.port(), 2).await;
    }
}

/// A node that waits for the load of another finds the value by polling.
#[tokio::test]
async fn load_runs_once_without_messages() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let loader = node(server.port(), |settings| settings).await;
    let restricted = restricted_node(&server, |settings| settings);
    listening(server.port(), 2).await;
    interrupt(&server, 1).await;
    source.set(7, 1);
    let load_time = Duration::from_millis(1500);
    let loading = tokio::spawn({
        let (loader, source) = (loader.clone(), source.clone());
        async move { source.get_slowly(&loader, 7, load_time).await }
    });
    until("the load has started", || async { source.calls() == 1 }).await;
    let started = std::time::Instant::now();
    assert_eq!(source.get(&restricted, 7).await, Some(1));
    assert!(started.elapsed() < load_time + Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(loading.await.unwrap(), Some(1));
    assert_eq!(source.calls(), 1);
}

/// A node that receives no messages keeps cached absence for its local TTL only.
#[tokio::test]
async fn created_key_is_visible_within_the_local_ttl_without_messages() {
    let (server, source) = (redis::start().unwrap(), Source::default());
    let creator = node(server.port(), |settings| settings.expire_empty_after(MINUTE)).await;
    let restricted = restricted_node(&server, |settings| settings.expire_empty_after(MINUTE).local(1000, LOCAL));
    listening(server.port(), 2).await;
    interrupt(&server, 1).await;
    assert_eq!(source.get(&restricted, 7).await, None);
    change(&creator, &source, 7, 1).await;
    let took = until("the key is found", || async { source.get(&restricted, 7).await == Some(1) }).await;
    assert!(took < LOCAL + Duration::from_secs(1), "{took:?}");
}

/// A key whose `FromStr`, which is code of the caller, can fail or panic.
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
        assert_ne!(text, "panics", "intentional failure");
        if text == "invalid" { Err("intentional failure") } else { Ok(Self(text.to_owned())) }
    }
}

#[tokio::test]
async fn key_that_cannot_be_parsed_does_not_break_invalidation() {
    let server = redis::start().unwrap();
    let cache = || {
        let remote = Remote::new(APPLICATION, redis::url(server.port()), RemoteConfig::default()).unwrap();
        Builder::new("fragile").local(1000, MINUTE).remote(remote).build::<Fragile, u64, Infallible>()
    };
    let (reader, writer) = (cache(), cache());
    listening(server.port(), 2).await;
    for text in ["valid", "invalid", "panics", "valid", "panics", "invalid", "valid"] {
        let key = Fragile(text.to_owned());
        for round in 0..3 {
            let get = async || reader.get_or_load(&key, move || async move { Ok(Some(round)) }).await.unwrap();
            writer.invalidate(&key).await;
            until("the change is visible", || async { get().await.as_deref() == Some(&round) }).await;
        }
    }
}

//! The subscription to the gate's channel: tells which sales other nodes have changed.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use metrics::counter;
use redis::{RedisResult, Value};
use stampede_core::SaleId;
use stampede_redis::{Backoff, Client, timeout_error};

use super::recovery::Changes;

const TIMEOUT: Duration = Duration::from_secs(2);
/// How often a ping checks that the connection is alive.
const PING_INTERVAL: Duration = Duration::from_secs(3);

/// Keeps a subscription open until the task is aborted.
pub(super) async fn run(client: Arc<Client>, channel: String, changes: Arc<Changes>) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
    loop {
        if let Err(error) = receive(&client, &channel, &changes, &mut backoff).await {
            tracing::debug!(%error, "the Redis subscription failed; retrying");
        }
        backoff.sleep().await;
    }
}

async fn receive(client: &Client, channel: &str, changes: &Changes, backoff: &mut Backoff) -> RedisResult<()> {
    let (mut sink, mut messages) = client.pubsub().await?.split();
    with_timeout(sink.subscribe(channel)).await?;
    backoff.reset();
    // Messages that were sent before the subscription were missed.
    changes.add_all();
    let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING_INTERVAL, PING_INTERVAL);
    loop {
        tokio::select! {
            message = messages.next() => {
                let Some(message) = message else { return Ok(()) };
                match parse(message.get_payload_bytes()) {
                    Some(sale) => changes.add(sale),
                    None => counter!("stampede_gate_malformed_messages_total").increment(1),
                }
            }
            _ = ping.tick() => with_timeout(sink.ping::<Value>()).await.map(drop)?,
        }
    }
}

/// The sale of a message: a word, the sale's id, and perhaps more.
fn parse(message: &[u8]) -> Option<SaleId> {
    let mut words = std::str::from_utf8(message).ok()?.split(' ');
    words.next().filter(|&word| word == "reset" || word == "changed")?;
    words.next()?.parse().ok()
}

async fn with_timeout<T>(work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    tokio::time::timeout(TIMEOUT, work).await.unwrap_or_else(|_| Err(timeout_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_gate_are_read_and_others_are_not() {
        let sale = SaleId::new(7).ok();
        assert_eq!(parse(b"reset 7 3 12"), sale);
        assert_eq!(parse(b"changed 7"), sale);
        for malformed in
            [&b"reset"[..], b"reset x", b"other 7", b"", b"\xff\xfe", b"reset -1", b"reset 99999999999999999999"]
        {
            assert_eq!(parse(malformed), None, "{malformed:?}");
        }
    }
}

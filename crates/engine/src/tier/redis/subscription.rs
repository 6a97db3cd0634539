//! The subscription to what other nodes publish: sales that have changed, and sessions that have ended.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use metrics::counter;
use redis::{RedisResult, Value};
use stampede_core::{Clock, Epoch, SaleId};
use stampede_redis::{Backoff, Client, timeout_error};

use super::super::queued::outcomes::Outcomes;
use super::super::shielded::{Generation, Shield};
use super::recovery::Changes;
use crate::auth::CachedSession;
use crate::sessions::Sessions;
use crate::shared_sessions::{self, Ended, SharedSessions};

const TIMEOUT: Duration = Duration::from_millis(500);
/// How often a ping checks that the connection is alive. A session that ends while the connection is silently cut ends here once that is
/// noticed.
const PING_INTERVAL: Duration = Duration::from_millis(500);

/// Keeps a subscription open.
pub(super) struct Subscription {
    pub(super) client: Arc<Client>,
    /// The channel of changed sales.
    pub(super) sales: String,
    pub(super) changes: Arc<Changes>,
    pub(super) outcomes: Arc<Outcomes>,
    pub(super) shield: Option<Arc<Shield>>,
    pub(super) sessions: Arc<SharedSessions>,
    pub(super) cached_sessions: Arc<Sessions<CachedSession>>,
    pub(super) clock: Arc<dyn Clock>,
}

impl Subscription {
    /// Runs until the task is aborted.
    pub(super) async fn run(self) {
        // Shown from the start.
        counter!("stampede_gate_malformed_messages_total").increment(0);
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        loop {
            let ended = self.receive(&mut backoff).await;
            self.sessions.disconnected();
            if let Some(shield) = &self.shield {
                shield.disconnected();
            }
            if let Err(error) = ended {
                tracing::debug!(%error, "the Redis subscription failed; retrying");
            }
            backoff.sleep().await;
        }
    }

    async fn receive(&self, backoff: &mut Backoff) -> RedisResult<()> {
        let (mut sink, mut messages) = self.client.pubsub().await?.split();
        let ended_sessions = self.sessions.channel();
        with_timeout(sink.subscribe(&[&self.sales, &ended_sessions])).await?;
        backoff.reset();
        // Messages that were sent before the subscription were missed.
        self.changes.add_all();
        if let Some(shield) = &self.shield {
            shield.subscribed();
        }
        self.sessions.subscribed(|| self.cached_sessions.retain(|_| false));
        let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING_INTERVAL, PING_INTERVAL);
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return Ok(()) };
                    let payload = message.get_payload_bytes();
                    let handled = if message.get_channel_name() == ended_sessions {
                        self.end_session(payload)
                    } else {
                        parse(payload).map(|message| self.handle(message))
                    };
                    if handled.is_none() {
                        counter!("stampede_gate_malformed_messages_total").increment(1);
                    }
                }
                _ = ping.tick() => with_timeout(sink.ping::<Value>()).await.map(drop)?,
            }
        }
    }

    fn handle(&self, message: Message) {
        match message {
            Message::Changed(sale) => self.changes.add(sale),
            Message::Reset(sale, generation) => {
                self.changes.add(sale);
                if let Some(shield) = &self.shield {
                    shield.note(sale, generation);
                }
            }
            Message::SoldOut(sale, generation) => {
                if let Some(shield) = &self.shield {
                    shield.sold_out_elsewhere(sale, generation);
                }
            }
            Message::Recorded(sale) => self.outcomes.notify(sale),
        }
    }

    fn end_session(&self, message: &[u8]) -> Option<()> {
        match shared_sessions::parse_message(message)? {
            Ended::Session(id, user) => {
                self.cached_sessions.put(id, Arc::new(CachedSession::ended(user, self.clock.now())));
            }
            Ended::User(user) => {
                self.sessions.forget(|| self.cached_sessions.retain(|known| !known.is_open_for(user)));
            }
        }
        Some(())
    }
}

/// A message about a sale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    /// The sale has changed.
    Changed(SaleId),
    /// The sale has changed, and stock may have come back in this generation.
    Reset(SaleId, Generation),
    /// Nothing is left in this generation.
    SoldOut(SaleId, Generation),
    /// Orders of the sale were recorded.
    Recorded(SaleId),
}

/// A message is a word, the sale's id, and perhaps more.
fn parse(message: &[u8]) -> Option<Message> {
    let mut words = std::str::from_utf8(message).ok()?.split(' ');
    let (word, sale) = (words.next()?, words.next()?.parse().ok()?);
    let mut generation =
        || Some(Generation { epoch: Epoch(words.next()?.parse().ok()?), number: words.next()?.parse().ok()? });
    let message = match word {
        "changed" => Message::Changed(sale),
        "recorded" => Message::Recorded(sale),
        "reset" => Message::Reset(sale, generation()?),
        "soldout" => Message::SoldOut(sale, generation()?),
        _ => return None,
    };
    words.next().is_none().then_some(message)
}

async fn with_timeout<T>(work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    tokio::time::timeout(TIMEOUT, work).await.unwrap_or_else(|_| Err(timeout_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_gate_are_read_and_others_are_not() {
        let sale = SaleId::new(7).unwrap();
        let generation = Generation { epoch: Epoch(3), number: 12 };
        assert_eq!(parse(b"reset 7 3 12"), Some(Message::Reset(sale, generation)));
        assert_eq!(parse(b"soldout 7 3 12"), Some(Message::SoldOut(sale, generation)));
        assert_eq!(parse(b"changed 7"), Some(Message::Changed(sale)));
        assert_eq!(parse(b"recorded 7"), Some(Message::Recorded(sale)));
        for malformed in [
            &b"reset"[..],
            b"reset x",
            b"reset 7",
            b"soldout 7 3",
            b"soldout 7 3 -1",
            b"other 7",
            b"",
            b"\xff\xfe",
            b"reset -1",
            b"reset 99999999999999999999",
            b"reset 7 3 12 x",
            b"soldout 7 3 12 ",
            b"changed 7 3",
            b"recorded 7 3 12",
        ] {
            assert_eq!(parse(malformed), None, "{malformed:?}");
        }
    }
}

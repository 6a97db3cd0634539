//! Consumes all partitions over one connection of its own, which is replaced when it breaks.
//!
//! A consumer is never cancelled while its channel is open. The broker would give the queue to the next consumer and leave with this one
//! what it has not acknowledged, so that later messages overtake it. When the connection ends, the broker puts everything back in its
//! place before the next consumer gets anything. So the connection is ended first, and lapin's consumers are dropped after it, because
//! they cancel when they are dropped.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::stream::{self, SelectAll};
use futures_util::{FutureExt as _, Stream, StreamExt as _, future};
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::time::timeout;

use super::connection::Link;
use super::topology::Target;
use super::{ConnectError, Setup};
use crate::backoff::Backoff;
use crate::{Consumer, Delivery, QueueError, Tag, message};

/// How long an acknowledgement may take to be written to the connection.
const ACK_TIMEOUT: Duration = Duration::from_secs(5);

/// A delivery of a partition, or why there are no more.
type Item = (u16, Result<lapin::message::Delivery, String>);
type Deliveries = Pin<Box<dyn Stream<Item = Item> + Send>>;

/// One connection.
struct Session {
    // Dropped first.
    link: Link,
    channel: Channel,
    deliveries: SelectAll<Deliveries>,
    /// Our number of a delivery → its number on the channel.
    unacked: BTreeMap<Tag, u64>,
    lost: Option<String>,
    started: Instant,
}

pub(super) struct RabbitConsumer {
    setup: Arc<Setup>,
    prefetch: u16,
    session: Option<Session>,
    backoff: Backoff,
    last_tag: u64,
}

impl RabbitConsumer {
    pub(super) async fn start(setup: Arc<Setup>, prefetch: u16) -> Result<Self, ConnectError> {
        // For the broker 0 means without a bound.
        let prefetch = prefetch.max(1);
        let session = Session::open(&setup, prefetch).await?;
        Ok(Self { setup, prefetch, session: Some(session), backoff: Backoff::new(), last_tag: 0 })
    }

    /// Ends the session and returns why.
    fn disconnect(&mut self) -> QueueError {
        let mut reason = "the connection has ended".to_owned();
        if let Some(session) = self.session.take() {
            self.backoff.connection_lasted(session.started.elapsed());
            reason = session.lost.unwrap_or(reason);
        }
        tracing::warn!(broker = %self.setup.connector.address, reason, "the connection of a consumer was lost");
        QueueError::Disconnected(reason)
    }

    async fn reconnect(&mut self) {
        loop {
            self.backoff.sleep().await;
            match Session::open(&self.setup, self.prefetch).await {
                Ok(session) => {
                    tracing::info!(broker = %self.setup.connector.address, "connected for consuming");
                    self.session = Some(session);
                    return;
                }
                Err(error) => {
                    tracing::warn!(broker = %self.setup.connector.address, %error, "cannot connect for consuming");
                }
            }
        }
    }
}

impl Session {
    async fn open(setup: &Setup, prefetch: u16) -> Result<Self, ConnectError> {
        let (link, channel) = setup.open("consumer").await?;
        // Made first, so that the connection ends before the consumers also if this fails or is cancelled.
        let (deliveries, unacked) = (SelectAll::new(), BTreeMap::new());
        let mut session = Self { link, channel, deliveries, unacked, lost: None, started: Instant::now() };
        // For each consumer of the channel, that is, for each partition.
        setup.answer(session.channel.basic_qos(prefetch, BasicQosOptions { global: false })).await?;
        for partition in 0..setup.topology.partitions() {
            let queue = setup.topology.queue(Target::Partition(partition));
            let options = BasicConsumeOptions::default();
            let consuming = session.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default());
            let received = setup.answer(consuming).await?.map(|item| item.map_err(|error| error.to_string()));
            // The end of one of several streams would go unnoticed.
            let ended = stream::once(future::ready(Err("the broker has cancelled the consumer".to_owned())));
            let items: Deliveries = Box::pin(received.chain(ended).map(move |item| (partition, item)));
            session.deliveries.push(items);
        }
        Ok(session)
    }
}

#[async_trait]
impl Consumer for RabbitConsumer {
    async fn next(&mut self, max: usize) -> Result<Vec<Delivery>, QueueError> {
        if self.session.is_none() {
            self.reconnect().await;
        }
        let mut found = Vec::new();
        if let Some(session) = &mut self.session {
            // The only point of waiting; what follows cannot be cancelled.
            let mut item = if session.lost.is_none() { session.deliveries.next().await } else { None };
            loop {
                match item {
                    Some((partition, Ok(delivery))) => {
                        self.last_tag += 1;
                        let tag = Tag(self.last_tag);
                        session.unacked.insert(tag, delivery.delivery_tag);
                        let payload = message::decode(delivery.data);
                        found.push(Delivery { tag, partition, payload, redelivered: delivery.redelivered });
                    }
                    Some((_, Err(reason))) => {
                        session.lost = Some(reason);
                        break;
                    }
                    None => break,
                }
                if found.len() >= max {
                    break;
                }
                item = session.deliveries.next().now_or_never().flatten();
            }
        }
        if found.is_empty() { Err(self.disconnect()) } else { Ok(found) }
    }

    async fn ack(&mut self, deliveries: &[Tag]) -> Result<(), QueueError> {
        // Numbers begin again with every connection. Those of an earlier one must not be used: they now belong to other messages.
        let Some(session) = &mut self.session else { return Ok(()) };
        let numbers: Vec<u64> = deliveries.iter().filter_map(|tag| session.unacked.remove(tag)).collect();
        // One by one. An acknowledgement of all up to a number would include deliveries of other partitions that `next` has not returned.
        let channel = &session.channel;
        let acks = numbers.into_iter().map(|number| channel.basic_ack(number, BasicAckOptions { multiple: false }));
        let failure = match timeout(ACK_TIMEOUT, future::try_join_all(acks)).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("an acknowledgement was not sent within {ACK_TIMEOUT:?}"),
        };
        session.lost.get_or_insert(failure);
        Err(self.disconnect())
    }

    async fn close(self: Box<Self>) {
        if let Some(session) = self.session {
            let Session { link, channel, deliveries, .. } = session;
            link.close().await;
            drop((deliveries, channel));
        }
    }
}

impl fmt::Debug for RabbitConsumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitConsumer")
            .field("broker", &self.setup.connector.address)
            .field("prefetch", &self.prefetch)
            .field("unacked", &self.session.as_ref().map(|session| session.unacked.len()))
            .finish_non_exhaustive()
    }
}

//! The connection to RabbitMQ. A broker that cannot be reached when the node starts is tried again until it can; later the connection
//! replaces itself.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use metrics::{Counter, counter};
use parking_lot::Mutex;
use stampede_queue::rabbitmq::{ConnectError, RabbitMq};
use stampede_queue::{Batch, Consumer, DeadLetter, DeadLetterId, Marker, OrderQueue as _, QueueError, UnreadyReason};
use stampede_redis::Backoff;

use super::RabbitMqConfig;
use crate::alerts::{AlertKind, Alerts};

/// How often it is looked at whether messages can be published.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Operators get an alert if nothing could be published for this long. A broker that is restarted takes longer, which they should know.
const ALERT_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(in crate::tier) struct Broker {
    config: RabbitMqConfig,
    queue: OnceLock<RabbitMq>,
    /// Why there is no connection yet.
    reason: Mutex<(String, UnreadyReason)>,
    published: Counter,
    unconfirmed: Counter,
    returned: Counter,
}

impl Broker {
    /// Connects if the broker can be reached.
    ///
    /// # Errors
    /// If trying again would not help: a refused login, or a queue that was declared otherwise.
    pub(in crate::tier) async fn start(mut config: RabbitMqConfig, ledger_id: &str) -> Result<Arc<Self>, ConnectError> {
        ledger_id.clone_into(&mut config.broker.ledger);
        let (published, unconfirmed) =
            (counter!("stampede_queue_published_total"), counter!("stampede_queue_unconfirmed_total"));
        let returned = counter!("stampede_queue_returned_total");
        for counter in [&published, &unconfirmed, &returned] {
            counter.increment(0);
        }
        let reason = Mutex::new(("not connected yet".to_owned(), UnreadyReason::Unreachable));
        let broker = Arc::new(Self { config, queue: OnceLock::new(), reason, published, unconfirmed, returned });
        match broker.connect().await {
            Err(error) if !error.is_temporary() => return Err(error),
            Err(error) => tracing::warn!(%error, "starting without RabbitMQ; trying again"),
            Ok(()) => {}
        }
        Ok(broker)
    }

    async fn connect(&self) -> Result<(), ConnectError> {
        match RabbitMq::connect(self.config.broker.clone()).await {
            Ok(queue) => {
                // Only one task connects.
                let _ = self.queue.set(queue);
                Ok(())
            }
            Err(error) => {
                *self.reason.lock() = (error.to_string(), error.unready_reason());
                Err(error)
            }
        }
    }

    /// Tries to connect until it has worked once.
    pub(in crate::tier) async fn keep_connecting(self: Arc<Self>) {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
        while self.queue.get().is_none() {
            backoff.sleep().await;
            match self.connect().await {
                Ok(()) => tracing::info!("connected to RabbitMQ"),
                Err(error) => tracing::warn!(%error, "cannot connect to RabbitMQ; trying again"),
            }
        }
    }

    fn queue(&self) -> Result<&RabbitMq, QueueError> {
        self.queue.get().ok_or_else(|| QueueError::NotSent(self.reason.lock().0.clone()))
    }

    /// Why nothing can be published now; `None` if it can.
    pub(in crate::tier) fn unready_reason(&self) -> Option<UnreadyReason> {
        match self.queue.get() {
            None => Some(self.reason.lock().1),
            Some(queue) => queue.unready_reason(),
        }
    }

    /// Raises an alert when nothing can be published for a while. Never returns.
    pub(in crate::tier) async fn watch(self: Arc<Self>, alerts: Arc<Alerts>) {
        let mut unready_since = None;
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let Some(reason) = self.unready_reason() else {
                unready_since = None;
                continue;
            };
            if unready_since.get_or_insert_with(Instant::now).elapsed() >= ALERT_AFTER {
                let message = format!("no order is accepted, because RabbitMQ cannot be used: {reason}");
                alerts.raise(AlertKind::Broker, "queue".to_owned(), message).await;
            }
        }
    }

    /// How many messages may be parked.
    pub(in crate::tier) fn max_parked(&self) -> u64 {
        self.config.max_parked.into()
    }

    fn count_returned<T>(&self, outcome: Result<T, QueueError>) -> Result<T, QueueError> {
        if matches!(outcome, Err(QueueError::Unroutable)) {
            self.returned.increment(1);
        }
        outcome
    }

    pub(in crate::tier) fn partitions(&self) -> u16 {
        self.config.broker.partitions
    }

    /// Publishes a batch, and waits until it is confirmed.
    pub(in crate::tier) async fn publish(&self, batch: &Batch) -> Result<(), QueueError> {
        let published = self.count_returned(self.queue()?.publish(batch).await);
        match &published {
            Ok(()) => self.published.increment(1),
            Err(_) => self.unconfirmed.increment(1),
        }
        published
    }

    pub(in crate::tier) async fn publish_marker(&self, marker: Marker) -> Result<(), QueueError> {
        self.count_returned(self.queue()?.publish_marker(marker).await)
    }

    pub(in crate::tier) async fn dead_letter(&self, bytes: &[u8], reason: &str) -> Result<(), QueueError> {
        self.count_returned(self.queue()?.dead_letter(bytes, reason).await)
    }

    pub(in crate::tier) async fn consume(&self) -> Result<Box<dyn Consumer>, QueueError> {
        self.queue()?.consume(self.config.prefetch).await
    }

    /// How many messages wait for a consumer.
    pub(in crate::tier) async fn waiting(&self) -> Result<u64, QueueError> {
        Ok(self.queue()?.depth().await?.waiting)
    }

    pub(in crate::tier) async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.queue()?.dead_letters(limit).await
    }

    pub(in crate::tier) async fn remove_dead_letter(&self, id: DeadLetterId, retry: bool) -> Result<bool, QueueError> {
        let queue = self.queue()?;
        if retry { queue.retry_dead_letter(id).await } else { queue.discard_dead_letter(id).await }
    }

    pub(in crate::tier) async fn close(&self) {
        if let Some(queue) = self.queue.get() {
            queue.close().await;
        }
    }
}

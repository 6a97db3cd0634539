//! The queue on RabbitMQ.
//!
//! - [`RabbitMq`]: implements [`OrderQueue`]; [`Config`], [`Address`], [`TlsFiles`]: where and how
//! - `topology`: exchange and queues
//! - `publisher`: publishes with confirms; `confirms`: which message the broker has confirmed
//! - `consumer`: consumes all partitions; `dead_letters`: what operators do with messages that could not be read
//! - `connection`: connections with a time limit; `transport`: lapin on tokio, with or without TLS
//!
//! Publishers and consumers have connections of their own, because the broker blocks connections that publish when its memory or disk is
//! full, and consumers must go on then. Nothing is shared between two connections, so each is replaced by itself.
//!
//! # Why a marker does not overtake a batch
//!
//! Each partition is one queue of the broker, with a single active consumer.
//!
//! - *Publishing.* The broker confirms a persistent message after the queue has stored it. What is published after that confirm, over
//!   any connection, is behind it in the queue.
//! - *Delivering.* A queue delivers from its head, to one consumer: the active one. So this consumer gets the messages in their order.
//! - *Re-queueing.* When the active consumer's connection or channel ends, the queue, which handles one event after another, puts all
//!   messages that were delivered and not acknowledged back to their original places and only then delivers to the next consumer.
//!   (A quorum queue keeps returned messages in a list of their own that is delivered before all others, in their order.) So the next
//!   consumer gets them, marked as redelivered, before everything behind them.
//! - A consumer that was only cut off may still be recording what the next one gets again. Recording is idempotent and waits for a
//!   transaction that does the same, so when the next consumer comes to the marker, it has recorded everything before it.
//!
//! Three things would break this, and are not done: cancelling a consumer while its channel is open (see `consumer`), rejecting single
//! messages, and publishing a delivery again. What was published and *not* confirmed may arrive behind a marker.
//!
//! The broker closes the channel of a consumer that has not acknowledged a delivery for 30 minutes (`consumer_timeout`). It is like any
//! other loss of a connection: the delivery comes again.
//!
//! # Log
//!
//! At the level `trace` lapin logs every frame, including the one with the password. [`LOG_DIRECTIVE`] excludes it.

mod address;
mod confirms;
mod connection;
mod consumer;
mod dead_letters;
mod publisher;
mod topology;
mod transport;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future;
use lapin::Channel;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;

use self::connection::{Connector, Link};
use self::consumer::RabbitConsumer;
use self::publisher::Publisher;
use self::topology::{Target, Topology};
use crate::{Batch, Consumer, DeadLetter, DeadLetterId, Depth, Marker, OrderQueue, QueueError, UnreadyReason, message};

pub use self::address::{Address, AddressError};
pub use self::topology::QueueType;
pub use stampede_tls::{Tls, TlsError, TlsFiles};

/// For the filter of the application's log, after all other directives. See the documentation of the module.
pub const LOG_DIRECTIVE: &str = "lapin=debug";

/// The highest number of partitions. Each costs a queue in the broker.
pub const MAX_PARTITIONS: u16 = 256;
/// The longest id of a ledger: names in the broker have at most 255 bytes.
const MAX_LEDGER_LENGTH: usize = 100;
/// The longest reason that is stored with a dead letter.
const MAX_REASON_LENGTH: usize = 1000;

/// Where RabbitMQ runs and how it is used.
#[derive(Debug, Clone)]
pub struct Config {
    /// The broker.
    pub address: Address,
    /// Certificates; needed if the address begins with `amqps://`, and only then.
    pub tls: Option<Tls>,
    /// The id of the ledger, part of all names in the broker: letters, digits, `-` and `_`.
    pub ledger: String,
    /// Into how many queues the sales are divided. It must not change while messages wait.
    pub partitions: u16,
    /// How the broker stores the queues. It must not change for queues that exist.
    pub queue_type: QueueType,
    /// Whether the broker returns messages that no queue takes. Otherwise it confirms them, and they are lost.
    pub mandatory: bool,
    /// How many messages may be sent and not confirmed.
    pub max_in_flight: usize,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// How long a confirm may take.
    pub confirm_timeout: Duration,
    /// How often client and broker show each other that they are alive, at least a second. A connection that hangs is given up after
    /// twice this time.
    pub heartbeat: Duration,
}

impl Config {
    /// The defaults: 8 partitions of classic queues, mandatory messages, 1,024 of them under way, 2 s for a confirm, 5 s for a connection,
    /// a heartbeat every 5 s.
    pub fn new(address: Address, ledger: impl Into<String>) -> Self {
        Self {
            address,
            tls: None,
            ledger: ledger.into(),
            partitions: 8,
            queue_type: QueueType::Classic,
            mandatory: true,
            max_in_flight: 1024,
            connect_timeout: Duration::from_secs(5),
            confirm_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_secs(5),
        }
    }

    fn check(&self) -> Result<(), ConnectError> {
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let invalid =
            if self.ledger.is_empty() || self.ledger.len() > MAX_LEDGER_LENGTH || !self.ledger.chars().all(valid) {
                "the id of the ledger must have 1 to 100 letters, digits, - and _"
            } else if self.partitions == 0 || self.partitions > MAX_PARTITIONS {
                "the number of partitions must be between 1 and 256"
            } else if self.max_in_flight == 0 || self.max_in_flight > Semaphore::MAX_PERMITS {
                "the number of messages under way must be positive"
            } else {
                return Ok(());
            };
        Err(ConnectError::Invalid(invalid))
    }
}

/// Why there is no connection to RabbitMQ.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A value of the [`Config`] is out of range.
    #[error("{0}")]
    Invalid(&'static str),
    /// Certificates without `amqps://`, or the reverse.
    #[error("certificates need an address that begins with amqps://, and such an address needs certificates")]
    TlsMismatch,
    /// The broker does not answer, or not with its protocol.
    #[error("cannot connect to RabbitMQ: {0}")]
    Unreachable(String),
    /// Wrong user or password, or no access to the virtual host or to a queue.
    #[error("RabbitMQ refused access: {0}")]
    Refused(String),
    /// The exchange or a queue exists with other properties, for example of another type. An operator has to change the settings, or to
    /// delete it when it is empty.
    #[error("{name} exists in RabbitMQ and was declared otherwise: {message}")]
    DeclaredOtherwise {
        /// The name of the exchange or queue.
        name: String,
        /// What the broker says.
        message: String,
    },
}

impl ConnectError {
    /// Whether the same settings may work later, because the broker was only away.
    pub const fn is_temporary(&self) -> bool {
        matches!(self, Self::Unreachable(_))
    }

    /// What can be said of it to anyone.
    pub const fn unready_reason(&self) -> UnreadyReason {
        match self {
            Self::Refused(_) => UnreadyReason::Refused,
            Self::DeclaredOtherwise { .. } => UnreadyReason::DeclaredOtherwise,
            Self::Invalid(_) | Self::TlsMismatch | Self::Unreachable(_) => UnreadyReason::Unreachable,
        }
    }
}

/// What publishers and consumers share.
#[derive(Debug)]
struct Setup {
    connector: Connector,
    topology: Topology,
    mandatory: bool,
    max_in_flight: usize,
    confirm_timeout: Duration,
}

impl Setup {
    /// Connects, and opens a channel after everything is declared.
    async fn open(&self, purpose: &str) -> Result<(Link, Channel), ConnectError> {
        let link = self.connector.connect(purpose).await?;
        let channel = self.declare(&link).await?;
        Ok((link, channel))
    }

    /// Declares everything on a new channel. The broker closes the channel if it refuses that.
    async fn declare(&self, link: &Link) -> Result<Channel, ConnectError> {
        let channel = self.answer(link.connection.create_channel()).await?;
        let declaring = timeout(self.connector.connect_timeout, self.topology.declare(&channel));
        declaring.await.unwrap_or_else(|_| Err(self.no_answer()))?;
        Ok(channel)
    }

    /// Waits for the broker's answer to a method.
    async fn answer<T>(&self, method: impl Future<Output = lapin::Result<T>>) -> Result<T, ConnectError> {
        match timeout(self.connector.connect_timeout, method).await {
            Ok(answer) => answer.map_err(|error| ConnectError::from_lapin(&error)),
            Err(_) => Err(self.no_answer()),
        }
    }

    fn no_answer(&self) -> ConnectError {
        ConnectError::Unreachable(format!("no answer within {:?}", self.connector.connect_timeout))
    }
}

/// A queue on RabbitMQ.
pub struct RabbitMq {
    setup: Arc<Setup>,
    publisher: Publisher,
    /// The connection for [`OrderQueue::depth`], made when it is first used.
    control: Mutex<Option<(Link, Channel)>>,
}

impl RabbitMq {
    /// Connects and declares exchange and queues. Later the connection is replaced whenever it breaks.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(config: Config) -> Result<Self, ConnectError> {
        config.check()?;
        let heartbeat_s = u16::try_from(config.heartbeat.as_secs()).unwrap_or(u16::MAX).max(1);
        let setup = Arc::new(Setup {
            topology: Topology::new(&config.ledger, config.partitions, config.queue_type),
            connector: Connector {
                address: config.address,
                tls: config.tls,
                connect_timeout: config.connect_timeout,
                heartbeat_s,
            },
            mandatory: config.mandatory,
            max_in_flight: config.max_in_flight,
            confirm_timeout: config.confirm_timeout,
        });
        let publisher = Publisher::start(setup.clone()).await?;
        Ok(Self { setup, publisher, control: Mutex::new(None) })
    }

    async fn count(&self, control: &mut Option<(Link, Channel)>) -> Result<Depth, ConnectError> {
        let (_, channel) = match control {
            Some(open) => open,
            None => control.insert(self.setup.open("control").await?),
        };
        let topology = &self.setup.topology;
        let mut depth = Depth::default();
        for partition in 0..topology.partitions() {
            depth.waiting += self.setup.answer(topology.count(channel, Target::Partition(partition))).await?;
        }
        depth.dead_letters = self.setup.answer(topology.count(channel, Target::DeadLetters)).await?;
        Ok(depth)
    }
}

#[async_trait]
impl OrderQueue for RabbitMq {
    async fn publish(&self, batch: &Batch) -> Result<(), QueueError> {
        let target = Target::Partition(self.setup.topology.partition_of(batch.sale));
        self.publisher.publish(target, message::encode_batch(batch)?, None).await
    }

    async fn publish_marker(&self, marker: Marker) -> Result<(), QueueError> {
        let payload = message::encode_marker(marker);
        let targets = (0..self.setup.topology.partitions()).map(Target::Partition);
        let publishing = targets.map(|target| self.publisher.publish(target, payload.clone(), None));
        // All of them are waited for: an error of one leaves no other under way.
        future::join_all(publishing).await.into_iter().collect()
    }

    async fn dead_letter(&self, bytes: &[u8], reason: &str) -> Result<(), QueueError> {
        let reason = reason.chars().take(MAX_REASON_LENGTH).collect();
        self.publisher.publish(Target::DeadLetters, bytes.to_vec(), Some(reason)).await
    }

    async fn dead_letters(&self, limit: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.list_dead_letters(limit).await
    }

    async fn retry_dead_letter(&self, id: DeadLetterId) -> Result<bool, QueueError> {
        self.remove_dead_letter(id, true).await
    }

    async fn discard_dead_letter(&self, id: DeadLetterId) -> Result<bool, QueueError> {
        self.remove_dead_letter(id, false).await
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let mut control = self.control.lock().await;
        // Taken out meanwhile, so that a call that is cancelled leaves no connection that waits for an answer.
        let mut open = control.take();
        let depth = self.count(&mut open).await.map_err(|error| QueueError::NotSent(error.to_string()))?;
        *control = open;
        Ok(depth)
    }

    async fn consume(&self, prefetch: u16) -> Result<Box<dyn Consumer>, QueueError> {
        let consumer = RabbitConsumer::start(self.setup.clone(), prefetch).await;
        consumer
            .map(|consumer| Box::new(consumer) as Box<dyn Consumer>)
            .map_err(|error| QueueError::NotSent(error.to_string()))
    }

    fn partitions(&self) -> u16 {
        self.setup.topology.partitions()
    }

    fn unready_reason(&self) -> Option<UnreadyReason> {
        self.publisher.unready_reason()
    }

    async fn close(&self) {
        self.publisher.close().await;
        if let Some((link, _)) = self.control.lock().await.take() {
            link.close().await;
        }
    }
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("broker", &self.setup.connector.address)
            .field("exchange", &self.setup.topology.exchange())
            .field("ready", &self.is_ready())
            .finish_non_exhaustive()
    }
}

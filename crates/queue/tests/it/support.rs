//! The broker of all tests, and queues on it.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use stampede_queue::OrderQueue;
use stampede_queue::rabbitmq::{Config, QueueType, RabbitMq};
use stampede_testkit::redis::tls::Certificates;
use stampede_testkit::{Server, free_port, rabbitmq};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::conformance::Harness;

/// Long enough for a loaded machine.
pub const TIMEOUT: Duration = Duration::from_secs(20);
pub const PARTITIONS: u16 = 3;

pub struct Broker {
    pub server: Server,
    pub certificates: Certificates,
    pub tls_port: u16,
}

/// Ends with the process.
static BROKER: LazyLock<RwLock<Broker>> = LazyLock::new(|| {
    let certificates = Certificates::create().unwrap();
    let tls_port = free_port().unwrap();
    let file = |option: &str, path: std::path::PathBuf| format!("ssl_options.{option} = {}", path.display());
    let server = rabbitmq::start_with(&[
        format!("listeners.ssl.1 = 127.0.0.1:{tls_port}"),
        file("cacertfile", certificates.ca()),
        file("certfile", certificates.server_certificate()),
        file("keyfile", certificates.server_key()),
        "ssl_options.verify = verify_peer".to_owned(),
        "ssl_options.fail_if_no_peer_cert = true".to_owned(),
    ]);
    RwLock::new(Broker { server: server.unwrap(), certificates, tls_port })
});

/// The broker, for a test that leaves it as it is.
pub async fn shared() -> RwLockReadGuard<'static, Broker> {
    BROKER.read().await
}

/// The broker for one test alone.
pub async fn exclusive() -> RwLockWriteGuard<'static, Broker> {
    BROKER.write().await
}

/// An id of a ledger that no other test has.
pub fn unique_ledger() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("ledger-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A configuration for a broker on this port.
pub fn config(port: u16, ledger: &str) -> Config {
    Config {
        partitions: PARTITIONS,
        connect_timeout: TIMEOUT,
        confirm_timeout: TIMEOUT,
        ..Config::new(rabbitmq::url(port).parse().unwrap(), ledger)
    }
}

impl Broker {
    /// A channel that bypasses the crate.
    pub async fn channel(&self) -> (Connection, Channel) {
        let url = rabbitmq::url(self.server.port());
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    pub async fn delete_partition(&self, ledger: &str, partition: u16) {
        let (_connection, channel) = self.channel().await;
        let name = format!("stampede.{ledger}.orders.{partition}");
        channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.unwrap();
    }
}

impl Broker {
    /// Replaces the queue of a partition by one that no message reaches and that this crate refuses.
    pub async fn declare_otherwise(&self, ledger: &str, partition: u16) {
        self.delete_partition(ledger, partition).await;
        let (_connection, channel) = self.channel().await;
        let name = format!("stampede.{ledger}.orders.{partition}");
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(name.into(), options, FieldTable::default()).await.unwrap();
    }
}

/// RabbitMQ with queues of one type.
pub struct Rabbit<'a> {
    pub broker: &'a Broker,
    pub queue_type: QueueType,
}

#[async_trait]
impl Harness for Rabbit<'_> {
    async fn connect(&self, ledger: &str) -> Box<dyn OrderQueue> {
        let config = Config { queue_type: self.queue_type, ..config(self.broker.server.port(), ledger) };
        Box::new(RabbitMq::connect(config).await.unwrap())
    }

    async fn publish_bytes(&self, ledger: &str, partition: u16, bytes: &[u8]) {
        let (_connection, channel) = self.broker.channel().await;
        channel.confirm_select(Default::default()).await.unwrap();
        let (exchange, key) = (format!("stampede.{ledger}"), partition.to_string());
        let options = BasicPublishOptions::default();
        let sending = channel.basic_publish(exchange.into(), key.into(), options, bytes, BasicProperties::default());
        assert!(sending.await.unwrap().await.unwrap().is_ack());
    }

    async fn delete_partition(&self, ledger: &str, partition: u16) {
        self.broker.delete_partition(ledger, partition).await;
    }

    fn kill(&self) {
        self.broker.server.kill().unwrap();
    }

    fn restart(&self) {
        self.broker.server.restart().unwrap();
    }
}

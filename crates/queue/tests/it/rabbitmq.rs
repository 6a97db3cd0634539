//! What only RabbitMQ can do: its topology, logins, TLS, alarms, and connections that break.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use stampede_queue::rabbitmq::{Config, ConnectError, QueueType, RabbitMq, Tls, TlsFiles};
use stampede_queue::{Marker, OrderQueue, Payload, QueueError, Tag, UnreadyReason};
use stampede_testkit::proxy::{Fault, Proxy};
use stampede_testkit::redis::tls::Certificates;
use stampede_testkit::{rabbitmq, until};
use tokio::time::timeout;

use crate::conformance::{ack_all, batch, receive};
use crate::support::{Broker, TIMEOUT, config, exclusive, shared, unique_ledger};

const PASSWORD: &str = "a-very-secret-word";
const SHORT: Duration = Duration::from_millis(500);

async fn connect(config: Config) -> RabbitMq {
    RabbitMq::connect(config).await.unwrap()
}

/// A queue behind a proxy, with a short limit for confirms.
async fn through_proxy(broker: &Broker, ledger: &str) -> (Proxy, RabbitMq) {
    let proxy = Proxy::start(broker.server.address()).await.unwrap();
    let queue = connect(Config { confirm_timeout: SHORT, ..config(proxy.address().port(), ledger) }).await;
    (proxy, queue)
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_that_was_declared_otherwise_is_refused_at_start() {
    let broker = shared().await;
    let port = broker.server.port();
    let ledger = unique_ledger();
    drop(connect(config(port, &ledger)).await);
    // The same again is fine; another type is not.
    drop(connect(config(port, &ledger)).await);
    let quorum = Config { queue_type: QueueType::Quorum, ..config(port, &ledger) };
    let error = RabbitMq::connect(quorum).await.unwrap_err();
    let ConnectError::DeclaredOtherwise { name, message } = &error else { panic!("{error}") };
    assert!(*name == format!("stampede.{ledger}.orders.0") && message.contains("x-queue-type"), "{error}");
    assert!(!error.is_temporary());

    // Without a single active consumer.
    let ledger = unique_ledger();
    let (_connection, channel) = broker.channel().await;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let name = format!("stampede.{ledger}.orders.1");
    channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await.unwrap();
    let error = RabbitMq::connect(config(port, &ledger)).await.unwrap_err();
    assert!(matches!(&error, ConnectError::DeclaredOtherwise { name: found, .. } if *found == name), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logins_and_virtual_hosts_are_those_of_the_url() {
    let broker = shared().await;
    let port = broker.server.port();
    let control = |arguments: &[&str]| rabbitmq::control(&broker.server, arguments).unwrap();
    control(&["add_vhost", "shop/one"]);
    control(&["add_user", "al@ice", "p@ss:w/rd?#%"]);
    control(&["set_permissions", "-p", "shop/one", "al@ice", ".*", ".*", ".*"]);

    let ledger = unique_ledger();
    let with = |login: &str, vhost: &str| Config {
        address: format!("amqp://{login}@127.0.0.1:{port}/{vhost}").parse().unwrap(),
        ..config(port, &ledger)
    };
    let queue = connect(with("al%40ice:p%40ss%3Aw%2Frd%3F%23%25", "shop%2Fone")).await;
    queue.publish(&batch(1, 1)).await.unwrap();
    assert_eq!(queue.depth().await.unwrap().waiting, 1);
    // In the other virtual host there are queues of the same name.
    let other = connect(with("guest:guest", "%2f")).await;
    assert_eq!(other.depth().await.unwrap().waiting, 0);

    let wrong = format!("al%40ice:{PASSWORD}");
    for (login, vhost) in [
        (wrong.as_str(), "shop%2Fone"),
        ("nobody:x", ""),
        ("guest:guest", "missing"),
        ("al%40ice:p%40ss%3Aw%2Frd%3F%23%25", ""),
    ] {
        let config = with(login, vhost);
        let shown = format!("{config:?}");
        let error = RabbitMq::connect(config).await.unwrap_err();
        assert!(matches!(error, ConnectError::Refused(_)), "{login} {vhost}: {error}");
        assert!(!format!("{shown} {error} {error:?}").contains(PASSWORD), "{shown} {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_settings_are_refused() {
    let broker = shared().await;
    let valid = config(broker.server.port(), &unique_ledger());
    for invalid in [
        Config { ledger: String::new(), ..valid.clone() },
        Config { ledger: "a.b".to_owned(), ..valid.clone() },
        Config { ledger: "a".repeat(101), ..valid.clone() },
        Config { partitions: 0, ..valid.clone() },
        Config { partitions: 257, ..valid.clone() },
        Config { max_in_flight: 0, ..valid.clone() },
    ] {
        let error = RabbitMq::connect(invalid).await.unwrap_err();
        assert!(matches!(error, ConnectError::Invalid(_)), "{error}");
    }
}

fn client_files(certificates: &Certificates) -> TlsFiles {
    TlsFiles {
        ca: Some(certificates.ca()),
        certificate: Some(certificates.client_certificate()),
        key: Some(certificates.client_key()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_and_client_verify_each_other_over_tls() {
    let broker = shared().await;
    let ledger = unique_ledger();
    let with = |host: &str, tls: Option<Tls>| Config {
        address: format!("amqps://guest:guest@{host}:{}", broker.tls_port).parse().unwrap(),
        tls,
        ..config(1, &ledger)
    };
    let tls = client_files(&broker.certificates).read().unwrap();
    let queue = connect(with("127.0.0.1", Some(tls.clone()))).await;
    queue.publish(&batch(1, 1)).await.unwrap();
    let mut consumer = queue.consume(10).await.unwrap();
    let deliveries = receive(&mut *consumer, 1).await;
    ack_all(&mut *consumer, &deliveries).await;

    let other = Certificates::create().unwrap();
    let wrong_authority = TlsFiles { ca: Some(other.ca()), ..client_files(&broker.certificates) };
    let no_authority = TlsFiles { ca: None, ..client_files(&broker.certificates) };
    let no_client = TlsFiles { ca: Some(broker.certificates.ca()), ..TlsFiles::default() };
    for (config, message) in [
        (with("127.0.0.1", Some(wrong_authority.read().unwrap())), "invalid peer certificate"),
        (with("127.0.0.1", Some(no_authority.read().unwrap())), "invalid peer certificate"),
        // The certificate is for the address.
        (with("localhost", Some(tls.clone())), "not valid for name"),
        (with("127.0.0.1", Some(no_client.read().unwrap())), ""),
    ] {
        let error = RabbitMq::connect(config).await.unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable(_)) && error.to_string().contains(message), "{error}");
    }
    let plain = config(broker.server.port(), &ledger);
    for mismatch in [with("127.0.0.1", None), Config { tls: Some(tls), ..plain }] {
        assert_eq!(RabbitMq::connect(mismatch).await.unwrap_err(), ConnectError::TlsMismatch);
    }
}

/// Half of the messages reach no queue, until an operator has corrected that. None of those is confirmed, whatever else is under way.
#[tokio::test(flavor = "multi_thread")]
async fn returned_messages_are_told_from_confirmed_ones() {
    const PUBLISHERS: i64 = 40;
    const EACH: i64 = 50;
    let broker = shared().await;
    let ledger = unique_ledger();
    let queue = Arc::new(connect(Config { partitions: 2, ..config(broker.server.port(), &ledger) }).await);
    let mut sale_of = [None, None];
    for of in 1..=20 {
        queue.publish(&batch(of, 0)).await.unwrap();
    }
    let mut consumer = queue.consume(100).await.unwrap();
    let deliveries = receive(&mut *consumer, 20).await;
    for delivery in &deliveries {
        let Payload::Batch(batch) = &delivery.payload else { panic!("{delivery:?}") };
        sale_of[usize::from(delivery.partition)] = Some(batch.sale.get());
    }
    ack_all(&mut *consumer, &deliveries).await;
    consumer.close().await;
    let [Some(kept), Some(deleted)] = sale_of else { panic!("{sale_of:?}") };
    broker.declare_otherwise(&ledger, 1).await;

    // Confirms of stored messages arrive between returns and the confirms of returned ones.
    let publishers: Vec<_> = (0..PUBLISHERS)
        .map(|publisher| {
            let queue = queue.clone();
            tokio::spawn(async move {
                let mut outcomes = Vec::new();
                for number in 0..EACH {
                    let of = if (publisher + number) % 2 == 0 { kept } else { deleted };
                    outcomes.push((of, queue.publish(&batch(of, publisher * EACH + number)).await));
                }
                outcomes
            })
        })
        .collect();
    let (mut confirmed, mut returned, mut stored) = (0, 0, 0);
    for publisher in publishers {
        for outcome in publisher.await.unwrap() {
            match outcome {
                (of, Ok(())) if of == kept => (confirmed, stored) = (confirmed + 1, stored + 1),
                (of, Err(QueueError::Unconfirmed(_))) => stored += i64::from(of == kept),
                (of, Err(QueueError::Unroutable)) if of == deleted => returned += 1,
                unexpected => panic!("{unexpected:?}"),
            }
        }
    }
    assert!(confirmed > 0 && returned > 0, "{confirmed} confirmed, {returned} returned");
    assert_eq!(stored, PUBLISHERS * EACH / 2);
    until("the queue says why", async || queue.unready_reason() == Some(UnreadyReason::DeclaredOtherwise)).await;
    broker.delete_partition(&ledger, 1).await;
    until("everything is declared again", async || queue.is_ready()).await;
    assert_eq!(queue.depth().await.unwrap().waiting, u64::try_from(stored).unwrap());
    queue.publish(&batch(deleted, 1000)).await.unwrap();
}

/// Without `mandatory`, the broker confirms what no queue takes.
#[tokio::test(flavor = "multi_thread")]
async fn mandatory_can_be_switched_off() {
    let broker = shared().await;
    let ledger = unique_ledger();
    let port = broker.server.port();
    let queue = connect(Config { mandatory: false, partitions: 1, ..config(port, &ledger) }).await;
    broker.delete_partition(&ledger, 0).await;
    queue.publish(&batch(1, 1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_connections_are_replaced() {
    let broker = shared().await;
    let ledger = unique_ledger();
    let (proxy, queue) = through_proxy(&broker, &ledger).await;
    let mut consumer = queue.consume(10).await.unwrap();
    for round in 1..=3 {
        proxy.cut_all();
        let error = timeout(TIMEOUT, consumer.next(10)).await.unwrap().unwrap_err();
        assert!(matches!(error, QueueError::Disconnected(_)), "{error}");
        until("publishing works", async || queue.publish(&batch(1, round)).await.is_ok()).await;
        // Those that were not confirmed may arrive as well.
        loop {
            let deliveries = receive(&mut *consumer, 1).await;
            ack_all(&mut *consumer, &deliveries).await;
            if deliveries[0].payload == Payload::Batch(batch(1, round)) {
                break;
            }
        }
    }
}

/// Numbers of deliveries begin again with every connection.
#[tokio::test(flavor = "multi_thread")]
async fn tags_of_a_lost_connection_acknowledge_nothing() {
    let broker = shared().await;
    let ledger = unique_ledger();
    let (proxy, queue) = through_proxy(&broker, &ledger).await;
    for number in 0..3 {
        queue.publish(&batch(1, number)).await.unwrap();
    }
    let mut consumer = queue.consume(10).await.unwrap();
    let before = receive(&mut *consumer, 3).await;
    proxy.cut_all();
    assert!(matches!(timeout(TIMEOUT, consumer.next(10)).await.unwrap(), Err(QueueError::Disconnected(_))));
    consumer.ack(&[before[0].tag]).await.unwrap();
    let again = receive(&mut *consumer, 3).await;
    assert!(again.iter().all(|delivery| delivery.redelivered));
    let stale: Vec<Tag> = before.iter().map(|delivery| delivery.tag).collect();
    consumer.ack(&stale).await.unwrap();
    consumer.close().await;
    let mut next = queue.consume(10).await.unwrap();
    assert_eq!(receive(&mut *next, 3).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn message_without_an_answer_is_unconfirmed_in_time_and_keeps_its_place() {
    let broker = shared().await;
    let ledger = unique_ledger();
    let proxy = Proxy::start(broker.server.address()).await.unwrap();
    let bounded = Config { confirm_timeout: SHORT, max_in_flight: 4, ..config(proxy.address().port(), &ledger) };
    let queue = connect(bounded).await;
    proxy.set(Fault::DropResponses);
    let started = Instant::now();
    let batches: Vec<_> = (0..4).map(|number| batch(1, number)).collect();
    for outcome in futures_util::future::join_all(batches.iter().map(|batch| queue.publish(batch))).await {
        let error = outcome.unwrap_err();
        assert!(matches!(error, QueueError::Unconfirmed(_)) && error.may_be_queued(), "{error}");
    }
    assert!(started.elapsed() >= SHORT && started.elapsed() < TIMEOUT, "{:?}", started.elapsed());
    // Nobody waits for them, but they are still under way.
    let error = queue.publish(&batch(1, 4)).await.unwrap_err();
    assert!(matches!(error, QueueError::Busy(_)) && !error.may_be_queued(), "{error}");
    // They were stored: an answer that is missing is no refusal.
    proxy.cut_all();
    proxy.set(Fault::None);
    until("there are places again", async || queue.publish(&batch(1, 5)).await.is_ok()).await;
    assert!(queue.depth().await.unwrap().waiting >= 5);
}

/// Attempts to connect to a broker that accepts and does not answer end in time, and leave no thread behind.
#[tokio::test(flavor = "multi_thread")]
async fn connecting_to_a_broker_that_hangs_ends_in_time() {
    let broker = exclusive().await;
    let proxy = Proxy::start(broker.server.address()).await.unwrap();
    proxy.set(Fault::Hang);
    let threads_before = lapin_threads();
    for _ in 0..5 {
        let hanging = Config { connect_timeout: SHORT, ..config(proxy.address().port(), "hanging") };
        let started = Instant::now();
        let error = RabbitMq::connect(hanging).await.unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable(_)) && error.is_temporary(), "{error}");
        assert!(started.elapsed() < TIMEOUT, "{:?}", started.elapsed());
    }
    until("the threads have ended", async || lapin_threads() <= threads_before).await;
}

/// lapin starts a thread per connection.
fn lapin_threads() -> usize {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    names
        .filter(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("lapin")))
        .count()
}

/// The broker says goodbye to its clients before it stops.
#[tokio::test(flavor = "multi_thread")]
async fn broker_that_was_stopped_keeps_messages() {
    let broker = exclusive().await;
    let ledger = unique_ledger();
    let queue = connect(config(broker.server.port(), &ledger)).await;
    queue.publish(&batch(1, 0)).await.unwrap();
    let mut consumer = queue.consume(10).await.unwrap();
    assert_eq!(receive(&mut *consumer, 1).await.len(), 1);
    broker.server.stop().unwrap();
    assert!(matches!(timeout(TIMEOUT, consumer.next(10)).await.unwrap(), Err(QueueError::Disconnected(_))));
    broker.server.restart().unwrap();
    let again = receive(&mut *consumer, 1).await;
    assert!(again[0].redelivered && again[0].payload == Payload::Batch(batch(1, 0)), "{again:?}");
    until("the publisher is connected again", async || queue.is_ready()).await;
    queue.publish(&batch(1, 1)).await.unwrap();
}

/// A paused broker answers nothing; the heartbeat notices.
#[tokio::test(flavor = "multi_thread")]
async fn broker_that_was_paused_is_used_again() {
    let broker = exclusive().await;
    let ledger = unique_ledger();
    let limits = Config {
        confirm_timeout: SHORT,
        connect_timeout: SHORT,
        heartbeat: Duration::from_secs(1),
        ..config(broker.server.port(), &ledger)
    };
    let queue = connect(limits).await;
    queue.publish(&batch(1, 0)).await.unwrap();
    broker.server.signal("STOP").unwrap();
    let error = queue.publish(&batch(1, 1)).await.unwrap_err();
    assert!(matches!(error, QueueError::Unconfirmed(_)), "{error}");
    until("the connection is given up", async || !queue.is_ready()).await;
    broker.server.signal("CONT").unwrap();
    until("publishing works", async || queue.publish(&batch(1, 2)).await.is_ok()).await;
}

/// An alarm of memory: the broker blocks connections that publish, and consumers go on.
#[tokio::test(flavor = "multi_thread")]
async fn blocked_broker_is_busy_and_consumers_go_on() {
    let broker = exclusive().await;
    let ledger = unique_ledger();
    let queue = connect(Config { confirm_timeout: SHORT, ..config(broker.server.port(), &ledger) }).await;
    for number in 0..3 {
        queue.publish(&batch(1, number)).await.unwrap();
    }
    rabbitmq::control(&broker.server, &["set_vm_memory_high_watermark", "absolute", "1"]).unwrap();
    // The broker tells a connection that it is blocked when it publishes.
    until("publishers are blocked", async || matches!(queue.publish(&batch(1, 3)).await, Err(QueueError::Busy(_))))
        .await;
    assert!(!queue.is_ready());
    assert!(queue.publish_marker(Marker::Rebuild { incarnation: 1 }).await.is_err());
    let mut consumer = queue.consume(10).await.unwrap();
    let deliveries = receive(&mut *consumer, 3).await;
    ack_all(&mut *consumer, &deliveries).await;
    consumer.close().await;
    assert!(queue.depth().await.is_ok());
    rabbitmq::control(&broker.server, &["set_vm_memory_high_watermark", "0.4"]).unwrap();
    until("publishers are accepted", async || queue.is_ready()).await;
    until("publishing works", async || queue.publish(&batch(1, 4)).await.is_ok()).await;
}

//! The part of the suite that is common to all queues, written against the traits.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use stampede_core::ports::Admitted;
use stampede_core::{Epoch, OrderId, SaleId, Timestamp, UserId};
use stampede_queue::message::MAX_ORDERS;
use stampede_queue::{Batch, Consumer, DeadLetterId, Delivery, Depth, Marker, OrderQueue, Payload, QueueError, Tag};
use stampede_testkit::until;
use tokio::time::timeout;

use crate::support::{TIMEOUT, unique_ledger};

/// A broker with queues of one kind.
#[async_trait]
pub trait Harness: Send + Sync {
    /// A new client of the queue of this installation.
    async fn connect(&self, ledger: &str) -> Box<dyn OrderQueue>;
    /// Publishes bytes past the crate.
    async fn publish_bytes(&self, ledger: &str, partition: u16, bytes: &[u8]);
    /// Deletes what a partition is stored in.
    async fn delete_partition(&self, ledger: &str, partition: u16);
    /// Kills the broker and waits until it is gone.
    fn kill(&self);
    /// Starts the broker again on its data.
    fn restart(&self);
}

pub fn sale(number: i64) -> SaleId {
    SaleId::new(number).unwrap()
}

/// A batch of two orders; `number` makes it different from others.
pub fn batch(of: i64, number: i64) -> Batch {
    let order = |n: i64| Admitted {
        order: OrderId::new(i64::MAX - (of * 1_000_000 + n)).unwrap(),
        user: UserId::new(n + 1).unwrap(),
        seq: n,
        at: Timestamp::from_ms(1_700_000_000_000 + n),
    };
    Batch { sale: sale(of), epoch: Epoch(number), orders: vec![order(2 * number), order(2 * number + 1)] }
}

/// Receives until `count` deliveries are there.
pub async fn receive(consumer: &mut dyn Consumer, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        let more = timeout(TIMEOUT, consumer.next(count - all.len())).await;
        all.extend(more.unwrap_or_else(|_| panic!("{} of {count} deliveries arrived", all.len())).unwrap());
    }
    assert_eq!(all.len(), count);
    all
}

pub async fn ack_all(consumer: &mut dyn Consumer, deliveries: &[Delivery]) {
    let tags: Vec<Tag> = deliveries.iter().map(|delivery| delivery.tag).collect();
    consumer.ack(&tags).await.unwrap();
}

fn payloads(deliveries: &[Delivery]) -> Vec<Payload> {
    deliveries.iter().map(|delivery| delivery.payload.clone()).collect()
}

fn batches(of: i64, numbers: impl IntoIterator<Item = i64>) -> Vec<Payload> {
    numbers.into_iter().map(|number| Payload::Batch(batch(of, number))).collect()
}

async fn publish(queue: &dyn OrderQueue, of: i64, numbers: impl IntoIterator<Item = i64>) {
    for number in numbers {
        queue.publish(&batch(of, number)).await.unwrap();
    }
}

async fn waiting(queue: &dyn OrderQueue) -> u64 {
    queue.depth().await.unwrap().waiting
}

pub async fn batches_arrive_in_order_and_once(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    assert!(queue.is_ready());
    publish(&*queue, 7, 0..10).await;
    let mut consumer = queue.consume(100).await.unwrap();
    let first = receive(&mut *consumer, 10).await;
    assert_eq!(payloads(&first), batches(7, 0..10));
    assert!(first.iter().all(|delivery| !delivery.redelivered && delivery.partition == first[0].partition));
    assert!(first.is_sorted_by(|a, b| a.tag < b.tag));
    ack_all(&mut *consumer, &first).await;
    // Those that are published later come without asking again.
    publish(&*queue, 7, 10..20).await;
    let second = receive(&mut *consumer, 10).await;
    assert_eq!(payloads(&second), batches(7, 10..20));
    ack_all(&mut *consumer, &second).await;
    consumer.close().await;
    // Nothing is left for another consumer.
    publish(&*queue, 7, 20..21).await;
    let mut next = queue.consume(100).await.unwrap();
    assert_eq!(payloads(&receive(&mut *next, 1).await), batches(7, 20..21));
}

pub async fn unacknowledged_deliveries_come_again(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    publish(&*queue, 1, 0..6).await;
    let mut consumer = queue.consume(10).await.unwrap();
    let deliveries = receive(&mut *consumer, 6).await;
    // Not the first ones only.
    consumer.ack(&[deliveries[1].tag, deliveries[4].tag]).await.unwrap();
    // The broker handles acknowledgements in their sequence with the end of the connection.
    consumer.close().await;
    let mut next = queue.consume(10).await.unwrap();
    let again = receive(&mut *next, 4).await;
    assert_eq!(payloads(&again), batches(1, [0, 2, 3, 5]));
    assert!(again.iter().all(|delivery| delivery.redelivered));
}

pub async fn one_consumer_at_a_time_receives(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    let mut active = queue.consume(100).await.unwrap();
    let mut standby = queue.consume(100).await.unwrap();
    for of in 1..=10 {
        publish(&*queue, of, 0..2).await;
    }
    // All of them, so the other one has none.
    let deliveries = receive(&mut *active, 20).await;
    let partitions: BTreeSet<u16> = deliveries.iter().map(|delivery| delivery.partition).collect();
    assert_eq!(partitions.len(), usize::from(queue.partitions()), "ten sales are in all partitions");
    let mut partition_of = HashMap::new();
    for delivery in &deliveries {
        let Payload::Batch(batch) = &delivery.payload else { panic!("{delivery:?}") };
        assert_eq!(*partition_of.entry(batch.sale).or_insert(delivery.partition), delivery.partition);
    }
    drop(active);
    let taken_over = receive(&mut *standby, 20).await;
    assert!(taken_over.iter().all(|delivery| delivery.redelivered));
    ack_all(&mut *standby, &taken_over).await;
}

pub async fn prefetch_bounds_what_is_delivered(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    publish(&*queue, 1, 0..10).await;
    let mut consumer = queue.consume(3).await.unwrap();
    let first = receive(&mut *consumer, 3).await;
    assert_eq!(waiting(&*queue).await, 7);
    ack_all(&mut *consumer, &first[..2]).await;
    let second = receive(&mut *consumer, 2).await;
    assert_eq!(payloads(&second), batches(1, 3..5));
    assert_eq!(waiting(&*queue).await, 5);
    // `max` bounds a call, also if more has arrived.
    ack_all(&mut *consumer, &[&first[2..], &second].concat()).await;
    until("three more were delivered", async || waiting(&*queue).await == 2).await;
    assert_eq!(consumer.next(1).await.unwrap().len(), 1);
}

/// The consumer ends in two ways, and the next one is there before or comes after.
pub async fn marker_stays_behind_the_batches_of_a_consumer_that_is_gone(harness: &dyn Harness) {
    for (closes, has_standby) in [(false, false), (false, true), (true, false), (true, true)] {
        let ledger = unique_ledger();
        let queue = harness.connect(&ledger).await;
        let mut first = queue.consume(5).await.unwrap();
        let standby = if has_standby { Some(queue.consume(100).await.unwrap()) } else { None };
        publish(&*queue, 1, 0..20).await;
        let deliveries = receive(&mut *first, 5).await;
        first.ack(&[deliveries[1].tag]).await.unwrap();
        let more = receive(&mut *first, 1).await;
        assert_eq!(payloads(&more), batches(1, [5]));
        queue.publish_marker(Marker::Rebuild { incarnation: 9 }).await.unwrap();
        publish(&*queue, 1, 20..25).await;
        if closes {
            first.close().await;
        } else {
            drop(first);
        }
        let mut next = match standby {
            Some(standby) => standby,
            None => queue.consume(100).await.unwrap(),
        };
        let expected = 19 + usize::from(queue.partitions()) + 5;
        let arrived = receive(&mut *next, expected).await;
        let partition = deliveries[0].partition;
        let in_partition: Vec<_> =
            arrived.into_iter().filter(|d| d.partition == partition).map(|d| d.payload).collect();
        let marker = vec![Payload::Marker(Marker::Rebuild { incarnation: 9 })];
        let in_order = [batches(1, (0..20).filter(|&n| n != 1)), marker, batches(1, 20..25)].concat();
        assert_eq!(in_partition, in_order, "closes: {closes}, has_standby: {has_standby}");
    }
}

pub async fn marker_goes_through_every_partition(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    // The largest that a ledger has.
    let marker = Marker::Rebuild { incarnation: u64::MAX >> 1 };
    queue.publish_marker(marker).await.unwrap();
    let mut consumer = queue.consume(10).await.unwrap();
    let deliveries = receive(&mut *consumer, usize::from(queue.partitions())).await;
    assert!(deliveries.iter().all(|delivery| delivery.payload == Payload::Marker(marker)));
    let partitions: BTreeSet<u16> = deliveries.iter().map(|delivery| delivery.partition).collect();
    assert_eq!(partitions, (0..queue.partitions()).collect());
}

pub async fn depth_counts_what_waits(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    assert_eq!(queue.depth().await.unwrap(), Depth::default());
    for of in 1..=5 {
        publish(&*queue, of, 0..2).await;
    }
    queue.dead_letter(b"broken", "test").await.unwrap();
    assert_eq!(queue.depth().await.unwrap(), Depth { waiting: 10, dead_letters: 1 });
    let mut consumer = queue.consume(100).await.unwrap();
    let deliveries = receive(&mut *consumer, 10).await;
    assert_eq!(waiting(&*queue).await, 0);
    ack_all(&mut *consumer, &deliveries[..4]).await;
    consumer.close().await;
    until("what was not acknowledged waits again", async || waiting(&*queue).await == 6).await;
}

pub async fn undecodable_bytes_are_delivered_and_dead_lettered(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    for bytes in [&b"hello"[..], b"", &[1, 9]] {
        harness.publish_bytes(&ledger, 0, bytes).await;
    }
    let mut consumer = queue.consume(10).await.unwrap();
    let deliveries = receive(&mut *consumer, 3).await;
    let mut contents = Vec::new();
    for delivery in &deliveries {
        let Payload::Undecodable { bytes, error } = &delivery.payload else { panic!("{delivery:?}") };
        queue.dead_letter(bytes, &error.to_string()).await.unwrap();
        contents.push(bytes.clone());
    }
    assert_eq!(contents, [b"hello".to_vec(), Vec::new(), vec![1, 9]]);
    ack_all(&mut *consumer, &deliveries).await;
    consumer.close().await;
    assert_eq!(queue.depth().await.unwrap(), Depth { waiting: 0, dead_letters: 3 });

    // An operator looks at them, which leaves them where they are; retries one, and discards another.
    let letters = queue.dead_letters(2).await.unwrap();
    assert_eq!(letters.len(), 2);
    let all = queue.dead_letters(10).await.unwrap();
    assert_eq!(all[..2], letters, "they are still there, in their order");
    assert!(all.iter().all(|letter| !letter.reason.is_empty() && letter.id == DeadLetterId::of(&letter.bytes)));
    assert!(queue.retry_dead_letter(all[1].id).await.unwrap());
    assert!(queue.discard_dead_letter(all[0].id).await.unwrap());
    assert!(!queue.discard_dead_letter(all[0].id).await.unwrap(), "it is gone");
    assert_eq!(queue.dead_letters(10).await.unwrap(), all[2..]);
    let mut consumer = queue.consume(10).await.unwrap();
    let retried = receive(&mut *consumer, 1).await.remove(0);
    assert!(matches!(&retried.payload, Payload::Undecodable { bytes, .. } if *bytes == all[1].bytes), "{retried:?}");
    consumer.ack(&[retried.tag]).await.unwrap();
}

pub async fn installations_do_not_meet(harness: &dyn Harness) {
    let (here, there) = (unique_ledger(), unique_ledger());
    let (one, other) = (harness.connect(&here).await, harness.connect(&there).await);
    publish(&*one, 1, 0..3).await;
    publish(&*other, 1, 10..13).await;
    assert_eq!((waiting(&*one).await, waiting(&*other).await), (3, 3));
    let mut consumer = one.consume(10).await.unwrap();
    let deliveries = receive(&mut *consumer, 3).await;
    assert_eq!(payloads(&deliveries), batches(1, 0..3));
    ack_all(&mut *consumer, &deliveries).await;
    assert_eq!((waiting(&*one).await, waiting(&*other).await), (0, 3));
}

pub async fn concurrent_publishers_get_their_own_confirms(harness: &dyn Harness) {
    const PUBLISHERS: i64 = 50;
    const EACH: i64 = 10;
    let ledger = unique_ledger();
    let queue: Arc<dyn OrderQueue> = harness.connect(&ledger).await.into();
    let tasks: Vec<_> = (1..=PUBLISHERS)
        .map(|of| {
            let queue = queue.clone();
            tokio::spawn(async move { publish(&*queue, of, 0..EACH).await })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let mut consumer = queue.consume(1000).await.unwrap();
    let total = usize::try_from(PUBLISHERS * EACH).unwrap();
    let deliveries = receive(&mut *consumer, total).await;
    let mut of_sale: HashMap<SaleId, Vec<i64>> = HashMap::new();
    for delivery in &deliveries {
        let Payload::Batch(batch) = &delivery.payload else { panic!("{delivery:?}") };
        of_sale.entry(batch.sale).or_default().push(batch.epoch.0);
    }
    assert_eq!(of_sale.len(), usize::try_from(PUBLISHERS).unwrap());
    assert!(of_sale.values().all(|numbers| numbers.iter().copied().eq(0..EACH)), "each sale in its order, once");
}

pub async fn message_that_no_queue_takes_is_not_confirmed(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    publish(&*queue, 1, 0..1).await;
    for partition in 0..queue.partitions() {
        harness.delete_partition(&ledger, partition).await;
    }
    let error = queue.publish(&batch(1, 1)).await.unwrap_err();
    assert_eq!(error, QueueError::Unroutable);
    assert!(!error.may_be_queued());
    // What is missing is declared again.
    until("a message is confirmed", async || queue.publish(&batch(1, 2)).await.is_ok()).await;
    until("the queue is ready", async || queue.is_ready()).await;
    let mut consumer = queue.consume(10).await.unwrap();
    assert_eq!(payloads(&receive(&mut *consumer, 1).await), batches(1, [2]));
    consumer.close().await;
    for partition in 0..queue.partitions() {
        harness.delete_partition(&ledger, partition).await;
    }
    assert!(queue.publish_marker(Marker::Rebuild { incarnation: 1 }).await.is_err());
    until("a marker is confirmed", async || queue.publish_marker(Marker::Rebuild { incarnation: 1 }).await.is_ok())
        .await;
}

pub async fn waiting_for_a_delivery_can_be_cancelled(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    let mut consumer = queue.consume(100).await.unwrap();
    let published = AtomicBool::new(false);
    let mut received = Vec::new();
    let publishing = async {
        publish(&*queue, 1, 0..50).await;
        published.store(true, Ordering::Relaxed);
    };
    let receiving = async {
        let started = Instant::now();
        while received.len() < 50 {
            assert!(started.elapsed() < TIMEOUT, "{} of 50 arrived", received.len());
            if let Ok(deliveries) = timeout(Duration::from_millis(1), consumer.next(3)).await {
                received.extend(deliveries.unwrap());
            }
        }
    };
    tokio::join!(publishing, receiving);
    assert!(published.into_inner());
    assert_eq!(payloads(&received), batches(1, 0..50));
}

pub async fn closed_queue_sends_nothing(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    publish(&*queue, 1, 0..1).await;
    queue.close().await;
    assert!(!queue.is_ready());
    let error = queue.publish(&batch(1, 1)).await.unwrap_err();
    assert!(matches!(error, QueueError::NotSent(_)), "{error}");
    assert!(!error.may_be_queued());
    let other = harness.connect(&ledger).await;
    assert_eq!(waiting(&*other).await, 1);
}

pub async fn sizes_are_bounded(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue = harness.connect(&ledger).await;
    let full = Batch { orders: vec![batch(1, 0).orders[0]; MAX_ORDERS], ..batch(1, 0) };
    let (mut empty, mut over) = (full.clone(), full.clone());
    empty.orders.clear();
    over.orders.push(over.orders[0]);
    for refused in [empty, over] {
        let size = refused.orders.len();
        assert_eq!(queue.publish(&refused).await, Err(QueueError::InvalidSize(size)));
    }
    queue.publish(&full).await.unwrap();
    let mut consumer = queue.consume(1).await.unwrap();
    assert_eq!(payloads(&receive(&mut *consumer, 1).await), [Payload::Batch(full)]);
}

/// Publishers and a consumer at work while the broker is killed.
pub async fn confirmed_messages_survive_a_crash_of_the_broker(harness: &dyn Harness) {
    let ledger = unique_ledger();
    let queue: Arc<dyn OrderQueue> = harness.connect(&ledger).await.into();
    let mut consumer = queue.consume(20).await.unwrap();
    let confirmed = Arc::new(Mutex::new(BTreeSet::new()));
    let stop = Arc::new(AtomicBool::new(false));
    let publishers: Vec<_> = (1..=8)
        .map(|of| {
            let (queue, confirmed, stop) = (queue.clone(), confirmed.clone(), stop.clone());
            tokio::spawn(async move {
                let mut outcomes = (0, 0);
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    match queue.publish(&batch(of, number)).await {
                        Ok(()) => {
                            confirmed.lock().insert((of, number));
                            outcomes.0 += 1;
                        }
                        Err(QueueError::NotSent(_)) => break,
                        Err(QueueError::Unconfirmed(_)) => outcomes.1 += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
                outcomes
            })
        })
        .collect();
    until("a few hundred messages are confirmed", async || confirmed.lock().len() > 300).await;
    let unacked = receive(&mut *consumer, 20).await;
    harness.kill();
    // While the broker is away, every call ends in time.
    until("the queue is not ready", async || !queue.is_ready()).await;
    let error = timeout(TIMEOUT, queue.publish(&batch(99, 0))).await.unwrap().unwrap_err();
    assert!(matches!(error, QueueError::NotSent(_)), "{error}");
    stop.store(true, Ordering::Relaxed);
    for publisher in publishers {
        let (confirmed, _unconfirmed) = timeout(TIMEOUT, publisher).await.unwrap().unwrap();
        assert!(confirmed > 0);
    }
    harness.restart();
    until("the queue is ready", async || queue.is_ready()).await;
    queue.publish(&batch(99, 1)).await.unwrap();
    confirmed.lock().insert((99, 1));

    // The consumer hears of the crash once, and then gets everything again that it had not acknowledged.
    let mut missing = confirmed.lock().clone();
    let mut disconnected = 0;
    while !missing.is_empty() {
        let next = timeout(TIMEOUT, consumer.next(1000)).await;
        match next.unwrap_or_else(|_| panic!("{} confirmed messages are lost", missing.len())) {
            Err(QueueError::Disconnected(_)) => disconnected += 1,
            Err(error) => panic!("{error}"),
            // What had arrived before the crash was not acknowledged, so it comes again.
            Ok(_) if disconnected == 0 => {}
            Ok(deliveries) => {
                for delivery in &deliveries {
                    let Payload::Batch(batch) = &delivery.payload else { panic!("{delivery:?}") };
                    missing.remove(&(batch.sale.get(), batch.epoch.0));
                }
                ack_all(&mut *consumer, &deliveries).await;
            }
        }
    }
    assert_eq!(disconnected, 1);
    assert_eq!(unacked.len(), 20);
}

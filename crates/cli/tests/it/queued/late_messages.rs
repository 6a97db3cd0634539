//! With RabbitMQ: messages of sales that the gate or the ledger does not have any more.

use std::time::Duration;

use stampede_core::ports::Admitted;
use stampede_core::{Clock as _, Epoch, OrderId, SaleId, SystemClock, UserId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_queue::message::{decode, encode_batch};
use stampede_queue::{Batch, Payload};
use stampede_testkit::{redis, until};

use super::rabbitmq::{BROKER, channel, consumers, publish, rows, start, take_all, without_consumer};
use super::runs::dead_letters;
use super::stories::dead_letters_command;
use super::stuck::accept;
use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, read_only};

const HOUR: Duration = Duration::from_secs(3600);

fn has_keys(nodes: &Nodes, sale: SaleId) -> bool {
    let keys = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:*")]).unwrap();
    !keys.trim().is_empty()
}

/// A message is delivered once more after its order was cancelled and its sale has left the gate: there is no mark to release, so it is done.
async fn late_message_of_a_retired_sale_is_done(kind: Kind) {
    let mut nodes = start(kind, 1, &BROKER);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, std::slice::from_ref(&buyer)).await;
    let (_connection, channel, exchange) = channel(&nodes, &BROKER).await;
    let taken = take_all(&channel, &exchange).await;
    for (partition, bytes) in &taken {
        publish(&channel, &exchange, &partition.to_string(), bytes).await;
    }
    let recording = consumers(&nodes, 1, &BROKER);
    until("the order is recorded", async || rows(&nodes, sale).await == 1).await;
    let order = history.ended()[0].order.unwrap();
    let cancelled = history.cancel(&mut nodes.shops[0].client().await, sale, &buyer, order).await;
    assert_eq!(cancelled.response, Response::Cancelled);
    recording.stop();

    // The sale was over more than a day ago. The next start removes it from Redis.
    let (begin, end) = (SystemClock.now().minus(27 * HOUR), SystemClock.now().minus(25 * HOUR));
    let over = format!("UPDATE sale SET begin_at = {}, end_at = {} WHERE id = {sale}", begin.ms(), end.ms());
    execute(kind, &nodes.storages[0], &over).await;
    assert!(nodes.shops.remove(0).stop().success());
    nodes.shops.push(Shop::run(without_consumer(BROKER.port())(0, nodes.node(&nodes.storages[0]))));
    until("the sale has left Redis", async || !has_keys(&nodes, sale)).await;

    let is_of_sale = |bytes: &[u8]| matches!(decode(bytes.to_vec()), Payload::Batch(batch) if batch.sale == sale);
    let (partition, bytes) = taken.iter().find(|(_, bytes)| is_of_sale(bytes)).unwrap();
    publish(&channel, &exchange, &partition.to_string(), bytes).await;
    let recording = consumers(&nodes, 1, &BROKER);
    let consumer = &recording.shops[0];
    until("it is delivered", async || consumer.metric("stampede_queue_consumed_orders_total").await >= 1.0).await;
    assert_eq!(consumer.metric("stampede_queue_parked_total").await, 0.0);
    // It finishes what it has begun, and acknowledges it.
    recording.stop();
    assert_eq!(take_all(&channel, &exchange).await, Vec::new(), "nothing is delivered again");
    let ledger = read_only(&nodes.storages[0]).await;
    assert!(ledger.parked_sales().await.unwrap().is_empty());
    let orders = ledger.inspect(sale).await.unwrap().unwrap().orders;
    ledger.close().await;
    assert_eq!(orders.iter().map(|row| (row.order.id, row.live)).collect::<Vec<_>>(), [(order, false)]);
}

/// The database was restored to a time before a sale was created, of which a message is in the queue. It becomes a dead letter, also when
/// it is retried, and holds up no other.
async fn message_of_a_missing_sale_becomes_a_dead_letter(kind: Kind) {
    let nodes = start(kind, 1, &BROKER);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    let (_connection, channel, exchange) = channel(&nodes, &BROKER).await;
    let missing = SaleId::new(sale.get() - 1).unwrap();
    let (order, user) = (OrderId::new(7).unwrap(), UserId::new(8).unwrap());
    let orders = vec![Admitted { order, user, seq: 1, at: SystemClock.now() }];
    let message = encode_batch(&Batch { sale: missing, epoch: Epoch(1), orders }).unwrap();
    publish(&channel, &exchange, "0", &message).await;
    accept(&nodes, &history, sale, &buyers).await;

    let recording = consumers(&nodes, 1, &BROKER);
    let consumer = &recording.shops[0];
    let stored = async || consumer.metric("stampede_queue_dead_letters_total").await;
    until("the message is a dead letter", async || stored().await == 1.0).await;
    let letters = dead_letters(&nodes.shops[0]).await;
    assert_eq!(letters.len(), 1, "{letters:?}");
    let (done, text) = dead_letters_command(&nodes.shops[0], &["show", &letters[0]]);
    assert!(done && text.contains(&format!("the database has no sale {missing}")), "{text}");
    assert!(dead_letters_command(&nodes.shops[0], &["retry", &letters[0]]).0);
    until("it is a dead letter again", async || stored().await == 2.0).await;
    assert_eq!(dead_letters(&nodes.shops[0]).await, letters);
    until("the others are recorded", async || rows(&nodes, sale).await == 2).await;
    assert_eq!(consumer.metric("stampede_queue_parked_total").await, 0.0);
    recording.stop();
    assert_eq!(take_all(&channel, &exchange).await, Vec::new(), "nothing is delivered again");
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

on_each_database!(@module on_postgres, Postgres, late_message_of_a_retired_sale_is_done);
on_each_database!(@module on_mariadb, MariaDb, message_of_a_missing_sale_becomes_a_dead_letter);

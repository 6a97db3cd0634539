//! The database rejects accepted orders while everything else works: they go into quarantine, and hold up no other order.

use std::process::Command;

use serde_json::{Value, json};
use stampede_core::{SaleId, UserId};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::rabbitmq::{BROKER, rows};
use super::runs::{Queue, audit, dead_letters};
use super::stuck::accept;
use super::{Consumers, outbox};
use crate::quarantine::{
    accept_orders_again, buy, execute, quarantine, quarantine_command, quarantined_in, reject_orders_of,
};
use crate::shared::{Nodes, entries};
use crate::shop::{Buyer, Kind, TOKEN};

/// Orders that are rejected: as many messages as a consumer receives ahead, so that nothing moves while they are neither acknowledged
/// nor parked.
const REJECTED: usize = 4;

/// All sales are in one partition. With RabbitMQ an order is tried for long enough that its message is parked before that.
fn settings(queue: Queue<'_>, mut command: Command) -> Command {
    let quarantine_after_ms = match queue {
        Queue::Stream => "1000",
        Queue::RabbitMq(_) => "8000",
    };
    command.env("STAMPEDE__RABBITMQ__PARTITIONS", "1").env("STAMPEDE__RABBITMQ__PREFETCH", REJECTED.to_string());
    command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", quarantine_after_ms);
    command
}

/// A node that serves buyers and records nothing.
fn start(queue: Queue<'_>, kind: Kind) -> Nodes {
    queue.start_with(kind, 1, |command| {
        let mut command = settings(queue, command);
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command
    })
}

/// The row of an order in the ledger: its status, whether it is live, and why it was rejected.
async fn row(nodes: &Nodes, sale: SaleId, order: &str) -> Value {
    let path = format!("/admin/v1/sales/{sale}/orders?limit=100");
    let page = nodes.shops[0].client().await.get(&path, TOKEN).await.unwrap().json();
    let row = page["orders"].as_array().unwrap().iter().find(|row| row["id"] == order).cloned();
    row.map_or(Value::Null, |row| json!([row["status"], row["live"], row["reason"]]))
}

/// Other orders of the same sale and of another one are recorded meanwhile. Two of the rejected orders are recorded once the cause is
/// removed and an operator retries them; two are discarded, and their stock is sold again.
async fn rejected_orders_hold_up_no_other(queue: Queue<'_>, kind: Kind) {
    let nodes = start(queue, kind);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 10).await;
    let (rejected, others) = buyers.split_at(REJECTED);
    let (sale, other) = (nodes.create_sale(6).await, nodes.create_sale(2).await);
    let (history, of_other) = (Recorder::default(), Recorder::default());
    let users: Vec<UserId> = rejected.iter().map(|buyer| buyer.id).collect();
    execute(kind, &nodes.storages[0], &reject_orders_of(kind, &users)).await;
    accept(&nodes, &history, sale, &rejected[..2]).await;
    let retried: Vec<String> = history.ended().iter().map(|attempt| attempt.order.unwrap().to_string()).collect();
    // These are in no history, because only an operator may reject an order that was confirmed.
    let mut discarded = Vec::new();
    for buyer in &rejected[2..] {
        let accepted = buy(shop, sale, buyer).await;
        assert_eq!(accepted.status, 202, "{:?}", accepted.body);
        discarded.push(accepted.text("id"));
    }
    accept(&nodes, &history, sale, &others[..2]).await;
    accept(&nodes, &of_other, other, &others[..2]).await;
    let consumers = Consumers::start_with(&nodes, 1, |command| settings(queue, queue.node(command)));
    let consumer = &consumers.shops[0];
    until("the other orders are recorded", async || rows(&nodes, sale).await == 2 && rows(&nodes, other).await == 2)
        .await;
    if matches!(queue, Queue::RabbitMq(_)) {
        assert!(consumer.metric("stampede_queue_parked_total").await >= REJECTED as f64, "they held the partition");
    }

    until("all of them are in quarantine", async || quarantine(shop).await.len() == REJECTED).await;
    assert_eq!(quarantined_in(shop, sale).await, Some(REJECTED as u64));
    assert_eq!(quarantined_in(shop, other).await, Some(0));
    until("the metric shows them", async || shop.metric("stampede_quarantined_orders").await == REJECTED as f64).await;
    let live = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:live")]).unwrap();
    let marks = |buyers: &[Buyer]| {
        let mark =
            |buyer: &Buyer| redis::ask(nodes.redis.port(), &["hget", live.trim(), &buyer.id.to_string()]).unwrap();
        buyers.iter().filter(|buyer| !mark(buyer).trim().is_empty()).count()
    };
    assert_eq!(marks(rejected), REJECTED);
    assert_eq!(buy(shop, sale, &others[2]).await.text("code"), "sold_out", "their stock is taken");
    assert_eq!(dead_letters(shop).await, Vec::<String>::new());

    execute(kind, &nodes.storages[0], accept_orders_again(kind)).await;
    for (order, buyer) in retried.iter().zip(rejected) {
        let (done, text) = quarantine_command(shop, &["retry", order]);
        assert!(done && text.contains("recorded"), "{text}");
        assert_eq!(row(&nodes, sale, order).await, json!(["unpaid", true, null]));
        let mine = buy(shop, sale, buyer).await;
        assert_eq!((mine.status.as_u16(), &mine.text("id")), (200, order));
        assert_eq!(audit(shop, &format!("order {order}")).await, [("retry_quarantined".to_owned(), "done".to_owned())]);
    }
    for order in &discarded {
        let (done, text) = quarantine_command(shop, &["discard", order]);
        assert!(done && text.contains("rejected"), "{text}");
        assert_eq!(row(&nodes, sale, order).await, json!(["rejected", false, "discarded"]));
        assert_eq!(
            audit(shop, &format!("order {order}")).await,
            [("discard_quarantined".to_owned(), "done".to_owned())]
        );
    }
    until("the marks are released", async || marks(&rejected[2..]) == 0).await;
    assert_eq!(quarantined_in(shop, sale).await, Some(0));
    accept(&nodes, &history, sale, &others[2..4]).await;
    assert_eq!(buy(shop, sale, &others[4]).await.text("code"), "sold_out", "their stock is sold again");

    until("everything is recorded", async || rows(&nodes, sale).await == 6 + discarded.len()).await;
    // What was read or parked before the operator acted changes nothing.
    until("the outbox is empty", async || entries(&nodes.redis, &outbox(sale)) == 0).await;
    if matches!(queue, Queue::RabbitMq(_)) {
        let is_empty = async || consumer.metric("stampede_queue_parked_messages").await == 0.0;
        until("no message is parked", is_empty).await;
    }
    assert_eq!(nodes.verify(&history, sale).await, 6);
    assert_eq!(nodes.verify(&of_other, other).await, 2);
    assert_eq!(dead_letters(shop).await, Vec::<String>::new());
    consumers.stop();
}

async fn rejected_orders_of_a_stream_hold_up_no_other(kind: Kind) {
    rejected_orders_hold_up_no_other(Queue::Stream, kind).await;
}

async fn rejected_orders_of_a_broker_hold_up_no_other(kind: Kind) {
    rejected_orders_hold_up_no_other(Queue::RabbitMq(&BROKER), kind).await;
}

on_each_database!(@module on_postgres, Postgres, rejected_orders_of_a_stream_hold_up_no_other);
on_each_database!(@module on_mariadb, MariaDb, rejected_orders_of_a_broker_hold_up_no_other);

//! `stampede check` on a running system while accepted orders wait in the queue.

use std::fs::File;

use serde_json::Value;
use sqlx::Connection as _;
use stampede_core::SaleId;
use stampede_proof::history::write;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{rabbitmq, redis, until};

use super::rabbitmq::{BROKER, rows};
use super::runs::Queue;
use super::stuck::{accept, lock_sale, one_partition};
use crate::check::{check_with, failed, target};
use crate::proof::parse_json;
use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Kind, TOKEN};

/// Checks one sale through the first node, with further arguments. Returns the invariants that are violated, and why others are not
/// checkable.
async fn check(nodes: &Nodes, sale: SaleId, more: &[String]) -> (Vec<u64>, Vec<(u64, String)>) {
    let of_sale = ["--sale".to_owned(), sale.to_string()];
    let output =
        check_with(target(&nodes.shops[0]).into_iter().chain(of_sale).chain(more.iter().cloned()).collect()).await;
    let checks = parse_json(&output)["checks"].as_array().unwrap().clone();
    let why = |check: &Value| Some((check["invariant"].as_u64()?, check["why"].as_str()?.to_owned()));
    (failed(&output), checks.iter().filter_map(why).collect())
}

/// Nobody records the orders for longer than a check takes: they are on their way. An order whose row was deleted by hand is found.
async fn waiting_orders_are_no_violation(queue: Queue<'_>, kind: Kind) {
    let nodes = queue.start_with(kind, 1, |mut command| {
        // The order that is deleted is not recorded from its mark.
        command.env("STAMPEDE__QUEUE__CONSUME", "false").env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 13).await;
    let sale = nodes.create_sale(20).await;
    let history = Recorder::default();
    let consumers = queue.consumers(&nodes, 1);
    accept(&nodes, &history, sale, &buyers[..3]).await;
    until("they are recorded", async || queue.is_idle(&nodes, sale, 3).await).await;
    assert_eq!(rows(&nodes, sale).await, 3);
    let delete = format!("DELETE FROM orders WHERE id = {}", history.ended()[0].order.unwrap());
    consumers.stop();

    accept(&nodes, &history, sale, &buyers[3..]).await;
    let file = nodes.storages[0].path().join("history");
    write(&history.ended(), File::create(&file).unwrap()).unwrap();
    let history_file = ["--history".to_owned(), file.display().to_string()];
    let everything = [&["--database".to_owned(), nodes.storages[0].url()][..], &history_file].concat();
    for more in [&history_file[..], &everything] {
        let (violated, unchecked) = check(&nodes, sale, more).await;
        assert_eq!(violated, [0; 0], "{unchecked:?}");
        let on_their_way = unchecked.iter().filter(|(_, why)| why.contains("10 orders are on their way"));
        assert_eq!(on_their_way.map(|(invariant, _)| *invariant).collect::<Vec<_>>(), [1, 4], "{unchecked:?}");
        assert!(unchecked.iter().any(|(invariant, why)| *invariant == 11 && why.contains("on their way")));
    }
    if matches!(queue, Queue::Stream) {
        execute(kind, &nodes.storages[0], &delete).await;
        let (violated, unchecked) = check(&nodes, sale, &history_file).await;
        assert_eq!(violated, [1, 4], "11 orders have no row, and 10 are in the outbox: {unchecked:?}");
    }

    let consumers = queue.consumers(&nodes, 1);
    let recorded = if matches!(queue, Queue::Stream) { 12 } else { 13 };
    until("all are recorded", async || rows(&nodes, sale).await == recorded).await;
    consumers.stop();
    if let Queue::RabbitMq(_) = queue {
        execute(kind, &nodes.storages[0], &delete).await;
    }
    let (violated, unchecked) = check(&nodes, sale, &history_file).await;
    assert_eq!(violated, [1, 4], "{unchecked:?}");
    assert!(!unchecked.iter().any(|(_, why)| why.contains("on their way")), "{unchecked:?}");
}

/// The broker is away: what it holds is not known, which is neither a violation nor an empty queue.
async fn queue_that_cannot_be_read_is_not_checkable(kind: Kind) {
    let broker = rabbitmq::start().unwrap();
    let nodes = Queue::RabbitMq(&broker).start(kind, 1);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 3).await;
    let sale = nodes.create_sale(5).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, &buyers).await;
    broker.kill().unwrap();
    let path = format!("/admin/v1/sales/{sale}/gate");
    let gate = async || shop.client().await.get(&path, TOKEN).await.unwrap().json();
    until("the broker is missed", async || gate().await["queue_error"] == "RabbitMQ cannot be used").await;
    assert_eq!(gate().await["queue"], Value::Null);
    let (violated, unchecked) = check(&nodes, sale, &[]).await;
    assert_eq!(violated, [0; 0], "{unchecked:?}");
    let because_of = |reason: &str| {
        let found = unchecked.iter().filter(|(_, why)| why.contains(reason));
        found.map(|(invariant, _)| *invariant).collect::<Vec<_>>()
    };
    assert_eq!(because_of("3 orders without a row may be in the queue, which cannot be read"), [1], "{unchecked:?}");
    assert_eq!(because_of("the queue cannot be read"), [11], "{unchecked:?}");
}

/// The messages of a sale are parked while another client of the database holds its row locked: their orders are on their way.
async fn parked_orders_are_no_violation(kind: Kind) {
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 1, |_, command| one_partition(command));
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 3).await;
    let sale = nodes.create_sale(5).await;
    let history = Recorder::default();
    let lock = lock_sale(&nodes, sale).await;
    accept(&nodes, &history, sale, &buyers).await;
    until("the messages are parked", async || shop.metric("stampede_queue_parked_messages").await == 3.0).await;
    let path = format!("/admin/v1/sales/{sale}/gate");
    let gate = shop.client().await.get(&path, TOKEN).await.unwrap().json();
    assert_eq!(gate["queue"], 3, "{gate}");
    let file = nodes.storages[0].path().join("history");
    write(&history.ended(), File::create(&file).unwrap()).unwrap();
    let history_file = ["--history".to_owned(), file.display().to_string()];
    let (violated, unchecked) = check(&nodes, sale, &history_file).await;
    assert_eq!(violated, [0; 0], "{unchecked:?}");
    let on_their_way = unchecked.iter().filter(|(_, why)| why.contains("3 orders are on their way"));
    assert_eq!(on_their_way.map(|(invariant, _)| *invariant).collect::<Vec<_>>(), [1, 4], "{unchecked:?}");

    lock.close().await.unwrap();
    until("all are recorded", async || rows(&nodes, sale).await == 3).await;
    until("no message is parked", async || shop.metric("stampede_queue_parked_messages").await == 0.0).await;
    let (violated, unchecked) = check(&nodes, sale, &history_file).await;
    assert_eq!(violated, [0; 0], "{unchecked:?}");
    assert!(!unchecked.iter().any(|(_, why)| why.contains("on their way")), "{unchecked:?}");
}

async fn orders_that_wait_in_a_stream_are_no_violation(kind: Kind) {
    waiting_orders_are_no_violation(Queue::Stream, kind).await;
}

async fn orders_that_wait_in_a_broker_are_no_violation(kind: Kind) {
    waiting_orders_are_no_violation(Queue::RabbitMq(&BROKER), kind).await;
}

on_each_database!(
    @module on_postgres, Postgres,
    orders_that_wait_in_a_stream_are_no_violation,
    queue_that_cannot_be_read_is_not_checkable
);
on_each_database!(
    @module on_mariadb, MariaDb,
    orders_that_wait_in_a_broker_are_no_violation,
    parked_orders_are_no_violation
);

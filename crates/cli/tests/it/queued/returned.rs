//! With RabbitMQ: an operator has deleted a queue or a binding, so that the broker returns messages, or has limited its queues, so that it
//! refuses them.

use std::sync::Arc;

use lapin::Channel;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{rabbitmq, until};

use super::rabbitmq::{BROKER, PARTITIONS, channel, consumers, rows, start};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, TOKEN};

fn queues(exchange: &str) -> Vec<String> {
    (0..PARTITIONS).map(|partition| format!("{exchange}.orders.{partition}")).collect()
}

async fn delete(channel: &Channel, queue: &str) {
    channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
}

/// Buys until an order is accepted. Returns whether one before was not.
async fn buy(nodes: &Nodes, history: &Recorder, sale: SaleId, buyer: &Buyer) -> bool {
    let mut refused = false;
    until("an order is accepted", async || {
        let response = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await.response;
        refused |= response == Response::Unknown;
        response == Response::Pending
    })
    .await;
    refused
}

async fn readiness(nodes: &Nodes) -> (u16, String) {
    let reply = nodes.shops[0].client().await.get("/readyz", "").await.unwrap();
    (reply.status.as_u16(), String::from_utf8(reply.body.to_vec()).unwrap())
}

/// What is missing is declared again as soon as a message comes back, also without a consumer.
async fn deleted_queues_and_bindings_are_declared_again(kind: Kind) {
    let nodes = start(kind, 1, &BROKER);
    let buyers = nodes.shops[0].log_in(0, 3).await;
    let sale = nodes.create_sale(3).await;
    let history = Arc::new(Recorder::default());
    let (_connection, channel, exchange) = channel(&nodes, &BROKER).await;
    assert!(!buy(&nodes, &history, sale, &buyers[0]).await);
    let recording = consumers(&nodes, 1, &BROKER);
    until("the order is recorded", async || rows(&nodes, sale).await == 1).await;
    // A consumer does not notice that a binding is missing.
    for (partition, queue) in queues(&exchange).iter().enumerate() {
        let (queue, key) = (queue.as_str().into(), partition.to_string().into());
        channel.queue_unbind(queue, exchange.as_str().into(), key, FieldTable::default()).await.unwrap();
    }
    assert!(buy(&nodes, &history, sale, &buyers[1]).await, "the first message was returned");
    until("the order is recorded", async || rows(&nodes, sale).await == 2).await;
    recording.stop();
    for queue in queues(&exchange) {
        delete(&channel, &queue).await;
    }
    assert!(buy(&nodes, &history, sale, &buyers[2]).await, "the first message was returned");
    assert!(nodes.shops[0].metric("stampede_queue_returned_total").await >= 2.0);
    until("the node is ready", async || readiness(&nodes).await.0 == 200).await;
    let _consumers = consumers(&nodes, 1, &BROKER);
    assert_eq!(nodes.verify(&history, sale).await, 3);
}

/// A queue that was declared otherwise takes no messages: the node says why it is not ready, and operators get an alert.
async fn queue_that_was_declared_otherwise_is_reported(kind: Kind) {
    let nodes = start(kind, 1, &BROKER);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Arc::new(Recorder::default());
    let (_connection, channel, exchange) = channel(&nodes, &BROKER).await;
    assert!(!buy(&nodes, &history, sale, &buyers[0]).await);
    // Recorded before its queue is deleted.
    let recording = consumers(&nodes, 1, &BROKER);
    until("the order is recorded", async || rows(&nodes, sale).await == 1).await;
    recording.stop();
    for queue in queues(&exchange) {
        delete(&channel, &queue).await;
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await.unwrap();
    }
    let attempt = history.buy(&mut nodes.shops[0].client().await, sale, &buyers[1]).await;
    assert_eq!(attempt.response, Response::Unknown);
    until("the node says why it is not ready", async || {
        let (status, body) = readiness(&nodes).await;
        status == 503
            && body.contains("RabbitMQ cannot be used: a queue or an exchange exists and was declared otherwise")
    })
    .await;
    until("operators are alerted", async || {
        let metrics = nodes.shops[0].client().await.get("/metrics", TOKEN).await.unwrap();
        String::from_utf8_lossy(&metrics.body).contains("stampede_alerts_total{alert=\"broker_unusable\"} 1")
    })
    .await;
    assert_eq!(readiness(&nodes).await.0, 503, "as long as it lasts");
    for queue in queues(&exchange) {
        delete(&channel, &queue).await;
    }
    until("the node is ready", async || readiness(&nodes).await.0 == 200).await;
    until("the order is accepted", async || {
        let bought = history.buy(&mut nodes.shops[0].client().await, sale, &buyers[1]).await;
        matches!(bought.response, Response::Pending | Response::Already)
    })
    .await;
    let _consumers = consumers(&nodes, 1, &BROKER);
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

/// A policy of an operator lets the queues take no messages: the node is not ready, operators get an alert, and nothing is lost.
async fn queues_that_refuse_messages_are_reported(kind: Kind) {
    let broker = rabbitmq::start().unwrap();
    let nodes = start(kind, 1, &broker);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Arc::new(Recorder::default());
    assert!(!buy(&nodes, &history, sale, &buyers[0]).await);
    // Recorded before its queue is limited.
    let recording = consumers(&nodes, 1, &broker);
    until("the order is recorded", async || rows(&nodes, sale).await == 1).await;
    recording.stop();
    let limits = r#"{"max-length": 0, "overflow": "reject-publish"}"#;
    rabbitmq::control(&broker, &["set_policy", "--apply-to", "queues", "full", ".*", limits]).unwrap();
    until("the node says why it is not ready", async || {
        let attempt = history.buy(&mut nodes.shops[0].client().await, sale, &buyers[1]).await;
        assert_ne!(attempt.response, Response::SoldOut);
        let (status, body) = readiness(&nodes).await;
        status == 503 && body.contains("RabbitMQ cannot be used: it refuses messages")
    })
    .await;
    // The node goes on publishing what is left in the outbox, and nothing else is published.
    until("operators are alerted", async || {
        nodes.shops[0].has_metric("stampede_alerts_total{alert=\"broker_unusable\"} 1").await
    })
    .await;
    assert_eq!(readiness(&nodes).await.0, 503, "as long as it lasts");
    rabbitmq::control(&broker, &["clear_policy", "full"]).unwrap();
    until("the node is ready", async || readiness(&nodes).await.0 == 200).await;
    until("the order is accepted", async || {
        let bought = history.buy(&mut nodes.shops[0].client().await, sale, &buyers[1]).await;
        matches!(bought.response, Response::Pending | Response::Already)
    })
    .await;
    let _consumers = consumers(&nodes, 1, &broker);
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

on_each_database!(
    @module on_postgres, Postgres,
    deleted_queues_and_bindings_are_declared_again,
    queue_that_was_declared_otherwise_is_reported,
    queues_that_refuse_messages_are_reported
);

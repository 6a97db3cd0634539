//! Another tier is started while accepted orders wait in the queue.

use std::process::Command;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::until;

use super::rabbitmq::{BROKER, rows};
use super::runs::Queue;
use super::stuck::accept;
use crate::shared::refused;
use crate::shop::{Kind, Shop, Storage, command, verify};

/// The tier `solo` reads no queue, so it is refused until a node of the tier `shared` has recorded what was accepted.
async fn accepted_orders_survive_a_change_of_the_tier(queue: Queue<'_>, kind: Kind) {
    let mut nodes = queue.start(kind, 1);
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let sale = nodes.create_sale(4).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, &buyers[..3]).await;
    assert_eq!(rows(&nodes, sale).await, 0);
    assert!(nodes.shops.remove(0).stop().success());

    let error = refused(command(&nodes.storages[0]));
    assert!(error.contains("the queue of the tier queued") && error.contains("queue.abandon"), "{error}");
    let shared = Shop::run(nodes.node(&nodes.storages[0]));
    nodes.shops.push(shared);
    nodes.wait_until_ready().await;
    nodes.wait_until_open(sale).await;
    assert_eq!(rows(&nodes, sale).await, 3, "the first rebuild has recorded them");
    assert!(nodes.shops.remove(0).stop().success());

    let solo = Shop::open(&nodes.storages[0]);
    for buyer in &buyers[..3] {
        let bought = history.buy(&mut solo.client().await, sale, buyer).await;
        assert_eq!(bought.response, Response::Already);
    }
    assert_eq!(history.buy(&mut solo.client().await, sale, &buyers[3]).await.response, Response::Created);
    assert_eq!(verify(&history, &nodes.storages[0], &[&solo], sale).await, 4);
    assert!(solo.stop().success());
}

async fn orders_in_a_stream_survive_a_change_of_the_tier(kind: Kind) {
    accepted_orders_survive_a_change_of_the_tier(Queue::Stream, kind).await;
}

async fn orders_in_a_broker_survive_a_change_of_the_tier(kind: Kind) {
    accepted_orders_survive_a_change_of_the_tier(Queue::RabbitMq(&BROKER), kind).await;
}

/// Both tiers with a queue read the same one, so nothing has to be recorded before the other one is started.
async fn orders_in_a_stream_survive_a_change_to_shielded(kind: Kind) {
    let mut nodes = Queue::Stream.start(kind, 1);
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let sale = nodes.create_sale(4).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, &buyers[..3]).await;
    assert_eq!(rows(&nodes, sale).await, 0);
    assert!(nodes.shops.remove(0).stop().success());

    let mut shielded = nodes.node(&nodes.storages[0]);
    shielded.env("STAMPEDE__TIER", "shielded");
    nodes.shops.push(Shop::run(shielded));
    nodes.wait_until_ready().await;
    nodes.wait_until_open(sale).await;
    for buyer in &buyers {
        let bought = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await;
        assert!([Response::Already, Response::Pending].contains(&bought.response), "{bought:?}");
    }
    assert_eq!(nodes.verify(&history, sale).await, 4);
    assert!(nodes.shops.remove(0).stop().success());
}

/// An operator may state that nothing waits in the queue.
async fn queue_can_be_abandoned(kind: Kind) {
    let mut nodes = Queue::Stream.start_with(kind, 1, |command| command);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(1).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, std::slice::from_ref(&buyer)).await;
    until("the order is recorded", async || Queue::Stream.is_idle(&nodes, sale, 1).await).await;
    assert!(nodes.shops.remove(0).stop().success());
    let solo = |storage: &Storage| -> Command {
        let mut solo = command(storage);
        solo.env("STAMPEDE__QUEUE__ABANDON", "true");
        solo
    };
    let solo = Shop::run(solo(&nodes.storages[0]));
    assert_eq!(history.buy(&mut solo.client().await, sale, &buyer).await.response, Response::Already);
    assert_eq!(verify(&history, &nodes.storages[0], &[&solo], sale).await, 1);
    assert!(solo.stop().success());
    let again = Shop::open(&nodes.storages[0]);
    assert!(again.stop().success(), "the last tier is solo now");
}

on_each_database!(
    @module on_postgres, Postgres,
    orders_in_a_stream_survive_a_change_of_the_tier,
    orders_in_a_stream_survive_a_change_to_shielded,
    queue_can_be_abandoned
);
on_each_database!(@module on_mariadb, MariaDb, orders_in_a_broker_survive_a_change_of_the_tier);

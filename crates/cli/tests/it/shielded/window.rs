//! Sales that have not started or have ended: each node refuses by itself, except near the edges of the window.

#![expect(clippy::cast_sign_loss, reason = "metrics are not negative")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_core::{Clock as _, SaleId, SystemClock, Timestamp};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::crowd::redis_commands;
use super::{REFUSED, deaf_node, script_calls, shielded, start};
use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, TOKEN};

const SECOND: Duration = Duration::from_secs(1);

async fn open_on_all(nodes: &Nodes, stock: u32, begin: Timestamp, end: Timestamp) -> SaleId {
    let sale = nodes.shops[0].create_sale_between(stock, begin, end).await;
    nodes.wait_until_open(sale).await;
    sale
}

/// Asks until the node itself refuses with this response.
async fn wait_for_local(shop: &Shop, history: &Recorder, sale: SaleId, buyer: &Buyer, refusal: Response) {
    let mut client = shop.client().await;
    until("the node refuses by itself", async || {
        let before = shop.metric(REFUSED).await;
        history.buy(&mut client, sale, buyer).await.response == refusal && shop.metric(REFUSED).await > before
    })
    .await;
}

/// Users who ask before the begin and after the end cost Redis nothing. The sale starts and ends by the clock of Redis on every node, also
/// on one whose own clock is wrong, and owners get their orders after the end.
async fn a_sale_starts_and_ends_on_time(kind: Kind) {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    std::fs::write(&clock, "-600000").unwrap();
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 2, |n, command| {
        let mut command = shielded(command, 60_000);
        if n == 1 {
            command.env("STAMPEDE_CLOCK_FILE", &clock);
        }
        command
    });
    let everyone = nodes.shops[0].log_in(0, 3).await;
    let (begin, end) = (SystemClock.now().plus(7 * SECOND), SystemClock.now().plus(11 * SECOND));
    let sale = open_on_all(&nodes, 2, begin, end).await;
    let history = Arc::new(Recorder::default());
    for shop in &nodes.shops {
        wait_for_local(shop, &history, sale, &everyone[0], Response::NotStarted).await;
    }
    let (calls, started, sent) = (script_calls(&nodes.redis), Instant::now(), history.all().len());
    nodes.storm(&history, sale, &everyone, 100).await;
    assert!(SystemClock.now() < begin.minus(2 * SECOND), "the machine is too slow for this test");
    assert_eq!(history.count(Response::NotStarted), history.all().len());
    assert_eq!(history.all().len() - sent, 600);
    // What nodes do once a second, crowd or not.
    let background = (started.elapsed().as_secs() + 2) * 2 * 8;
    assert!(script_calls(&nodes.redis) - calls <= background, "the requests reached the gate");

    for (shop, buyer) in nodes.shops.iter().zip(&everyone) {
        let mut client = shop.client().await;
        until("the sale starts", async || {
            let asked_at = SystemClock.now();
            let response = history.buy(&mut client, sale, buyer).await.response;
            assert!(response != Response::NotStarted || asked_at < begin, "refused after the begin");
            response != Response::NotStarted
        })
        .await;
    }
    assert_eq!(history.count(Response::Pending), 2, "and nobody got one before");
    // It is sold out, and then over.
    for shop in &nodes.shops {
        wait_for_local(shop, &history, sale, &everyone[2], Response::Ended).await;
        assert!(SystemClock.now() >= end.plus(2 * SECOND), "near the end the gate decides");
    }
    nodes.storm(&history, sale, &everyone[2..], 100).await;
    let asked = history.all().len();
    nodes.storm(&history, sale, &everyone[..2], 3).await;
    let owned = &history.all()[asked..];
    assert!(owned.iter().all(|attempt| attempt.response.is_confirmation()), "owners get their orders");
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

/// A sale that an operator ends is over at once on every node, and owners get their orders.
async fn a_sale_that_is_ended_is_refused_by_every_node(kind: Kind) {
    let nodes = start(kind, 2, 60_000);
    let everyone = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(5).await;
    let history = Arc::new(Recorder::default());
    let order = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[0]).await.order;
    assert_eq!(nodes.shops[0].admin(&format!("sales/{sale}/end"), &Value::Null).await.status, 200);
    for shop in &nodes.shops {
        wait_for_local(shop, &history, sale, &everyone[1], Response::Ended).await;
        let owned = history.buy(&mut shop.client().await, sale, &everyone[0]).await;
        assert!(owned.response.is_confirmation() && owned.order == order, "{owned:?}");
    }
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// A begin that is moved forward holds on every node at once; on a node that receives no messages, after the expiry.
async fn a_sale_that_is_moved_starts_at_its_new_time(kind: Kind) {
    let nodes = start(kind, 2, 60_000);
    let (_storage, deaf) = deaf_node(&nodes, 1000);
    let everyone = nodes.shops[0].log_in(0, 3).await;
    let begin = SystemClock.now().plus(3600 * SECOND);
    let sale = open_on_all(&nodes, 10, begin, begin.plus(3600 * SECOND)).await;
    deaf.wait_for_sale(sale).await;
    let history = Arc::new(Recorder::default());
    let shops: Vec<&Shop> = nodes.shops.iter().chain([&deaf]).collect();
    for shop in &shops {
        wait_for_local(shop, &history, sale, &everyone[0], Response::NotStarted).await;
    }
    let moved = format!("UPDATE sale SET begin_at = {}, ver = ver + 1 WHERE id = {sale}", SystemClock.now().ms());
    execute(kind, &nodes.storages[0], &moved).await;
    let moved_at = Instant::now();
    for (shop, buyer) in shops.iter().zip(&everyone) {
        let mut client = shop.client().await;
        until("the sale starts", async || history.buy(&mut client, sale, buyer).await.response != Response::NotStarted)
            .await;
    }
    // Nodes compare the database with the gate once a second, and one of them applies the edit.
    assert!(moved_at.elapsed() < Duration::from_secs(10), "{:?}", moved_at.elapsed());
    assert_eq!(history.count(Response::Pending), 3);
    assert_eq!(nodes.verify(&history, sale).await, 3);
}

/// A day after its end a sale has left the gate, and the database alone knows who has an order. A node that has asked it refuses the user's
/// next requests by itself.
async fn repeated_requests_for_a_sale_long_over_are_refused_by_the_node(kind: Kind) {
    const REQUESTS: u64 = 1000;
    /// How long a node uses an answer of the database at least.
    const ANSWER_S: u64 = 5;
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    std::fs::write(&clock, "0").unwrap();
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 1, |_, command| {
        let mut command = shielded(command, 1000);
        command.env("STAMPEDE_CLOCK_FILE", &clock);
        command.env("STAMPEDE__LOGIN__SESSION_TTL_MS", (7 * 24 * 3600 * SECOND).as_millis().to_string());
        command
    });
    let shop = &nodes.shops[0];
    let everyone = shop.log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    let mut client = shop.client().await;
    let bought = history.buy(&mut client, sale, &everyone[0]).await;
    assert_eq!(nodes.verify(&history, sale).await, 1, "the order is recorded");
    // It ends after an hour, and stays in the gate for a day.
    std::fs::write(&clock, (26 * 3600 * SECOND).as_millis().to_string()).unwrap();
    let path = format!("/admin/v1/sales/{sale}/gate");
    until("the sale has left the gate", async || shop.client().await.get(&path, TOKEN).await.unwrap().status == 404)
        .await;

    // The first request reads the session and the database.
    assert_eq!(history.buy(&mut client, sale, &everyone[1]).await.response, Response::Ended);
    let refused = shop.metric(REFUSED).await;
    let (before, started) = (redis_commands(&nodes.redis), Instant::now());
    for _ in 0..REQUESTS {
        assert_eq!(history.buy(&mut client, sale, &everyone[1]).await.response, Response::Ended);
    }
    let (commands, elapsed) = (redis_commands(&nodes.redis) - before, started.elapsed());
    let readings = elapsed.as_secs() / ANSWER_S + 1;
    let local = (shop.metric(REFUSED).await - refused) as u64;
    assert!(local + readings >= REQUESTS, "{local} of {REQUESTS} were refused by the node itself in {elapsed:?}");
    // The same time without requests, and one round more or less of what a node does at intervals.
    let idle_before = redis_commands(&nodes.redis);
    tokio::time::sleep(elapsed).await;
    let idle = redis_commands(&nodes.redis) - idle_before;
    assert!(commands <= idle + 120, "{commands} commands in {elapsed:?}, {idle} without requests");
    let owned = history.buy(&mut client, sale, &everyone[0]).await;
    assert_eq!((owned.response, owned.order), (Response::Already, bought.order), "the owner gets the order");
}

on_each_database!(
    servers: a_sale_starts_and_ends_on_time,
    repeated_requests_for_a_sale_long_over_are_refused_by_the_node,
    a_sale_that_is_ended_is_refused_by_every_node,
    a_sale_that_is_moved_starts_at_its_new_time
);

//! RabbitMQ confirms a message later than `queue.accept_within_ms` after the admission began.

use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, redis, until};

use super::outbox;
use super::rabbitmq::{BROKER, consumers, rows, without_consumer};
use crate::shared::{Nodes, entries};
use crate::shop::{Buyer, Kind};

/// The default of `queue.accept_within_ms`.
pub(super) const ACCEPT_WITHIN: Duration = Duration::from_secs(2);
/// How long an admission of the second node takes.
const SLOW_ADMISSION_MS: u64 = 1500;
/// How long the proxy keeps data in each direction: a confirm takes twice as long, which alone is in time.
const DELAY: Duration = Duration::from_millis(400);
/// With this one, a confirm is never in time.
const LONG_DELAY: Duration = Duration::from_millis(1100);

/// Two nodes behind a proxy in front of the broker. Admissions of the second one are slow.
async fn start(kind: Kind) -> (Proxy, Nodes) {
    let proxy = Proxy::start(BROKER.address()).await.unwrap();
    let node = without_consumer(proxy.address().port());
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 2, |n, command| {
        let mut command = node(n, command);
        if n == 1 {
            command.env("STAMPEDE_FAILPOINTS", format!("buy.admitted=pause:{SLOW_ADMISSION_MS}"));
        }
        command
    });
    (proxy, nodes)
}

/// The order is recorded once, and its buyer gets it.
pub(super) async fn buyer_gets_the_order(nodes: &Nodes, history: &Recorder, sale: SaleId, buyer: &Buyer) {
    until("the buyer gets the order", async || {
        history.buy(&mut nodes.shops[0].client().await, sale, buyer).await.response == Response::Already
    })
    .await;
    let mut orders: Vec<_> =
        history.ended().iter().filter(|attempt| attempt.user == buyer.id).filter_map(|attempt| attempt.order).collect();
    orders.dedup();
    assert_eq!(orders.len(), 1, "{orders:?}");
}

/// The broker hangs: the buyer gets 503 and never 202, also when they ask again. Then the message and its confirm arrive.
async fn late_confirm_is_not_accepted(kind: Kind) {
    let (proxy, nodes) = start(kind).await;
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    let mut client = nodes.shops[0].client().await;
    proxy.set(Fault::Hang);
    let asked_at = Instant::now();
    assert_eq!(history.buy(&mut client, sale, &buyer).await.response, Response::Unknown);
    assert!(asked_at.elapsed() >= ACCEPT_WITHIN, "{:?}: it did not wait for the confirm", asked_at.elapsed());
    let path = format!("/v1/sales/{sale}/orders");
    let refused = client.post(&path, &buyer.token, &Value::Null).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (503, "outcome_unknown"));
    proxy.set(Fault::None);
    let consumers = consumers(&nodes, 1, &BROKER);
    buyer_gets_the_order(&nodes, &history, sale, &buyer).await;
    assert_eq!(rows(&nodes, sale).await, 1);
    assert_eq!(nodes.verify(&history, sale).await, 1);
    consumers.stop();
}

/// The time counts from the begin of the admission: a confirm that is in time by itself is too late after a slow admission.
async fn slow_admission_leaves_less_time_for_the_confirm(kind: Kind) {
    let (proxy, nodes) = start(kind).await;
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    let (mut fast, mut slow) = (nodes.shops[0].client().await, nodes.shops[1].client().await);
    proxy.set(Fault::Delay(DELAY));
    assert_eq!(history.buy(&mut fast, sale, &buyers[0]).await.response, Response::Pending);
    let path = format!("/v1/sales/{sale}/orders");
    let asked_at = Instant::now();
    let late = slow.post(&path, &buyers[1].token, &Value::Null).await.unwrap();
    assert_eq!((late.status.as_u16(), late.text("code").as_str()), (503, "outcome_unknown"));
    assert!(asked_at.elapsed() >= ACCEPT_WITHIN, "{:?}", asked_at.elapsed());
    proxy.set(Fault::None);
    let consumers = consumers(&nodes, 1, &BROKER);
    for buyer in &buyers {
        buyer_gets_the_order(&nodes, &history, sale, buyer).await;
    }
    assert_eq!(rows(&nodes, sale).await, 2);
    assert_eq!(nodes.verify(&history, sale).await, 2);
    consumers.stop();
}

/// The broker confirms every message too late for a buyer: nothing is accepted, but what was left in the outbox is published and
/// settled, while the broker is still as slow.
async fn slow_broker_gets_what_was_left(kind: Kind) {
    let (proxy, nodes) = start(kind).await;
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    proxy.set(Fault::Delay(LONG_DELAY));
    let bought = history.buy(&mut nodes.shops[0].client().await, sale, &buyer).await;
    assert_eq!(bought.response, Response::Unknown);
    assert_eq!(entries(&nodes.redis, &outbox(sale)), 1, "the order is admitted");
    until("the outbox is empty", async || entries(&nodes.redis, &outbox(sale)) == 0).await;
    proxy.set(Fault::None);
    let consumers = consumers(&nodes, 1, &BROKER);
    buyer_gets_the_order(&nodes, &history, sale, &buyer).await;
    assert_eq!(nodes.verify(&history, sale).await, 1);
    consumers.stop();
}

/// A node has as many messages under way as it may have. The next order is not published then, and its buyer gets 503 at once; it is
/// published later.
async fn unconfirmed_messages_are_bounded(kind: Kind) {
    let proxy = Proxy::start(BROKER.address()).await.unwrap();
    let node = without_consumer(proxy.address().port());
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 1, |n, command| {
        let mut command = node(n, command);
        command.env("STAMPEDE__RABBITMQ__MAX_IN_FLIGHT", "1");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 2).await;
    // A sale has one message under way.
    let sales = [nodes.create_sale(1).await, nodes.create_sale(1).await];
    let history = [Recorder::default(), Recorder::default()];
    let (mut first, mut second) = (nodes.shops[0].client().await, nodes.shops[0].client().await);
    proxy.set(Fault::Hang);
    let waits = history[0].buy(&mut first, sales[0], &buyers[0]);
    let refused = async {
        until("the first order is admitted", async || entries(&nodes.redis, &outbox(sales[0])) == 1).await;
        let asked_at = Instant::now();
        let refused = history[1].buy(&mut second, sales[1], &buyers[1]).await;
        assert!(asked_at.elapsed() < ACCEPT_WITHIN / 2, "{:?}: it has waited for a confirm", asked_at.elapsed());
        refused
    };
    let (late, refused) = tokio::join!(waits, refused);
    assert_eq!((late.response, refused.response), (Response::Unknown, Response::Unknown));
    proxy.set(Fault::None);
    let consumers = consumers(&nodes, 1, &BROKER);
    for ((history, sale), buyer) in history.iter().zip(sales).zip(&buyers) {
        buyer_gets_the_order(&nodes, history, sale, buyer).await;
        assert_eq!(nodes.verify(history, sale).await, 1);
    }
    consumers.stop();
}

on_each_database!(
    @module on_postgres, Postgres,
    late_confirm_is_not_accepted,
    slow_broker_gets_what_was_left,
    unconfirmed_messages_are_bounded
);

on_each_database!(@module on_mariadb, MariaDb, slow_admission_leaves_less_time_for_the_confirm);

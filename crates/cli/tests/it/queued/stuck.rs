//! With RabbitMQ: the database does not record the orders of one sale. The other sales of its partition go on, also in a rebuild.

use std::process::Command;

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use stampede_core::{OrderId, SaleId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::Consumers;
use super::rabbitmq::{BROKER, rows, with_broker};
use crate::quarantine::{accept_orders_again, execute, reject_orders_of};
use crate::recovery::{accept_orders, refuse_orders};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, TOKEN};

/// More messages than a consumer receives ahead.
const MESSAGES: usize = 12;

/// All sales are in one partition, of which a consumer receives few messages ahead.
pub(super) fn one_partition(command: Command) -> Command {
    let mut command = with_broker(BROKER.port())(command);
    command.env("STAMPEDE__RABBITMQ__PARTITIONS", "1").env("STAMPEDE__RABBITMQ__PREFETCH", "4");
    command
}

/// A node that serves buyers and records nothing.
fn start(kind: Kind) -> Nodes {
    Nodes::start_on(kind, redis::start().unwrap(), 1, |_, command| {
        let mut command = one_partition(command);
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command
    })
}

/// Each buyer buys an order, which is a batch of its own and is accepted.
pub(super) async fn accept(nodes: &Nodes, history: &Recorder, sale: SaleId, buyers: &[Buyer]) {
    for buyer in buyers {
        let bought = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await;
        assert_eq!(bought.response, Response::Pending);
    }
}

/// Locks the row of a sale in MariaDB for as long as the connection is open.
pub(super) async fn lock_sale(nodes: &Nodes, sale: SaleId) -> sqlx::MySqlConnection {
    let mut connection = sqlx::MySqlConnection::connect(&nodes.storages[0].url()).await.unwrap();
    let lock = format!("BEGIN; SELECT id FROM sale WHERE id = {sale} FOR UPDATE");
    raw_sql(AssertSqlSafe(lock)).execute(&mut connection).await.unwrap();
    connection
}

/// Orders of two sales are accepted while those of one cannot be recorded. `end` lets them be recorded.
async fn other_sale_goes_on(nodes: &Nodes, stuck: SaleId, other: SaleId, buyers: &[Buyer], end: impl AsyncFnOnce()) {
    let (of_stuck, of_other) = (Recorder::default(), Recorder::default());
    let consumers = Consumers::start_with(nodes, 1, one_partition);
    let consumer = &consumers.shops[0];
    accept(nodes, &of_stuck, stuck, &buyers[..MESSAGES]).await;
    accept(nodes, &of_other, other, &buyers[..2]).await;
    until("the other sale is recorded", async || rows(nodes, other).await == 2).await;
    // So are those that come later.
    accept(nodes, &of_stuck, stuck, &buyers[MESSAGES..]).await;
    accept(nodes, &of_other, other, &buyers[2..4]).await;
    until("the other sale goes on", async || rows(nodes, other).await == 4).await;
    assert_eq!(rows(nodes, stuck).await, 0);
    until("an alert names the sale", async || {
        consumer.has_metric("stampede_alerts_total{alert=\"sale_not_recorded\"} 1").await
    })
    .await;
    until("the messages are counted", async || consumer.metric("stampede_queue_parked_messages").await > 0.0).await;
    end().await;
    until("everything is recorded", async || rows(nodes, stuck).await == buyers.len()).await;
    until("no message is left", async || consumer.metric("stampede_queue_parked_messages").await == 0.0).await;
    assert_eq!(nodes.verify(&of_stuck, stuck).await, buyers.len());
    assert_eq!(nodes.verify(&of_other, other).await, 4);
    consumers.stop();
}

/// The database refuses the orders of a sale for a reason that is not in their data.
async fn sale_that_cannot_be_recorded_holds_up_no_other(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, 2 * MESSAGES as u64).await;
    let (stuck, other) = (nodes.create_sale(100).await, nodes.create_sale(100).await);
    for statement in refuse_orders(kind, stuck) {
        execute(kind, &nodes.storages[0], &statement).await;
    }
    let end = async || execute(kind, &nodes.storages[0], accept_orders(kind)).await;
    other_sale_goes_on(&nodes, stuck, other, &buyers, end).await;
}

/// Another client of the database holds the sale's row locked.
async fn locked_sale_holds_up_no_other(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, 2 * MESSAGES as u64).await;
    let (stuck, other) = (nodes.create_sale(100).await, nodes.create_sale(100).await);
    let lock = lock_sale(&nodes, stuck).await;
    let end = async || lock.close().await.unwrap();
    other_sale_goes_on(&nodes, stuck, other, &buyers, end).await;
}

/// Messages of a sale are parked while its row is locked. Most of them contain orders that the database rejects after that, too, more than
/// are read at once: they hold up no other message of their sale.
async fn rejected_messages_hold_up_no_others_of_their_sale(kind: Kind) {
    const REJECTED: usize = 40;
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, REJECTED as u64 + 6).await;
    let sale = nodes.create_sale(100).await;
    let rejected: Vec<_> = buyers[..REJECTED].iter().map(|buyer| buyer.id).collect();
    execute(kind, &nodes.storages[0], &reject_orders_of(kind, &rejected)).await;
    let lock = lock_sale(&nodes, sale).await;
    let history = Recorder::default();
    accept(&nodes, &history, sale, &buyers).await;
    let consumers = Consumers::start_with(&nodes, 1, |command| {
        let mut command = one_partition(command);
        // Quarantined messages would not stay parked.
        command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "3600000");
        command
    });
    let parked = async || consumers.shops[0].metric("stampede_queue_parked_messages").await;
    until("every message is parked", async || parked().await == buyers.len() as f64).await;
    lock.close().await.unwrap();
    until("the other orders are recorded", async || rows(&nodes, sale).await == buyers.len() - REJECTED).await;
    until("the others are still parked", async || parked().await == REJECTED as f64).await;
    execute(kind, &nodes.storages[0], accept_orders_again(kind)).await;
    until("everything is recorded", async || rows(&nodes, sale).await == buyers.len()).await;
    until("no message is parked", async || parked().await == 0.0).await;
    assert_eq!(nodes.verify(&history, sale).await, buyers.len());
    consumers.stop();
}

/// A consumer has received orders of a locked sale, and holds them for longer than a difference between gate and ledger must last. They are
/// on their way, so nothing is repaired, and they are recorded once, with the numbers of their admission.
async fn orders_that_a_consumer_holds_are_not_repaired(kind: Kind) {
    let with_reconcile = |mut command: Command| {
        // On request only.
        command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000").env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "300");
        command
    };
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 1, |_, command| {
        let mut command = with_reconcile(one_partition(command));
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command
    });
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 3).await;
    let sale = nodes.create_sale(3).await;
    let history = Recorder::default();
    let consumers = Consumers::start_with(&nodes, 1, |command| with_reconcile(one_partition(command)));
    let lock = lock_sale(&nodes, sale).await;
    accept(&nodes, &history, sale, &buyers).await;
    let get = async |path: &str| shop.client().await.get(path, TOKEN).await.unwrap().json();
    let gate = format!("/admin/v1/sales/{sale}/gate");
    until("the consumer has received the orders", async || get(&gate).await["queue"] == 0).await;
    let reconcile = async || {
        let done = shop.admin("reconcile", &json!({ "dry_run": false })).await;
        assert_eq!((done.status.as_u16(), &done.json()["findings"]), (200, &json!([])), "{:?}", done.body);
    };
    reconcile().await;
    assert_eq!(rows(&nodes, sale).await, 0, "the sale is still locked");
    // Parked by now, or soon.
    reconcile().await;
    lock.close().await.unwrap();
    until("the orders are recorded", async || rows(&nodes, sale).await == 3).await;
    reconcile().await;
    assert_eq!(get("/admin/v1/reconcile").await["findings"], json!([]), "nothing was repaired");
    let page = get(&format!("/admin/v1/sales/{sale}/orders")).await;
    let mut numbers: Vec<_> = page["orders"].as_array().unwrap().iter().map(|row| row["seq"].as_i64()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [Some(1), Some(2), Some(3)]);
    assert_eq!(nodes.verify(&history, sale).await, 3);
    consumers.stop();
}

/// The message of one sale is parked. An order of another sale that is in no message is recorded from its mark all the same; those of the
/// parked message are on their way.
async fn parked_message_does_not_stop_the_repair_of_other_sales(kind: Kind) {
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 1, |_, command| {
        let mut command = one_partition(command);
        // On request only.
        command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000").env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "300");
        command
    });
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 1).await;
    let (stuck, other) = (nodes.create_sale(3).await, nodes.create_sale(3).await);
    let history = Recorder::default();
    let lock = lock_sale(&nodes, stuck).await;
    accept(&nodes, &history, stuck, &buyers).await;
    until("the message is parked", async || shop.metric("stampede_queue_parked_messages").await > 0.0).await;
    // The next id of the same millisecond, which is not used.
    let lost = OrderId::new(history.ended()[0].order.unwrap().get() + 1).unwrap();
    let live = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{other}}}:live")]).unwrap();
    redis::ask(nodes.redis.port(), &["hset", live.trim(), "4000000000000000001", &lost.to_string()]).unwrap();
    let done = shop.admin("reconcile", &json!({ "dry_run": false })).await.json();
    let of = |finding: &Value| [&finding["finding"], &finding["order_id"], &finding["outcome"]].map(Value::clone);
    let findings: Vec<_> = done["findings"].as_array().unwrap().iter().map(of).collect();
    assert_eq!(findings, [[json!("mark_without_row"), json!(lost), json!("repaired")]], "{done}");
    assert_eq!((rows(&nodes, other).await, rows(&nodes, stuck).await), (1, 0));
    lock.close().await.unwrap();
    until("the parked message is recorded", async || rows(&nodes, stuck).await == 1).await;
    assert_eq!(nodes.verify(&history, stuck).await, 1);
}

/// As many messages of one sale are parked as may be: the others stay in the broker, and hold up the other sale of their partition. Nothing
/// is lost.
async fn parked_messages_are_bounded(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, MESSAGES as u64).await;
    let (stuck, other) = (nodes.create_sale(100).await, nodes.create_sale(100).await);
    let (of_stuck, of_other) = (Recorder::default(), Recorder::default());
    let lock = lock_sale(&nodes, stuck).await;
    accept(&nodes, &of_stuck, stuck, &buyers).await;
    accept(&nodes, &of_other, other, &buyers[..2]).await;
    let consumers = Consumers::start_with(&nodes, 1, |command| {
        let mut command = one_partition(command);
        // As many as are received ahead.
        command.env("STAMPEDE__RABBITMQ__MAX_PARKED", "4");
        command
    });
    let consumer = &consumers.shops[0];
    until("alerts name the sale and the queue", async || {
        consumer.has_metric("stampede_alerts_total{alert=\"sale_not_recorded\"} 2").await
    })
    .await;
    assert_eq!(consumer.metric("stampede_queue_parked_total").await, 4.0);
    assert_eq!(rows(&nodes, other).await, 0, "its messages come after those that stay in the broker");
    lock.close().await.unwrap();
    until("everything is recorded", async || rows(&nodes, stuck).await == MESSAGES && rows(&nodes, other).await == 2)
        .await;
    until("no message is left", async || consumer.metric("stampede_queue_parked_messages").await == 0.0).await;
    assert_eq!(nodes.verify(&of_stuck, stuck).await, MESSAGES);
    assert_eq!(nodes.verify(&of_other, other).await, 2);
    consumers.stop();
}

/// Redis loses everything while accepted orders of one sale cannot be recorded: the others are opened again, and that one when its orders
/// are recorded.
async fn sale_that_cannot_be_recorded_does_not_hold_up_a_rebuild(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, 8).await;
    let (stuck, other) = (nodes.create_sale(7).await, nodes.create_sale(7).await);
    for statement in refuse_orders(kind, stuck) {
        execute(kind, &nodes.storages[0], &statement).await;
    }
    let end = async || execute(kind, &nodes.storages[0], accept_orders(kind)).await;
    other_sale_is_rebuilt(&nodes, stuck, other, &buyers, end).await;
}

/// The same with a sale whose row another client has locked.
async fn locked_sale_does_not_hold_up_a_rebuild(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, 8).await;
    let (stuck, other) = (nodes.create_sale(7).await, nodes.create_sale(7).await);
    let lock = lock_sale(&nodes, stuck).await;
    let end = async || lock.close().await.unwrap();
    other_sale_is_rebuilt(&nodes, stuck, other, &buyers, end).await;
}

/// Redis loses everything while orders of one of two sales cannot be recorded. `end` lets them be recorded.
async fn other_sale_is_rebuilt(nodes: &Nodes, stuck: SaleId, other: SaleId, buyers: &[Buyer], end: impl AsyncFnOnce()) {
    let (of_stuck, of_other) = (Recorder::default(), Recorder::default());
    accept(nodes, &of_stuck, stuck, &buyers[..6]).await;
    accept(nodes, &of_other, other, &buyers[..2]).await;
    nodes.redis.kill().unwrap();
    nodes.redis.restart().unwrap();
    let sells = async |history: &Recorder, sale, buyer| {
        let bought = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await;
        matches!(bought.response, Response::Pending | Response::Already)
    };
    until("the other sale is sold", async || sells(&of_other, other, &buyers[2]).await).await;
    assert!(!sells(&of_stuck, stuck, &buyers[6]).await, "closed: its accepted orders would be forgotten");
    until("an alert names the sale", async || {
        nodes.shops[0].has_metric("stampede_alerts_total{alert=\"sale_not_rebuilt\"} 1").await
    })
    .await;
    // The node that has rebuilt the gate does not keep the partition.
    let consumers = Consumers::start_with(nodes, 1, one_partition);
    until("the other sale is recorded", async || rows(nodes, other).await == 3).await;
    end().await;
    until("the sale is sold again", async || sells(&of_stuck, stuck, &buyers[6]).await).await;
    assert_eq!(of_stuck.buy(&mut nodes.shops[0].client().await, stuck, &buyers[7]).await.response, Response::SoldOut);
    until("everything is recorded", async || rows(nodes, stuck).await == 7).await;
    assert_eq!(nodes.verify(&of_stuck, stuck).await, 7);
    assert_eq!(nodes.verify(&of_other, other).await, 3);
    consumers.stop();
}

on_each_database!(servers: sale_that_cannot_be_recorded_holds_up_no_other);

on_each_database!(
    @module on_mariadb, MariaDb,
    locked_sale_holds_up_no_other,
    rejected_messages_hold_up_no_others_of_their_sale,
    parked_messages_are_bounded,
    locked_sale_does_not_hold_up_a_rebuild,
    orders_that_a_consumer_holds_are_not_repaired,
    parked_message_does_not_stop_the_repair_of_other_sales
);

on_each_database!(@module on_postgres, Postgres, sale_that_cannot_be_recorded_does_not_hold_up_a_rebuild);

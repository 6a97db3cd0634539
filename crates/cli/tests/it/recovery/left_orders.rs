//! A node dies after it has admitted an order, and another client of the database has locked other sales: the order is recorded all the
//! same.

use futures_util::future::join_all;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::until;

use super::foreign_lock::ForeignLock;
use crate::shared::Nodes;
use crate::shop::{Kind, read_only, verify};

/// So many that waiting for one after the other would take longer than `until` waits.
const LOCKED: usize = 8;

async fn locked_sales_do_not_delay_orders_that_a_node_has_left(kind: Kind) {
    let mut nodes = Nodes::start_with(kind, 2, |n, mut command| {
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000");
        if n == 1 {
            command.env("STAMPEDE_FAILPOINTS", "buy.admitted=abort@1");
        }
        command
    });
    let buyers = nodes.shops[0].log_in(0, 1).await;
    let mut locked = Vec::new();
    for _ in 0..LOCKED {
        locked.push((nodes.create_sale(5).await, Recorder::default()));
    }
    let (other, of_other) = (nodes.create_sale(5).await, Recorder::default());
    let sales: Vec<_> = locked.iter().map(|(sale, _)| *sale).collect();
    let lock = ForeignLock::on_sales(kind, &nodes.storages[0], &sales).await;
    let bought = join_all(locked.iter().map(async |(sale, history)| {
        history.buy(&mut nodes.shops[0].client().await, *sale, &buyers[0]).await.response
    }));
    assert_eq!(bought.await, [Response::Unknown; LOCKED], "admitted, and not recorded");
    let died = nodes.shops.remove(1);
    let bought = of_other.buy(&mut died.client().await, other, &buyers[0]).await;
    assert_eq!(bought.response, Response::Unknown, "the node died after the admission");

    let ledger = read_only(&nodes.storages[0]).await;
    let sold = async |sale| ledger.sale(sale).await.unwrap().unwrap().sold;
    until("the order that was left is recorded", async || sold(other).await == 1).await;
    for sale in sales {
        assert_eq!(sold(sale).await, 0, "the lock is still held");
    }
    lock.release().await;
    for (sale, history) in locked.iter().chain([&(other, of_other)]) {
        until("the order is recorded", async || sold(*sale).await == 1).await;
        assert_eq!(verify(history, &nodes.storages[0], &[&nodes.shops[0]], *sale).await, 1);
    }
    ledger.close().await;
}

on_each_database!(servers: locked_sales_do_not_delay_orders_that_a_node_has_left);

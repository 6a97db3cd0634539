//! The gate is rebuilt while nodes refuse by themselves.

use std::sync::Arc;

use serde_json::Value;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::{each_node_sells_one, sell_out, start, wait_for_shield};
use crate::shared::Nodes;
use crate::shop::{Kind, TOKEN};

const STOCK: usize = 6;

/// How often the nodes have rebuilt the gate.
async fn rebuilds(nodes: &Nodes) -> f64 {
    let mut sum = 0.0;
    for shop in &nodes.shops {
        sum += shop.metric("stampede_gate_rebuilds_total").await;
    }
    sum
}

/// Buyers go on asking while the gate is rebuilt: owners get their orders, nothing is sold twice, and afterwards every node
/// refuses by itself again, and sells what comes back. `begin` makes a node rebuild the gate.
async fn survives_a_rebuild(kind: Kind, begin: impl AsyncFnOnce(&Nodes)) {
    let nodes = start(kind, 2, 60_000);
    let everyone = nodes.shops[0].log_in(0, STOCK as u64 + 3).await;
    let (other, buyers) = everyone.split_last().unwrap();
    let (owners, next) = buyers.split_at(STOCK);
    let sale = nodes.create_sale(STOCK as u32).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, owners, other).await;
    // A Redis that loses an order before it is recorded loses it for good.
    assert_eq!(nodes.verify(&history, sale).await, STOCK);

    let before = rebuilds(&nodes).await;
    begin(&nodes).await;
    until("the gate is rebuilt, and every answer is definite", async || {
        let asked = history.all().len();
        nodes.storm(&history, sale, buyers, 1).await;
        let is_definite = history.all()[asked..].iter().all(|attempt| attempt.response != Response::Unknown);
        is_definite && rebuilds(&nodes).await > before
    })
    .await;
    // A command that was not answered in time is repeated, and may lead to another rebuild.
    until("every owner gets the order", async || {
        let asked = history.all().len();
        nodes.storm(&history, sale, owners, 1).await;
        history.all()[asked..].iter().all(|attempt| attempt.response.is_confirmation())
    })
    .await;
    for shop in &nodes.shops {
        wait_for_shield(shop, &history, sale, other).await;
    }

    let mut client = nodes.shops[0].client().await;
    for owner in &owners[..nodes.shops.len()] {
        let order = history.buy(&mut client, sale, owner).await.order.unwrap();
        assert_eq!(history.cancel(&mut client, sale, owner, order).await.response, Response::Cancelled);
    }
    each_node_sells_one(&nodes, &history, sale, next, other).await;
    assert_eq!(nodes.verify(&history, sale).await, STOCK);
}

async fn survives_the_loss_of_the_gate(kind: Kind) {
    survives_a_rebuild(kind, async |nodes| {
        redis::ask(nodes.redis.port(), &["flushall"]).unwrap();
    })
    .await;
}

async fn survives_a_rebuild_by_command(kind: Kind) {
    survives_a_rebuild(kind, async |nodes| {
        let mut client = nodes.shops[1].client().await;
        // Buyers ask meanwhile, so this does not wait for the answer.
        tokio::spawn(async move {
            // 503: the node has not seen the end of the last rebuild yet.
            while client.post("/admin/v1/gate/rebuild", TOKEN, &Value::Null).await.unwrap().status == 503 {}
        });
    })
    .await;
}

on_each_database!(@module on_postgres, Postgres, survives_the_loss_of_the_gate);
on_each_database!(@module on_mariadb, MariaDb, survives_a_rebuild_by_command);

//! With RabbitMQ as the queue.

use std::sync::Arc;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::redis;

use super::{REFUSED, each_node_sells_one, sell_out, shielded};
use crate::queued::rabbitmq::{BROKER, with_broker};
use crate::shared::Nodes;
use crate::shop::Kind;

/// Requests that the nodes have refused by themselves.
async fn refused(nodes: &Nodes) -> f64 {
    let mut sum = 0.0;
    for shop in &nodes.shops {
        sum += shop.metric(REFUSED).await;
    }
    sum
}

/// The sale sells out, each node refuses a crowd by itself, owners get their orders, and cancelled orders are sold by every node at once.
async fn sells_out_and_sells_what_comes_back(kind: Kind) {
    const STOCK: usize = 5;
    const TRIES: usize = 20;
    let nodes = Nodes::start_on(kind, redis::start().unwrap(), 2, |_, command| {
        shielded(with_broker(BROKER.port())(command), 60_000)
    });
    let everyone = nodes.shops[0].log_in(0, 15).await;
    let (other, buyers) = everyone.split_last().unwrap();
    let (owners, late) = buyers.split_at(STOCK);
    let sale = nodes.create_sale(STOCK as u32).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, owners, other).await;

    let (before, asked) = (refused(&nodes).await, history.all().len());
    nodes.storm(&history, sale, late, TRIES as u64).await;
    let attempts = &history.all()[asked..];
    assert_eq!(attempts.len(), nodes.shops.len() * late.len() * TRIES);
    assert!(attempts.iter().all(|attempt| attempt.response == Response::SoldOut));
    assert_eq!(refused(&nodes).await - before, attempts.len() as f64, "each was refused by its node");
    let asked = history.all().len();
    nodes.storm(&history, sale, owners, 2).await;
    assert!(history.all()[asked..].iter().all(|attempt| attempt.response.is_confirmation()), "owners get their orders");

    let mut client = nodes.shops[0].client().await;
    for owner in &owners[..nodes.shops.len()] {
        let order = history.buy(&mut client, sale, owner).await.order.unwrap();
        assert_eq!(history.cancel(&mut client, sale, owner, order).await.response, Response::Cancelled);
    }
    each_node_sells_one(&nodes, &history, sale, late, other).await;
    assert_eq!(nodes.verify(&history, sale).await, STOCK);
}

on_each_database!(@module on_mariadb, MariaDb, sells_out_and_sells_what_comes_back);

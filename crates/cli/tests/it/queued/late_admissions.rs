//! With Redis Streams: Redis answers an admission later than `queue.accept_within_ms` after it began.

use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{redis, until};

use super::late_confirms::{ACCEPT_WITHIN, buyer_gets_the_order};
use super::rabbitmq::rows;
use super::{Consumers, outbox, without_consumer};
use crate::cluster::{Cluster, Servers};
use crate::shared::entries;
use crate::shop::Kind;

/// How long the proxy keeps data in each direction: an answer takes twice as long, which is too late.
const DELAY: Duration = Duration::from_millis(1100);

/// Neither a new order nor one that is in the queue already is confirmed by a late answer: by then the gate may have been rebuilt without
/// the order. In time it is confirmed, and recorded once.
async fn late_admission_is_not_accepted(kind: Kind) {
    let servers = Servers { redis: redis::start_durable().unwrap(), ..Servers::on(kind) };
    let cluster = Cluster::start_with(servers, 1, |_, command| {
        let mut command = without_consumer(command);
        // The answers are late, but they come.
        command.env("STAMPEDE__REDIS__RESPONSE_TIMEOUT_MS", "20000").env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "20000");
        command
    })
    .await;
    let (nodes, proxy) = (&cluster.nodes, &cluster.to_redis[0]);
    let (owner, new) = (&cluster.buyers[0], &cluster.buyers[1]);
    let sale = nodes.create_sale(3).await;
    let history = Recorder::default();
    let mut client = nodes.shops[0].client().await;
    assert_eq!(history.buy(&mut client, sale, owner).await.response, Response::Pending);

    proxy.set(Fault::Delay(DELAY));
    let path = format!("/v1/sales/{sale}/orders");
    for (buyer, whose) in [(new, "a new order"), (owner, "an order in the queue")] {
        let asked_at = Instant::now();
        let late = client.post(&path, &buyer.token, &Value::Null).await.unwrap();
        assert!(asked_at.elapsed() >= ACCEPT_WITHIN, "{whose}: {:?}", asked_at.elapsed());
        let answer = (late.status.as_u16(), late.text("code"));
        assert_eq!(answer, (503, "outcome_unknown".to_owned()), "{whose}");
        assert_eq!(late.header("retry-after"), "1");
        assert_eq!(entries(&nodes.redis, &outbox(sale)), 2, "both are admitted");
    }
    assert_eq!(nodes.shops[0].metric("stampede_gate_breaker_opened_total").await, 0.0, "Redis has answered");

    proxy.set(Fault::None);
    for buyer in [owner, new] {
        until("the order is accepted", async || {
            history.buy(&mut nodes.shops[0].client().await, sale, buyer).await.response == Response::Pending
        })
        .await;
    }
    let consumers = Consumers::start(nodes, 1);
    for buyer in [owner, new] {
        buyer_gets_the_order(nodes, &history, sale, buyer).await;
    }
    assert_eq!(rows(nodes, sale).await, 2);
    assert_eq!(nodes.verify(&history, sale).await, 2);
    consumers.stop();
    cluster.stop();
}

on_each_database!(@module on_postgres, Postgres, late_admission_is_not_accepted);

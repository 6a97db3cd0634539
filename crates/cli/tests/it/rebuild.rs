//! When the gate is rebuilt, on which Redis, and how long that takes; and what buyers get while Redis does not answer.

use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;
use stampede_core::ports::Admitted;
use stampede_core::{Clock as _, OrderId, SaleId, SystemClock, UserId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, ledger, verify};

const REBUILDS: &str = "stampede_gate_rebuilds_total";

/// Buys on this node until the order is created.
async fn buy_when_open(shop: &Shop, history: &Recorder, sale: SaleId, buyer: &Buyer) {
    until("the sale is open", async || {
        history.buy(&mut shop.client().await, sale, buyer).await.response == Response::Created
    })
    .await;
}

/// A master becomes a replica of an older copy and then the master again. It still has the scripts of the gate, but another history.
async fn an_older_copy_with_the_scripts_is_not_used(kind: Kind) {
    let mut nodes = Nodes::start(kind, 1);
    let copy = redis::start().unwrap();
    let port = nodes.redis.port();
    let replicate = |port: u16, of: u16| {
        redis::ask(port, &["replicaof", "127.0.0.1", &of.to_string()]).unwrap();
    };
    let is_copied = |port: u16| redis::ask(port, &["info", "replication"]).unwrap().contains("master_link_status:up");
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let sale = nodes.create_sale(10).await;
    let history = Recorder::default();
    buy_when_open(&nodes.shops[0], &history, sale, &buyers[0]).await;
    // The first replica gives the master another replication id, so the gate is rebuilt.
    replicate(copy.port(), port);
    until("the copy is complete", async || is_copied(copy.port())).await;
    until("the gate is rebuilt", async || nodes.shops[0].metric(REBUILDS).await >= 2.0).await;
    buy_when_open(&nodes.shops[0], &history, sale, &buyers[1]).await;
    until("the copy has the second order", async || {
        redis::ask(copy.port(), &["keys", &format!("stampede:*:{{{sale}}}:live")]).is_ok_and(|key| {
            redis::ask(copy.port(), &["hexists", &key, &buyers[1].id.to_string()]).is_ok_and(|found| found == "1")
        })
    })
    .await;
    redis::ask(copy.port(), &["replicaof", "no", "one"]).unwrap();
    // The copy never gets this order.
    buy_when_open(&nodes.shops[0], &history, sale, &buyers[2]).await;
    let storage = nodes.storages.remove(0);
    assert!(nodes.shops.remove(0).stop().success());
    replicate(port, copy.port());
    until("the master has the older copy", async || is_copied(port)).await;
    redis::ask(port, &["replicaof", "no", "one"]).unwrap();

    let shop = Shop::run(nodes.node(&storage));
    assert_eq!(shop.metric(REBUILDS).await, 1.0);
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyers[2]).await.response, Response::Already);
    buy_when_open(&shop, &history, sale, &buyers[3]).await;
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 4);
    assert!(shop.stop().success());
    // A restart on the same Redis rebuilds nothing.
    let shop = Shop::run(nodes.node(&storage));
    assert_eq!(shop.metric(REBUILDS).await, 0.0);
    assert!(shop.stop().success());
}

/// A Redis that has lost the gate and must not be used is not rebuilt until it is as it must be.
async fn an_unsuitable_redis_is_not_rebuilt(kind: Kind) {
    let nodes = Nodes::start(kind, 1);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 2).await;
    let sale = nodes.create_sale(10).await;
    let history = Recorder::default();
    buy_when_open(shop, &history, sale, &buyers[0]).await;
    let before = shop.metric(REBUILDS).await;
    let port = nodes.redis.port();
    redis::ask(port, &["config", "set", "maxmemory-policy", "allkeys-lru"]).unwrap();
    redis::ask(port, &["script", "flush"]).unwrap();
    until("the node says why it does not sell", async || {
        let ready = shop.client().await.get("/readyz", "").await.unwrap();
        ready.status == 503 && ready.text("detail").contains("allkeys-lru")
    })
    .await;
    let refused = history.buy(&mut shop.client().await, sale, &buyers[1]).await;
    assert_eq!(refused.response, Response::Unknown);
    assert_eq!(shop.metric(REBUILDS).await, before);
    redis::ask(port, &["config", "set", "maxmemory-policy", "noeviction"]).unwrap();
    buy_when_open(shop, &history, sale, &buyers[1]).await;
    assert_eq!(shop.metric(REBUILDS).await, before + 1.0);
    assert!(shop.metric("stampede_gate_closed_seconds_count").await >= 1.0);
    assert_eq!(verify(&history, &nodes.storages[0], &[shop], sale).await, 2);
}

/// Redis is paused: after the first calls without an answer, buyers are refused without a call. They buy again when Redis goes on.
async fn buyers_are_refused_at_once_while_redis_is_paused(kind: Kind) {
    let nodes = Nodes::start_with(kind, 1, |_, mut command| {
        command.env("STAMPEDE__REDIS__RESPONSE_TIMEOUT_MS", "200").env("STAMPEDE__REDIS__CONNECT_TIMEOUT_MS", "200");
        command
    });
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 2).await;
    let sale = nodes.create_sale(10).await;
    let history = Recorder::default();
    buy_when_open(shop, &history, sale, &buyers[0]).await;
    nodes.redis.signal("STOP").unwrap();
    until("the breaker is open", async || shop.metric("stampede_gate_breaker_open").await == 1.0).await;
    let calls = async || shop.metric("stampede_gate_admit_seconds_count").await;
    let before = calls().await;
    let (mut client, path) = (shop.client().await, format!("/v1/sales/{sale}/orders"));
    for _ in 0..20 {
        let refused = client.post(&path, &buyers[1].token, &Value::Null).await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (503, "unavailable"));
        assert_eq!(refused.header("retry-after"), "1");
    }
    assert_eq!(calls().await, before, "the gate is not called for buyers");
    nodes.redis.signal("CONT").unwrap();
    buy_when_open(shop, &history, sale, &buyers[1]).await;
    assert_eq!(shop.metric("stampede_gate_breaker_open").await, 0.0);
    assert!(shop.metric("stampede_gate_breaker_opened_total").await >= 1.0);
    assert_eq!(verify(&history, &nodes.storages[0], &[shop], sale).await, 2);
}

/// A sale with 100,000 live orders is rebuilt, from the ledger alone and with the marks still in Redis. Prints how long nothing was sold.
async fn a_large_sale_is_rebuilt(kind: Kind) {
    const ORDERS: i64 = 100_000;
    let nodes = Nodes::start(kind, 1);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 2).await;
    let sale = nodes.create_sale(200_000).await;
    let stores = ledger(&nodes.storages[0]).await;
    let epoch = stores.ledger.sale(sale).await.unwrap().unwrap().epoch;
    let at = SystemClock.now();
    let order = |n| Admitted { order: OrderId::new(n).unwrap(), user: UserId::new(n).unwrap(), seq: n, at };
    let orders: Vec<Admitted> = (1..=ORDERS).map(order).collect();
    for batch in orders.chunks(1000) {
        stores.ledger.record(sale, epoch, batch).await.unwrap();
    }
    let history = Arc::new(Recorder::default());
    let marks = |expected: i64| {
        let key = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:live")]).unwrap();
        let found = redis::ask(nodes.redis.port(), &["hlen", &key]).unwrap();
        assert_eq!(found, (expected + 1).to_string(), "the marks and the epoch");
    };
    let lost_memory = || {
        nodes.redis.kill().unwrap();
        nodes.redis.restart().unwrap();
    };
    let lost_scripts = || drop(redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap());
    let losses: [(&str, &dyn Fn()); 2] = [("memory", &lost_memory), ("scripts", &lost_scripts)];
    for (n, (what, lose)) in losses.into_iter().enumerate() {
        lose();
        let started = Instant::now();
        buy_when_open(shop, &history, sale, &buyers[n]).await;
        let rebuild = shop.metric("stampede_gate_rebuild_seconds_sum").await;
        eprintln!(
            "{kind:?}: lost its {what}: sold again after {:?}; all rebuilds took {rebuild:.3} s",
            started.elapsed()
        );
        marks(ORDERS + 1 + n as i64);
    }
    stores.ledger.close().await;
}

/// Nodes of one database that use different databases of Redis take the gate from each other. An operator gets an alert.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_different_redis_databases_raise_an_alert() {
    const ALERTS: &str = "stampede_alerts_total{alert=\"gate_rebuilt_repeatedly\"}";
    let mut nodes = Nodes::start(Kind::Postgres, 1);
    nodes.create_sale(5).await;
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut other = command(&storage);
    other.args(["--tier", "shared", "--redis", &format!("{}/1", redis::url(nodes.redis.port()))]);
    nodes.shops.push(Shop::run(other));
    until("an alert is raised", async || {
        for shop in &nodes.shops {
            let metrics = shop.client().await.get("/metrics", TOKEN).await.unwrap();
            if String::from_utf8_lossy(&metrics.body).contains(&format!("{ALERTS} 1")) {
                return true;
            }
        }
        false
    })
    .await;
}

on_each_database!(
    servers: an_older_copy_with_the_scripts_is_not_used,
    an_unsuitable_redis_is_not_rebuilt,
    buyers_are_refused_at_once_while_redis_is_paused,
    a_large_sale_is_rebuilt
);

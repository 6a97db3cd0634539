//! When the gate is rebuilt, and on which Redis; and what buyers get while Redis does not answer.

use serde_json::Value;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, verify};

const REBUILDS: &str = "stampede_gate_rebuilds_total";

/// Buys on this node until the order is created.
pub async fn buy_when_open(shop: &Shop, history: &Recorder, sale: SaleId, buyer: &Buyer) {
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
    let closed = async || {
        let count = shop.metric("stampede_gate_closed_seconds_count").await;
        (count, shop.metric("stampede_gate_closed_seconds_sum").await)
    };
    let closed_before = closed().await;
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
    // The round that ends the time may be a moment later than the sale is open.
    until("the time is counted", async || closed().await.0 > closed_before.0).await;
    assert_eq!(closed().await.0, closed_before.0 + 1.0, "closed once");
    assert!(closed().await.1 > closed_before.1, "for a while");
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

/// Nodes of one database that use different databases of Redis take the gate from each other. An operator gets an alert, and the orders
/// of that time are kept when the wrong node is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_different_redis_databases_raise_an_alert() {
    const ALERTS: &str = "stampede_alerts_total{alert=\"gate_rebuilt_repeatedly\"}";
    let mut nodes = Nodes::start(Kind::Postgres, 1);
    let (buyers, sale) = (nodes.shops[0].log_in(0, 2).await, nodes.create_sale(5).await);
    let history = Recorder::default();
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut other = command(&storage);
    other.args(["--tier", "shared", "--redis", &format!("{}/1", redis::url(nodes.redis.port()))]);
    nodes.shops.push(Shop::run(other));
    until("an alert is raised", async || {
        for (shop, buyer) in nodes.shops.iter().zip(&buyers) {
            history.buy(&mut shop.client().await, sale, buyer).await;
            let metrics = shop.client().await.get("/metrics", TOKEN).await.unwrap();
            if String::from_utf8_lossy(&metrics.body).contains(&format!("{ALERTS} 1")) {
                return true;
            }
        }
        false
    })
    .await;
    let mut wrong = nodes.shops.remove(1);
    wrong.process.kill().unwrap();
    for buyer in &buyers {
        until("the other node sells", async || {
            history.buy(&mut nodes.shops[0].client().await, sale, buyer).await.response.is_confirmation()
        })
        .await;
    }
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

on_each_database!(
    servers: an_older_copy_with_the_scripts_is_not_used,
    an_unsuitable_redis_is_not_rebuilt,
    buyers_are_refused_at_once_while_redis_is_paused
);

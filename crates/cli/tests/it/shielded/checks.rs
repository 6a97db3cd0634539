//! What is checked before the shield, and what after it: the token's signature and the limits of the node come before, the session after.
//! And what it lets through: owners, also of orders that are not recorded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::Value;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::{REFUSED, deaf_node, node_of_redis_user, sell_out, shielded, start, wait_for_shield};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, TOKEN};

/// A forged token is refused as such, also after the sell-out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_tokens_are_refused_before_the_shield() {
    let nodes = start(Kind::Postgres, 1, 60_000);
    let everyone = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, &everyone[..1], &everyone[1]).await;
    let path = format!("/v1/sales/{sale}/orders");
    let mut client = nodes.shops[0].client().await;
    let mut forged = everyone[1].token.clone();
    forged.pop();
    forged.push(if everyone[1].token.ends_with('A') { 'B' } else { 'A' });
    let reply = client.post(&path, &forged, &Value::Null).await.unwrap();
    assert_eq!(reply.status, 401);
    let reply = client.post(&path, &everyone[1].token, &Value::Null).await.unwrap();
    assert_eq!(reply.text("code"), "sold_out");
}

/// Above a limit of the node requests get 429, although the shield would refuse. What the shield or the node's own limit refuses is not
/// counted in Redis. Returns how many the shield has refused before.
async fn refused_below_the_limit(limit: &str, count: u32) -> u32 {
    const LIMIT_CALLS: &str = "stampede_limit_calls_total";
    let nodes = Nodes::start_on(Kind::Postgres, redis::start_durable().unwrap(), 1, |_, command| {
        let mut command = shielded(command, 60_000);
        command.env(format!("STAMPEDE__BUY__{limit}__COUNT"), count.to_string());
        command.env(format!("STAMPEDE__BUY__{limit}__WINDOW_MS"), "3600000");
        command
    });
    let shop = &nodes.shops[0];
    let everyone = shop.log_in(0, 3).await;
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, &everyone[..1], &everyone[1]).await;
    let mut client = shop.client().await;
    // This request is counted in Redis before it is answered, and after all that the preparation has left to be counted.
    assert_eq!(client.get("/v1/login/puzzle", "").await.unwrap().status, 200);
    let (before, calls) = (shop.metric(REFUSED).await, shop.metric(LIMIT_CALLS).await);
    let mut refused = 0;
    loop {
        match history.buy(&mut client, sale, &everyone[2]).await.response {
            Response::SoldOut => refused += 1,
            response => break assert_eq!(response, Response::TooManyRequests),
        }
    }
    assert_eq!(shop.metric(REFUSED).await - before, f64::from(refused), "the shield has refused each of them");
    for _ in 0..3 {
        assert_eq!(history.buy(&mut client, sale, &everyone[2]).await.response, Response::TooManyRequests);
    }
    assert_eq!(shop.metric(REFUSED).await - before, f64::from(refused), "the shield was not asked");
    // The node holds back 25 requests of the limited key: each further one would have asked Redis.
    assert_eq!(shop.metric(LIMIT_CALLS).await, calls, "no request was counted in Redis");
    refused
}

/// More than any buyer needs until the shield refuses.
const LIMIT: u32 = 500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_per_user_comes_before_the_shield() {
    assert_eq!(refused_below_the_limit("PER_USER", LIMIT).await, LIMIT);
}

/// All buyers have the same address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limit_per_address_comes_before_the_shield() {
    let refused = refused_below_the_limit("PER_ADDRESS", LIMIT).await;
    assert!(0 < refused && refused < LIMIT, "{refused}");
}

/// Owners whose orders wait in the queue get them after the sell-out, on the node that has sold them and on another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owners_of_orders_that_are_not_recorded_are_not_refused() {
    let nodes = Nodes::start_on(Kind::Postgres, redis::start_durable().unwrap(), 2, |_, command| {
        let mut command = shielded(command, 60_000);
        command.env("STAMPEDE__QUEUE__CONSUME", "false").env("STAMPEDE__RECONCILE__INTERVAL_MS", "3600000");
        command
    });
    let everyone = nodes.shops[0].log_in(0, 3).await;
    let (other, owners) = everyone.split_last().unwrap();
    let sale = nodes.create_sale(owners.len() as u32).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, owners, other).await;
    let mut refused = Vec::new();
    for shop in &nodes.shops {
        refused.push(shop.metric(REFUSED).await);
    }
    let sold: Vec<_> = history.all().into_iter().filter(|attempt| attempt.order.is_some()).collect();
    let order_of = |owner: &Buyer| sold.iter().find(|attempt| attempt.user == owner.id).unwrap().order;
    for owner in owners {
        for shop in &nodes.shops {
            let owned = history.buy(&mut shop.client().await, sale, owner).await;
            assert_eq!((owned.response, owned.order), (Response::Pending, order_of(owner)), "it is not recorded");
        }
    }
    for (shop, refused) in nodes.shops.iter().zip(refused) {
        assert_eq!(shop.metric(REFUSED).await, refused, "the shield has refused no owner");
    }

    let (_storage, _consumer) = node_of_redis_user(&nodes, "consumer", &["+@all"], 60_000);
    for (shop, owner) in nodes.shops.iter().zip(owners) {
        let mut client = shop.client().await;
        until("the order is recorded", async || {
            let owned = history.buy(&mut client, sale, owner).await;
            assert_eq!(owned.order, order_of(owner));
            owned.response == Response::Already
        })
        .await;
    }
    assert_eq!(nodes.verify(&history, sale).await, owners.len());
}

/// Without Redis a node goes on refusing until its answer of the gate expires. Owners are not refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_go_on_without_redis_until_the_expiry() {
    let expiry = Duration::from_secs(6);
    let nodes = start(Kind::Postgres, 1, 6000);
    let everyone = nodes.shops[0].log_in(0, 2).await;
    let (owner, other) = (&everyone[0], &everyone[1]);
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, std::slice::from_ref(owner), other).await;
    assert_eq!(nodes.verify(&history, sale).await, 1, "the order is recorded");
    wait_for_shield(&nodes.shops[0], &history, sale, other).await;
    nodes.redis.kill().unwrap();
    let killed_at = Instant::now();
    let mut client = nodes.shops[0].client().await;
    for _ in 0..10 {
        assert_eq!(history.buy(&mut client, sale, other).await.response, Response::SoldOut);
    }
    assert_eq!(history.buy(&mut client, sale, owner).await.response, Response::Unknown, "the gate cannot be asked");
    until("the answer has expired", async || {
        let response = history.buy(&mut client, sale, other).await.response;
        assert!(matches!(response, Response::SoldOut | Response::Unknown), "{response:?}");
        response == Response::Unknown
    })
    .await;
    let refused_for = killed_at.elapsed();
    assert!(refused_for < expiry + Duration::from_millis(1500), "{refused_for:?}");
    nodes.redis.restart().unwrap();
    nodes.wait_until_ready().await;
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// The metrics of the shield, before a sell-out and after it. The sales of the demo count as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_show_what_the_shield_does() {
    let nodes = start(Kind::Postgres, 1, 60_000);
    let shop = &nodes.shops[0];
    let everyone = shop.log_in(0, 3).await;
    let sale = nodes.create_sale(2).await;
    let counters = ["stampede_shield_probes_total", "stampede_shield_buyer_reads_total"];
    let before = [shop.metric(counters[0]).await, shop.metric(counters[1]).await];
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, &everyone[..2], &everyone[2]).await;
    for (counter, before) in counters.iter().zip(before) {
        assert!(shop.metric(counter).await > before, "{counter}");
    }
    assert!(shop.metric("stampede_shield_buyers").await >= 2.0);
    assert!(shop.metric("stampede_shield_sales").await >= 1.0);
    assert_eq!(shop.metric("stampede_shield_over_capacity_total").await, 0.0);
    let refused = shop.metric(REFUSED).await;
    let mut client = shop.client().await;
    for _ in 0..5 {
        assert_eq!(history.buy(&mut client, sale, &everyone[2]).await.response, Response::SoldOut);
    }
    assert_eq!(shop.metric(REFUSED).await - refused, 5.0);
}

/// A node that has not heard of the end of a session answers `sold_out` after the sell-out, because the session is not read for that. While
/// a sale has stock, the session is checked first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_is_checked_after_the_shield() {
    let nodes = start(Kind::Postgres, 1, 60_000);
    let (_storage, deaf) = deaf_node(&nodes, 60_000);
    let everyone = nodes.shops[0].log_in(0, 3).await;
    let (sold_out, on_sale) = (nodes.create_sale(1).await, nodes.create_sale(1).await);
    for sale in [sold_out, on_sale] {
        deaf.wait_for_sale(sale).await;
    }
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sold_out, &everyone[..1], &everyone[1]).await;
    wait_for_shield(&deaf, &history, sold_out, &everyone[1]).await;

    let revoked = &everyone[2];
    let path = format!("/admin/v1/users/{}/sessions", revoked.id);
    let reply = nodes.shops[0].client().await.call(Method::DELETE, &path, TOKEN, &Value::Null).await.unwrap();
    assert_eq!(reply.status, 204, "{reply:?}");
    let buy = async |sale: SaleId| {
        let path = format!("/v1/sales/{sale}/orders");
        let reply = deaf.client().await.post(&path, &revoked.token, &Value::Null).await.unwrap();
        (reply.status.as_u16(), reply.text("code"))
    };
    let refused = deaf.metric(REFUSED).await;
    assert_eq!(buy(sold_out).await, (409, "sold_out".to_owned()));
    assert_eq!(deaf.metric(REFUSED).await - refused, 1.0, "the shield has refused it");
    assert_eq!(buy(on_sale).await, (401, "unauthorized".to_owned()));
    assert_eq!(buy(sold_out).await, (401, "unauthorized".to_owned()), "now the node knows that the session has ended");
}

//! Shops, vouchers and sales through the caches of several nodes, which share a level in Redis and a filter of ids.

use hyper::Method;
use serde_json::{Value, json};
use stampede_testkit::{count, redis, until};

use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage, TOKEN};

/// Two nodes, whose processes cache values for a minute unless a change is published.
fn start(kind: Kind) -> Nodes {
    Nodes::start_with(kind, 2, |_, mut command| {
        command.env("STAMPEDE__CACHE__LOCAL_TTL_MS", "60000");
        command
    })
}

/// A counter of one of a node's caches.
async fn counted(shop: &Shop, cache: &str, what: &str) -> f64 {
    shop.metric(&format!("stampede_cache_total{{cache=\"{cache}\",what=\"{what}\"}}")).await
}

async fn get(shop: &Shop, path: &str) -> Value {
    shop.client().await.get(path, "").await.unwrap().json()
}

async fn status(shop: &Shop, path: &str) -> u16 {
    shop.client().await.get(path, "").await.unwrap().status.as_u16()
}

/// A change on one node is visible on the other at once, although its process has the old value for a minute.
async fn changes_reach_every_node(kind: Kind) {
    let nodes = start(kind);
    let [one, other] = &nodes.shops[..] else { unreachable!("two nodes") };
    let mut shop = json!({ "type_id": "1", "name": "Old", "address": "1 Lane" });
    let id = one.admin("shops", &shop).await.text("id");
    let (path, vouchers) = (format!("/v1/shops/{id}"), format!("/v1/shops/{id}/vouchers"));
    // How often a node has found a shop in Redis, and in the database.
    let reads = async |node| (counted(node, "shops", "remote_hits").await, counted(node, "shops", "loads").await);
    for (node, expected) in [(one, (0.0, 1.0)), (other, (1.0, 0.0))] {
        let before = reads(node).await;
        assert_eq!(get(node, &path).await["name"], "Old");
        assert_eq!(get(node, &vouchers).await["vouchers"], json!([]));
        let after = reads(node).await;
        assert_eq!((after.0 - before.0, after.1 - before.1), expected);
    }
    shop["name"] = json!("New");
    let edited = one.client().await.call(Method::PUT, &format!("/admin/v1/shops/{id}"), TOKEN, &shop).await.unwrap();
    assert_eq!(edited.status, 200);
    assert_eq!(get(one, &path).await["name"], "New");
    until("the other node has the new name", async || get(other, &path).await["name"] == "New").await;

    let voucher = json!({
        "shop_id": id, "kind": "flash_sale", "title": "Tea", "price_cents": 100, "worth_cents": 200,
    });
    assert_eq!(one.admin("vouchers", &voucher).await.status, 201);
    until("the other node lists the voucher", async || {
        get(other, &vouchers).await["vouchers"].as_array().is_some_and(|list| list.len() == 1)
    })
    .await;

    // A node that starts finds in Redis what the others have loaded, and loads shops with current sales before they are asked for.
    let sale = one.create_sale(5).await;
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let third = Shop::run(nodes.node(&storage));
    until("the shop of the sale was loaded", async || counted(&third, "shops", "misses").await >= 1.0).await;
    assert_eq!(get(&third, &path).await["name"], "New");
    assert!(counted(&third, "shops", "remote_hits").await >= 1.0);
    assert_eq!(status(&third, &format!("/v1/sales/{sale}")).await, 200);

    // Without Redis, reads go on, and nothing is created that another node might rule out.
    nodes.redis.kill().unwrap();
    assert_eq!(get(other, &path).await["name"], "New");
    assert_eq!(one.admin("shops", &shop).await.status, 503);
    nodes.redis.restart().unwrap();
    until("shops can be created again", async || one.admin("shops", &shop).await.status == 201).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_reach_every_node_on_mariadb() {
    changes_reach_every_node(Kind::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_reach_every_node_on_postgres() {
    changes_reach_every_node(Kind::Postgres).await;
}

/// A value that is older than `cache.refresh_after_ms` is loaded again in the background, long before it expires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_values_are_loaded_again_before_they_expire() {
    let nodes = Nodes::start_with(Kind::Postgres, 1, |_, mut command| {
        command.env("STAMPEDE__CACHE__REFRESH_AFTER_MS", "300").env("STAMPEDE__CACHE__LOCAL_TTL_MS", "100");
        command
    });
    let node = &nodes.shops[0];
    let id = node.admin("shops", &json!({ "type_id": "1", "name": "Old", "address": "1 Lane" })).await.text("id");
    let path = format!("/v1/shops/{id}");
    assert_eq!(get(node, &path).await["name"], "Old");
    // Nobody tells the node.
    execute(Kind::Postgres, &nodes.storages[0], &format!("UPDATE shop SET name = 'New' WHERE id = {id}")).await;
    until("the value is loaded again", async || get(node, &path).await["name"] == "New").await;
}

/// Requests for ids that do not exist, each for another one, do not reach the database once the filter is built. New ids pass at once. Ids
/// of sales tell when they were made, and those of other times do not even reach Redis.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_that_do_not_exist_cost_the_database_nothing() {
    let nodes = start(Kind::Postgres);
    let [one, other] = &nodes.shops[..] else { unreachable!("two nodes") };
    let sale: i64 = one.create_sale(5).await.get();
    for (cache, path, first) in [("shops", "/v1/shops", 1_000_000_000), ("sales", "/v1/sales", sale + 1_000_000_000)] {
        let mut id = first;
        until("the filter rules out an id", async || {
            id += 1;
            assert_eq!(status(other, &format!("{path}/{id}")).await, 404);
            counted(other, cache, "filtered").await > 0.0
        })
        .await;
        let loads = counted(other, cache, "loads").await;
        let (mut client, requests) = (other.client().await, count(1500, 300));
        for n in 0..requests {
            assert_eq!(
                client.get(&format!("{path}/{}", first + 1_000_000 + 7 * n as i64), "").await.unwrap().status,
                404
            );
        }
        // At its capacity the filter lets 1 of 200 pass; here it is nearly empty.
        let loaded = counted(other, cache, "loads").await - loads;
        assert!(loaded <= requests as f64 / 100.0, "{loaded} of {requests} reached the database");
    }
    let asked = async || {
        let mut sum = 0.0;
        for what in ["local_hits", "remote_hits", "misses", "empty_hits", "filtered"] {
            sum += counted(other, "sales", what).await;
        }
        sum
    };
    let before = asked().await;
    for n in 0..100 {
        // Of the years 2022 to 2090, but not of today.
        let id = n * (i64::MAX / 100) + 1;
        if id.abs_diff(sale) > 1 << 50 {
            assert_eq!(status(other, &format!("/v1/sales/{id}")).await, 404);
        }
    }
    assert!(asked().await <= before, "Redis was asked for ids of other times");
    let sale = one.create_sale(5).await;
    assert_eq!(status(other, &format!("/v1/sales/{sale}")).await, 200);

    // Redis loses everything: the gate, and the filter, without which all ids pass until it is built again.
    let rebuilds =
        async || one.metric("stampede_gate_rebuilds_total").await + other.metric("stampede_gate_rebuilds_total").await;
    let before = rebuilds().await;
    redis::ask(nodes.redis.port(), &["flushall"]).unwrap();
    assert_eq!(status(other, &format!("/v1/sales/{sale}")).await, 200);
    until("the gate was rebuilt", async || rebuilds().await > before).await;
    for node in &nodes.shops {
        until("the node is ready", async || status(node, "/readyz").await == 200).await;
    }
    let sale = nodes.create_sale(5).await;
    assert_eq!(status(other, &format!("/v1/sales/{sale}")).await, 200);
}

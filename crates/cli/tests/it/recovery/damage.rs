//! Another program writes to the keys of the gate, the rights of its user are taken away, or the database is set back.

use hyper::Method;
use serde_json::Value;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::quarantine::execute;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop};

/// Whatever is written over the keys of a sale, it is sold again by itself, and other sales are sold meanwhile or soon after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_keys_of_a_sale_are_rebuilt() {
    let nodes = Nodes::start(Kind::Postgres, 2);
    let (damaged, other) = (nodes.create_sale(50).await, nodes.create_sale(50).await);
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    let key = |part: &str| ask(&["keys", &format!("stampede:*:{{{damaged}}}:{part}")]);
    let (sale, live, out) = (key("sale"), key("live"), key("out"));
    let damages: [&[&str]; 8] = [
        &["set", &sale, "x"],
        &["set", &live, "x"],
        &["set", &out, "x"],
        &["hset", &live, "foo", "bar"],
        &["hdel", &sale, "seq"],
        &["hdel", &sale, "cap"],
        &["hset", &sale, "epoch", "x"],
        &["xadd", &out, "*", "foo", "bar"],
    ];
    let buyers = nodes.shops[0].log_in(0, damages.len() as u64).await;
    let histories = [Recorder::default(), Recorder::default()];
    for (damage, buyer) in damages.into_iter().zip(&buyers) {
        ask(damage);
        for (sale, history) in [damaged, other].into_iter().zip(&histories) {
            for shop in &nodes.shops {
                until("the sale is sold again", async || {
                    let bought = history.buy(&mut shop.client().await, sale, buyer).await;
                    matches!(bought.response, Response::Created | Response::Already)
                })
                .await;
            }
        }
    }
    // Marks that the gate did not write are gone after the next rebuild.
    ask(&["script", "flush"]);
    for (sale, history) in [damaged, other].into_iter().zip(&histories) {
        nodes.wait_until_open(sale).await;
        assert_eq!(nodes.verify(history, sale).await, buyers.len());
    }
}

/// A user of Redis without the right to publish, or to call scripts: no node is ready, and sessions end on all nodes all the same. With the
/// right, they sell again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_rights_in_redis_are_reported() {
    let nodes = Nodes::start(Kind::Postgres, 2);
    let (leaving, staying) = (nodes.shops[0].log_in(0, 2).await, nodes.shops[0].log_in(10, 2).await);
    let (sale, history) = (nodes.create_sale(5).await, Recorder::default());
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    let is_ready = async |shop: &Shop| shop.client().await.get("/readyz", "").await.unwrap().status == 200;
    let withdrawn = [("resetchannels", "allchannels"), ("-evalsha", "+evalsha")];
    for (((taken, given), buyer), other) in withdrawn.into_iter().zip(&leaving).zip(&staying) {
        let orders = async |shop: &Shop| shop.client().await.get("/v1/orders", &buyer.token).await.unwrap().status;
        for shop in &nodes.shops {
            assert_eq!(orders(shop).await, 200);
        }
        ask(&["acl", "setuser", "default", taken]);
        for shop in &nodes.shops {
            until("the node is not ready", async || !is_ready(shop).await).await;
        }
        // The answer may be that the outcome is not known: nodes cannot be notified.
        let mut client = nodes.shops[0].client().await;
        client.call(Method::DELETE, "/v1/session", &buyer.token, &Value::Null).await.unwrap();
        for shop in &nodes.shops {
            assert_eq!(orders(shop).await, 401, "{taken}");
        }
        ask(&["acl", "setuser", "default", given]);
        for shop in &nodes.shops {
            until("the node is ready again", async || is_ready(shop).await).await;
        }
        until("the end is written", async || orders(&nodes.shops[1]).await == 401).await;
        for shop in &nodes.shops {
            until("the node sells", async || {
                history.buy(&mut shop.client().await, sale, other).await.response.is_confirmation()
            })
            .await;
        }
    }
    assert_eq!(nodes.verify(&history, sale).await, staying.len());
}

/// A database that is set back to an earlier time while nodes run: nothing is sold until it is the right one again, and the reason is
/// reported.
async fn an_older_database_sells_nothing(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let (buyers, sale) = (nodes.shops[0].log_in(0, 2).await, nodes.create_sale(5).await);
    let history = Recorder::default();
    let mut client = nodes.shops[0].client().await;
    assert_eq!(history.buy(&mut client, sale, &buyers[0]).await.response, Response::Created);
    execute(kind, &nodes.storages[0], "UPDATE gate SET incarnation = incarnation - 1").await;
    for shop in &nodes.shops {
        until("the node says why it is not ready", async || {
            let reply = shop.client().await.get("/readyz", "").await.unwrap();
            reply.status == 503 && reply.text("detail").contains("the database is older than the gate")
        })
        .await;
        let path = format!("/v1/sales/{sale}/orders");
        let refused = shop.client().await.post(&path, &buyers[1].token, &Value::Null).await.unwrap();
        assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (503, "unavailable"));
    }
    execute(kind, &nodes.storages[0], "UPDATE gate SET incarnation = incarnation + 1").await;
    for (shop, buyer) in nodes.shops.iter().zip([&buyers[1], &buyers[0]]) {
        until("the sale is sold again", async || {
            let bought = history.buy(&mut shop.client().await, sale, buyer).await;
            matches!(bought.response, Response::Created | Response::Already)
        })
        .await;
    }
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

on_each_database!(servers: an_older_database_sells_nothing);

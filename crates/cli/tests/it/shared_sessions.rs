//! Sessions in the tier `shared`: they are known to all nodes, and end on all of them at once.

use std::time::Duration;

use hyper::Method;
use serde_json::Value;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Proxy, redis, until};

use crate::shared::{Nodes, node};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command};

/// A session of one node is known to all, and ends on all of them at once. Redis holds only copies.
async fn sessions_end_on_every_node_at_once(kind: Kind) {
    let (server, redis) = (kind.server().unwrap(), redis::start().unwrap());
    let url = kind.create_database(server, server.port());
    let storages = [Storage::with(Some(url.clone())), Storage::with(Some(url))];
    let one = Shop::run(node(&storages[0], &redis));
    let proxy = Proxy::start(redis.address()).await.unwrap();
    let mut behind_proxy = command(&storages[1]);
    behind_proxy.args(["--tier", "shared", "--redis", &redis::url(proxy.address().port())]);
    let other = Shop::run(behind_proxy);
    let buyers = one.log_in(0, 30).await;
    let (mut at_one, mut at_other) = (one.client().await, other.client().await);
    let orders = async |client: &mut Client, buyer: &Buyer| {
        client.get("/v1/orders", &buyer.token).await.unwrap().status.as_u16()
    };
    let log_out = async |client: &mut Client, buyer: &Buyer| {
        client.call(Method::DELETE, "/v1/session", &buyer.token, &Value::Null).await.unwrap().status.as_u16()
    };
    for buyer in &buyers[..20] {
        // Twice, so that the session is in the memory of the other node.
        assert_eq!((orders(&mut at_other, buyer).await, orders(&mut at_other, buyer).await), (200, 200));
        assert_eq!(log_out(&mut at_one, buyer).await, 204);
        let ended = until("the session has ended", async || orders(&mut at_other, buyer).await == 401).await;
        assert!(ended < Duration::from_secs(1), "{ended:?}");
    }
    // Without its copies all users stay logged in.
    redis::ask(redis.port(), &["flushall"]).unwrap();
    assert_eq!((orders(&mut at_one, &buyers[20]).await, orders(&mut at_other, &buyers[20]).await), (200, 200));
    assert_eq!(orders(&mut at_other, &buyers[0]).await, 401);

    // A node that is cut off from Redis asks the ledger.
    proxy.set(Fault::Hang);
    assert_eq!(log_out(&mut at_one, &buyers[20]).await, 204);
    let noticed = until("the cut is noticed", async || orders(&mut at_other, &buyers[20]).await == 401).await;
    assert!(noticed < Duration::from_secs(3), "{noticed:?}");
    assert_eq!(orders(&mut at_other, &buyers[21]).await, 200);
    assert_eq!(log_out(&mut at_one, &buyers[21]).await, 204);
    assert_eq!(orders(&mut at_other, &buyers[21]).await, 401, "at once, because nothing is cached");
    proxy.set(Fault::None);
    until("the node is ready again", async || other.client().await.get("/readyz", "").await.unwrap().status == 200)
        .await;
    assert_eq!((orders(&mut at_other, &buyers[21]).await, orders(&mut at_other, &buyers[22]).await), (401, 200));
}

/// Whatever happens while sessions are revoked, revoking again ends them on every node.
async fn revoked_sessions_stay_revoked(kind: Kind) {
    let mut nodes = Nodes::start(kind, 3);
    let buyers = nodes.shops[0].log_in(0, 8).await;
    let orders = async |shop: &Shop, buyer: &Buyer| {
        shop.client().await.get("/v1/orders", &buyer.token).await.unwrap().status.as_u16()
    };
    let revoke = async |shop: &Shop, buyer: &Buyer| {
        let path = format!("/admin/v1/users/{}/sessions", buyer.id);
        shop.client().await.call(Method::DELETE, &path, TOKEN, &Value::Null).await.unwrap().status.as_u16()
    };
    for shop in &nodes.shops {
        for buyer in &buyers {
            assert_eq!(orders(shop, buyer).await, 200);
        }
    }
    // A node ends a session in the ledger and dies before it can tell Redis.
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    ask(&["client", "pause", "60000", "write"]);
    assert_eq!(revoke(&nodes.shops[0], &buyers[0]).await, 503);
    nodes.shops.remove(0).process.kill().unwrap();
    ask(&["client", "unpause"]);
    for shop in &nodes.shops {
        until("the node is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200).await;
    }
    assert_eq!(revoke(&nodes.shops[0], &buyers[0]).await, 204);
    until("the session has ended", async || orders(&nodes.shops[1], &buyers[0]).await == 401).await;
    assert_eq!(orders(&nodes.shops[0], &buyers[0]).await, 401);

    // The gate is rebuilt while sessions are revoked: nodes use another incarnation one after the other.
    for buyer in &buyers[1..] {
        ask(&["script", "flush"]);
        assert_eq!(orders(&nodes.shops[0], buyer).await, 200);
        assert_eq!(revoke(&nodes.shops[1], buyer).await, 204);
        until("the session has ended", async || orders(&nodes.shops[0], buyer).await == 401).await;
    }
    // Nodes forget what they had in memory.
    ask(&["client", "kill", "type", "pubsub"]);
    for buyer in &buyers {
        for shop in &nodes.shops {
            assert_eq!(orders(shop, buyer).await, 401);
        }
    }
}

/// While Redis answers reads and refuses writes, a session that ends on one node ends on all of them, also on one that has it neither in
/// memory nor from a message, and it stays ended when Redis accepts writes again. No node is ready meanwhile.
async fn sessions_end_while_redis_refuses_writes(kind: Kind) {
    let nodes = Nodes::start(kind, 3);
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    let orders = async |shop: &Shop, buyer: &Buyer| {
        shop.client().await.get("/v1/orders", &buyer.token).await.unwrap().status.as_u16()
    };
    let readyz = async |shop: &Shop| shop.client().await.get("/readyz", "").await.unwrap();
    // Redis has a copy of each session; the second node has it in memory, the third one has not.
    for buyer in &buyers {
        assert_eq!(orders(&nodes.shops[1], buyer).await, 200);
    }
    let states = [("min-replicas-to-write", "1", "0"), ("maxmemory", "1", "0")];
    for ((setting, refusing, accepting), ended) in states.into_iter().zip(buyers.chunks(2)) {
        let [logged_out, disabled] = ended else { panic!("two buyers for each state") };
        ask(&["config", "set", setting, refusing]);
        for shop in &nodes.shops {
            until("no node is ready", async || readyz(shop).await.status == 503).await;
            assert!(readyz(shop).await.text("detail").contains("Redis refuses writes"), "{:?}", readyz(shop).await);
        }
        let mut client = nodes.shops[0].client().await;
        let reply = client.call(Method::DELETE, "/v1/session", &logged_out.token, &Value::Null).await.unwrap();
        assert_eq!(reply.status, 204, "{reply:?}");
        let path = format!("/admin/v1/users/{}/sessions", disabled.id);
        let reply = client.call(Method::DELETE, &path, TOKEN, &Value::Null).await.unwrap();
        assert_eq!(reply.status, 204, "{reply:?}");
        for buyer in ended {
            until("the session has ended", async || orders(&nodes.shops[1], buyer).await == 401).await;
            assert_eq!(orders(&nodes.shops[2], buyer).await, 401, "its copy must not be used");
        }
        ask(&["config", "set", setting, accepting]);
        for shop in &nodes.shops {
            until("the node is ready again", async || readyz(shop).await.status == 200).await;
        }
        // Nodes forget what they had in memory.
        ask(&["client", "kill", "type", "pubsub"]);
        for shop in &nodes.shops {
            for buyer in ended {
                assert_eq!(orders(shop, buyer).await, 401);
            }
        }
    }
}

on_each_database!(
    servers: sessions_end_on_every_node_at_once,
    revoked_sessions_stay_revoked,
    sessions_end_while_redis_refuses_writes
);

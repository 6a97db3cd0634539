//! Sessions in the tier `shared`: they are known to all nodes, and end on all of them at once.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::Value;
use stampede_core::failpoint;
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

/// How a session ends while another node looks it up.
#[derive(Debug, Clone, Copy)]
enum End {
    LoggedOut,
    /// By an administrator.
    Revoked,
    /// Logged out, while the message about it does not reach the node that looks the session up.
    Unheard,
}

async fn my_orders(address: SocketAddr, token: &str) -> u16 {
    Client::connect(address).await.unwrap().get("/v1/orders", token).await.unwrap().status.as_u16()
}

/// A node has read a session and not cached it yet when the session ends, on another node or on itself: the token is not accepted any more,
/// neither by that request nor by a later one.
async fn a_session_that_ends_during_a_look_up_stays_ended(kind: Kind) {
    for failpoint in failpoint::SESSIONS {
        let directory = tempfile::tempdir().unwrap();
        let (armed, reached) = (directory.path().join("look-up"), directory.path().join("look-up.reached"));
        let nodes = Nodes::start_with(kind, 2, |n, mut command| {
            if n == 1 {
                // One thread is held.
                command.env("TOKIO_WORKER_THREADS", "4");
                command.env("STAMPEDE_FAILPOINTS", format!("{failpoint}=hold:{}", armed.display()));
            }
            command
        });
        let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
        let [one, other] = &nodes.shops[..] else { unreachable!() };
        let log_out = async |shop: &Shop, buyer: &Buyer| {
            let mut client = shop.client().await;
            client.call(Method::DELETE, "/v1/session", &buyer.token, &Value::Null).await.unwrap().status.as_u16()
        };
        let mut ends = vec![(End::LoggedOut, one), (End::Revoked, one), (End::LoggedOut, other), (End::Revoked, other)];
        if failpoint == "session.loaded" {
            // Later than this, only the message ends the session on the node.
            ends.push((End::Unheard, one));
        }
        for (n, (end, ended_on)) in (0..).step_by(2).zip(ends) {
            eprintln!("{failpoint}: {end:?} on {}", ended_on.address);
            // `witness` shows that messages have arrived.
            let buyers = one.log_in(n, 2).await;
            let [buyer, witness] = &buyers[..] else { unreachable!() };
            // Sessions are read from the ledger, not from their copies.
            let copies = ask(&["keys", "stampede:*:session:[0-9]*"]);
            for copy in copies.lines().filter(|copy| !copy.is_empty()) {
                ask(&["del", copy]);
            }
            assert_eq!(my_orders(other.address, &witness.token).await, 200);
            std::fs::write(&armed, "").unwrap();
            let (address, token) = (other.address, buyer.token.clone());
            let looking_up = tokio::spawn(async move { my_orders(address, &token).await });
            until("the session was read", async || reached.exists()).await;
            match end {
                End::LoggedOut => assert_eq!(log_out(ended_on, buyer).await, 204),
                End::Revoked => {
                    let path = format!("/admin/v1/users/{}/sessions", buyer.id);
                    let mut client = ended_on.client().await;
                    assert_eq!(client.call(Method::DELETE, &path, TOKEN, &Value::Null).await.unwrap().status, 204);
                }
                End::Unheard => {
                    ask(&["client", "kill", "type", "pubsub"]);
                    assert_eq!(log_out(ended_on, buyer).await, 204);
                }
            }
            if !matches!(end, End::Unheard) {
                assert_eq!(log_out(one, witness).await, 204);
                until("the messages have arrived", async || my_orders(other.address, &witness.token).await == 401)
                    .await;
            }
            assert!(!looking_up.is_finished(), "the look-up is held");
            std::fs::remove_file(&reached).unwrap();
            assert_eq!(looking_up.await.unwrap(), 401, "the request that has read the session");
            for shop in &nodes.shops {
                assert_eq!(my_orders(shop.address, &buyer.token).await, 401, "a later request");
            }
        }
    }
}

/// A session that is used on one node does not expire on another one, where it was used before and not since. One that is not used expires.
async fn a_session_that_is_used_on_one_node_is_open_on_all(kind: Kind) {
    const TTL: Duration = Duration::from_secs(3);
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        command.env("STAMPEDE__LOGIN__SESSION_TTL_MS", TTL.as_millis().to_string());
        command
    });
    let [one, other] = [&nodes.shops[0], &nodes.shops[1]].map(|shop| shop.address);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let [used, unused] = &buyers[..] else { unreachable!() };
    let mut last_use = Instant::now();
    for address in [one, other] {
        for buyer in &buyers {
            assert_eq!(my_orders(address, &buyer.token).await, 200);
        }
    }
    let used_on_both_at = Instant::now();
    until("it would have expired", async || {
        assert!(last_use.elapsed() < TTL, "the machine is too slow for this test");
        last_use = Instant::now();
        assert_eq!(my_orders(other, &used.token).await, 200);
        used_on_both_at.elapsed() > TTL + Duration::from_millis(500)
    })
    .await;
    assert_eq!(my_orders(one, &used.token).await, 200, "it was used on the other node");
    for address in [one, other] {
        assert_eq!(my_orders(address, &unused.token).await, 401, "it was used on neither");
    }
}

on_each_database!(
    servers: sessions_end_on_every_node_at_once,
    revoked_sessions_stay_revoked,
    a_session_that_ends_during_a_look_up_stays_ended,
    a_session_that_is_used_on_one_node_is_open_on_all,
    sessions_end_while_redis_refuses_writes
);

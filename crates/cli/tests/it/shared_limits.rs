//! Rate limits of the tier `shared`: they hold over all nodes together, and for each node by itself while Redis does not answer.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Proxy, Reply, count, redis, until};

use crate::shared::{Nodes, evaluated};
use crate::shop::{Kind, Shop, Storage, command};

/// Two nodes with these limits, in an hour.
fn start(kind: Kind, limits: &[(&str, u32)]) -> Nodes {
    Nodes::start_with(kind, 2, |_, command| with_limits(command, limits))
}

fn with_limits(mut command: Command, limits: &[(&str, u32)]) -> Command {
    for (limit, count) in limits {
        command.env(format!("STAMPEDE__{limit}__COUNT"), count.to_string());
        command.env(format!("STAMPEDE__{limit}__WINDOW_MS"), "3600000");
    }
    // A slow machine changes no outcome.
    command.env("STAMPEDE__LIMITS__REDIS_TIMEOUT_MS", "20000").env("STAMPEDE__REDIS__RESPONSE_TIMEOUT_MS", "20000");
    command
}

/// The number of requests, sent to the nodes in turn, that no limit refuses. Refusals say how long to wait.
async fn passed(nodes: &Nodes, requests: usize, send: impl AsyncFn(&mut Client) -> Reply) -> usize {
    let mut clients = [nodes.shops[0].client().await, nodes.shops[1].client().await];
    let mut passed = 0;
    for n in 0..requests {
        let reply = send(&mut clients[n % 2]).await;
        if reply.status != 429 {
            passed += 1;
            continue;
        }
        let wait: u64 = reply.header("retry-after").parse().unwrap();
        assert!((1..=7200).contains(&wait), "{wait}");
    }
    passed
}

async fn fallbacks(shop: &Shop, limit: &str) -> f64 {
    shop.metric(&format!("stampede_limit_fallback_total{{limit=\"{limit}\"}}")).await
}

async fn buying_and_other_requests_are_limited_over_all_nodes(kind: Kind) {
    let limits = [
        ("BUY__PER_USER", 10),
        ("BUY__PER_ADDRESS", 30),
        ("LIMITS__OWN_PER_USER", 7),
        ("LIMITS__PROBES_PER_ADDRESS", 9),
    ];
    let nodes = start(kind, &limits);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(5).await;
    let path = format!("/v1/sales/{sale}/orders");
    let buy = async |client: &mut Client, token: &str| client.post(&path, token, &Value::Null).await.unwrap();
    assert_eq!(passed(&nodes, 15, async |client| buy(client, &buyers[0].token).await).await, 10);
    assert_eq!(passed(&nodes, 5, async |client| buy(client, &buyers[1].token).await).await, 5, "another user");
    // 17 attempts count against the address: the granted ones, and one per node that Redis has refused because of its user. The next ones
    // each node has refused by itself.
    assert_eq!(passed(&nodes, 30, async |client| buy(client, "").await).await, 13);
    assert_eq!(passed(&nodes, 4, async |client| buy(client, &buyers[1].token).await).await, 0, "the same address");

    let own = async |client: &mut Client| client.get("/v1/me", &buyers[0].token).await.unwrap();
    assert_eq!(passed(&nodes, 12, own).await, 7);
    let probe = async |client: &mut Client| client.get("/readyz", "").await.unwrap();
    assert_eq!(passed(&nodes, 15, probe).await, 9);
    for shop in nodes.shops {
        for limit in ["buy_per_user", "buy_per_address", "own_per_user", "probes_per_address"] {
            assert_eq!(fallbacks(&shop, limit).await, 0.0, "{limit}");
        }
        assert!(shop.stop().success());
    }
}

async fn logins_and_codes_are_limited_over_all_nodes(kind: Kind) {
    let nodes =
        start(kind, &[("LOGIN__PER_ADDRESS", 40), ("LOGIN__CODES_PER_PHONE", 100), ("LOGIN__CODES_PER_PHONE_DAY", 8)]);
    let [one, other] = &nodes.shops[..] else { unreachable!() };
    let code = async |client: &mut Client, phone: &str| {
        client.post("/v1/login/codes", "", &json!({ "phone": phone })).await.unwrap()
    };
    // One address may have half of a phone's budget.
    assert_eq!(passed(&nodes, 10, async |client| code(client, "13800138000").await).await, 4);
    let keys = redis::ask(nodes.redis.port(), &["keys", "*:limit:*"]).unwrap();
    assert!(keys.contains("codes_per_phone") && !keys.contains("13800138000"), "no number is readable: {keys}");
    // A code that was used for a login is returned to the budget on every node, whichever node has sent it.
    for n in 0..6 {
        let (asked, used) = if n % 2 == 0 { (one, other) } else { (other, one) };
        let sent = code(&mut asked.client().await, "13800138001").await;
        assert_eq!(sent.status, 200, "{n}: {:?}", sent.body);
        let login = json!({
            "phone": "13800138001", "code": sent.text("demo_code"), "challenge": sent.text("challenge"),
        });
        assert_eq!(used.client().await.post("/v1/login", "", &login).await.unwrap().status, 200);
    }
    assert_eq!(passed(&nodes, 10, async |client| code(client, "13800138001").await).await, 4);
    // 10 + 12 + 10 requests so far.
    assert_eq!(passed(&nodes, 20, async |client| client.get("/v1/login/puzzle", "").await.unwrap()).await, 8);
    for shop in nodes.shops {
        for limit in ["login_per_address", "codes"] {
            assert_eq!(fallbacks(&shop, limit).await, 0.0, "{limit}");
        }
        assert!(shop.stop().success());
    }
}

/// Redis hangs: reads are let through and counted, and logins are limited by the node itself.
async fn limits_hold_for_each_node_while_redis_hangs(kind: Kind) {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let storage = Storage::on(kind);
    let mut command = command(&storage);
    command.args(["--tier", "shared", "--redis", &redis::url(proxy.address().port())]);
    command.env("STAMPEDE__LOGIN__PER_ADDRESS__COUNT", "20").env("STAMPEDE__LOGIN__PER_ADDRESS__WINDOW_MS", "3600000");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    proxy.set(Fault::Hang);
    let before = [fallbacks(&shop, "reads_per_address").await, fallbacks(&shop, "login_per_address").await];
    let started = Instant::now();
    for _ in 0..200 {
        assert_eq!(client.get("/v1/sales", "").await.unwrap().status, 200);
    }
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!(fallbacks(&shop, "reads_per_address").await - before[0], 200.0);
    let mut refused = 0;
    for _ in 0..30 {
        refused += u32::from(client.get("/v1/login/puzzle", "").await.unwrap().status == 429);
    }
    assert_eq!(refused, 10);
    assert_eq!(fallbacks(&shop, "login_per_address").await - before[1], 20.0);
    proxy.set(Fault::None);
    until("Redis counts again", async || {
        let before = fallbacks(&shop, "reads_per_address").await;
        client.get("/v1/sales", "").await.unwrap();
        fallbacks(&shop, "reads_per_address").await == before
    })
    .await;
}

/// Concurrent requests to buy are counted with few calls of Redis.
async fn concurrent_requests_share_calls_of_redis(kind: Kind) {
    let nodes = Nodes::start_with(kind, 1, |_, command| with_limits(command, &[]));
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, count(1000, 250)).await;
    let sale = nodes.create_sale(buyers.len() as u32).await;
    let history = Arc::new(Recorder::default());
    let calls = async || (shop.metric("stampede_limit_calls_total").await, evaluated(&nodes.redis));
    let before = calls().await;
    nodes.storm(&history, sale, &buyers, 1).await;
    let after = calls().await;
    let (calls, all) = (after.0 - before.0, after.1 - before.1);
    assert_eq!(history.count(Response::Created), buyers.len());
    eprintln!("{} concurrent requests to buy: {calls} calls of the limits, {all} of all scripts", buyers.len());
    assert!(calls <= buyers.len() as f64 * 0.8, "{calls} calls for {} requests", buyers.len());
    assert_eq!(fallbacks(shop, "buy_per_user").await, 0.0);
}

on_each_database!(
    servers: buying_and_other_requests_are_limited_over_all_nodes,
    logins_and_codes_are_limited_over_all_nodes,
    limits_hold_for_each_node_while_redis_hangs,
    concurrent_requests_share_calls_of_redis
);

//! Rate limits of the tier `shared`: they hold over all nodes together, and for each node by itself while Redis does not answer.

use std::cell::Cell;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Proxy, Reply, count, redis, until};

use crate::login::{post_from, solve};
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

async fn reads_and_searches_are_limited_over_all_nodes(kind: Kind) {
    let nodes = start(kind, &[("LIMITS__READS_PER_ADDRESS", 21), ("LIMITS__SEARCHES_PER_ADDRESS", 6)]);
    let search = async |client: &mut Client| client.get("/v1/shops?name=tea", "").await.unwrap();
    assert_eq!(passed(&nodes, 10, search).await, 6);
    // A search is a read as well, also one that the limit of searches refuses.
    let read = async |client: &mut Client| client.get("/v1/sales", "").await.unwrap();
    assert_eq!(passed(&nodes, 20, read).await, 11);
    for shop in nodes.shops {
        for limit in ["reads_per_address", "searches_per_address"] {
            assert_eq!(fallbacks(&shop, limit).await, 0.0, "{limit}");
        }
        assert!(shop.stop().success());
    }
}

/// Codes to many phones, for one address and by the whole shop.
async fn codes_of_an_address_and_of_the_shop_are_limited_over_all_nodes(kind: Kind) {
    let directory = tempfile::tempdir().unwrap();
    let settings = directory.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ntrusted_proxies = [\"127.0.0.0/8\"]\n").unwrap();
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        command.arg("--config").arg(&settings);
        with_limits(command, &[("LOGIN__CODES_PER_ADDRESS", 5), ("LOGIN__CODES_PER_SHOP", 12)])
    });
    let phones = Cell::new(0);
    let code = async |client: &mut Client, address: &str| {
        let phone = format!("138{:08}", phones.replace(phones.get() + 1));
        post_from(client, address, "/v1/login/codes", &json!({ "phone": phone })).await
    };
    assert_eq!(passed(&nodes, 8, async |client| code(client, "192.0.2.1").await).await, 5);
    assert_eq!(passed(&nodes, 8, async |client| code(client, "192.0.2.2").await).await, 5, "another address");
    assert_eq!(passed(&nodes, 8, async |client| code(client, "192.0.2.3").await).await, 2, "twelve by the shop");
    for shop in nodes.shops {
        assert_eq!(fallbacks(&shop, "codes").await, 0.0);
        assert!(shop.stop().success());
    }
}

/// Codes to one phone for many addresses.
async fn codes_of_a_phone_are_limited_over_all_nodes(kind: Kind) {
    let directory = tempfile::tempdir().unwrap();
    let settings = directory.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ntrusted_proxies = [\"127.0.0.0/8\"]\n").unwrap();
    let nodes = Nodes::start_with(kind, 2, |_, mut command| {
        command.arg("--config").arg(&settings);
        with_limits(command, &[("LOGIN__CODES_PER_PHONE", 6)])
    });
    let addresses = Cell::new(0);
    let code = async |client: &mut Client, phone: &str| {
        let address = format!("192.0.2.{}", addresses.replace(addresses.get() + 1));
        post_from(client, &address, "/v1/login/codes", &json!({ "phone": phone })).await
    };
    assert_eq!(passed(&nodes, 10, async |client| code(client, "13800138000").await).await, 6);
    assert_eq!(passed(&nodes, 10, async |client| code(client, "13800138001").await).await, 6, "another phone");
    for shop in nodes.shops {
        assert_eq!(fallbacks(&shop, "codes").await, 0.0);
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

/// A solved puzzle gives one code over all nodes.
async fn a_puzzle_works_once_over_all_nodes(kind: Kind) {
    let nodes = Nodes::start_with(kind, 2, |_, command| {
        let mut command = with_limits(command, &[]);
        command.env("STAMPEDE__LOGIN__PROOF_OF_WORK_BITS", "10");
        command
    });
    let [one, other] = &nodes.shops[..] else { unreachable!() };
    let phone = "13800138000";
    for (first, second) in [(one, other), (other, one)] {
        let puzzle = first.client().await.get("/v1/login/puzzle", "").await.unwrap().text("puzzle");
        let solved = json!({ "phone": phone, "puzzle": puzzle, "answer": solve(&puzzle, phone) });
        let code = async |shop: &Shop| shop.client().await.post("/v1/login/codes", "", &solved).await.unwrap();
        let sent = code(first).await;
        assert_eq!(sent.status, 200, "{sent:?}");
        for shop in [second, first] {
            let again = code(shop).await;
            assert_eq!((again.status.as_u16(), again.text("code").as_str()), (422, "proof_required"));
        }
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
    command.env("STAMPEDE__LIMITS__READS_PER_ADDRESS__COUNT", "2000");
    command.env("STAMPEDE__LIMITS__READS_PER_ADDRESS__WINDOW_MS", "3600000");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    proxy.set(Fault::Hang);
    let before = [fallbacks(&shop, "reads_per_address").await, fallbacks(&shop, "login_per_address").await];
    let started = Instant::now();
    // The limit is 2,000, so the node holds back a hundred requests. From then on each asks Redis, until it answers.
    for _ in 0..300 {
        assert_eq!(client.get("/v1/sales", "").await.unwrap().status, 200);
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
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
        for _ in 0..101 {
            client.get("/v1/sales", "").await.unwrap();
        }
        fallbacks(&shop, "reads_per_address").await == before
    })
    .await;
}

/// A crowd of which every user tries once is not counted in Redis: the limits hold by themselves for so few requests.
async fn a_crowd_far_from_its_limits_costs_no_calls_of_redis(kind: Kind) {
    let nodes = Nodes::start_with(kind, 1, |_, command| with_limits(command, &[]));
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, count(900, 250)).await;
    let sale = nodes.create_sale(buyers.len() as u32).await;
    let history = Arc::new(Recorder::default());
    let calls = async || (shop.metric("stampede_limit_calls_total").await, evaluated(&nodes.redis));
    let before = calls().await;
    nodes.storm(&history, sale, &buyers, 1).await;
    let after = calls().await;
    assert_eq!(history.count(Response::Created), buyers.len());
    eprintln!("{} requests to buy: {} calls of scripts", buyers.len(), after.1 - before.1);
    assert_eq!(after.0 - before.0, 0.0, "calls of the limits");
    assert_eq!(fallbacks(shop, "buy_per_user").await, 0.0);
}

on_each_database!(
    servers: buying_and_other_requests_are_limited_over_all_nodes,
    reads_and_searches_are_limited_over_all_nodes,
    logins_and_codes_are_limited_over_all_nodes,
    codes_of_an_address_and_of_the_shop_are_limited_over_all_nodes,
    codes_of_a_phone_are_limited_over_all_nodes,
    a_puzzle_works_once_over_all_nodes,
    limits_hold_for_each_node_while_redis_hangs,
    a_crowd_far_from_its_limits_costs_no_calls_of_redis
);

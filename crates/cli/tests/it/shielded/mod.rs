//! The tier `shielded`: each node refuses by itself who comes too late or too early.
//!
//! - here: after the sell-out; [`crowd`]: what that costs
//! - [`window`]: before the begin and after the end of a sale

mod crowd;
mod window;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Server, count, redis, until};

use crate::proof::{run_without_violation, small_bench};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, command};

/// Requests that a node has refused by itself.
const REFUSED: &str = "stampede_shield_refused_total";

/// Nodes whose shields use an answer of the gate for this long.
fn start(kind: Kind, nodes: usize, expiry_ms: u64) -> Nodes {
    let redis = redis::start_durable().unwrap();
    Nodes::start_on(kind, redis, nodes, |_, command| shielded(command, expiry_ms))
}

fn shielded(mut command: Command, expiry_ms: u64) -> Command {
    command.env("STAMPEDE__TIER", "shielded").env("STAMPEDE__SHIELD__EXPIRY_MS", expiry_ms.to_string());
    command
}

/// A further node, which receives no messages.
fn deaf_node(nodes: &Nodes, expiry_ms: u64) -> (Storage, Shop) {
    let port = nodes.redis.port();
    redis::ask(port, &["acl", "setuser", "deaf", "on", ">word", "~*", "&*", "+@all", "-subscribe"]).unwrap();
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut deaf = shielded(command(&storage), expiry_ms);
    deaf.args(["--redis", &format!("redis://deaf:word@127.0.0.1:{port}/")]);
    (storage, Shop::run(deaf))
}

/// Buys everything for the first buyers, and waits until every node refuses the others by itself.
async fn sell_out(nodes: &Nodes, history: &Arc<Recorder>, sale: SaleId, owners: &[Buyer], other: &Buyer) {
    nodes.storm(history, sale, owners, 1).await;
    for shop in &nodes.shops {
        wait_for_shield(shop, history, sale, other).await;
    }
}

async fn wait_for_shield(shop: &Shop, history: &Recorder, sale: SaleId, other: &Buyer) {
    let mut client = shop.client().await;
    let before = shop.metric(REFUSED).await;
    until("the shield refuses", async || {
        assert_eq!(history.buy(&mut client, sale, other).await.response, Response::SoldOut);
        shop.metric(REFUSED).await > before
    })
    .await;
}

/// How often Redis has executed scripts.
fn script_calls(redis: &Server) -> u64 {
    let stats = redis::ask(redis.port(), &["info", "commandstats"]).unwrap();
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls.and_then(|rest| rest.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
}

/// Stock that comes back is sold by every node at once, although the last answer of the gate has not expired.
async fn returned_stock_is_sold_at_once(kind: Kind) {
    let nodes = start(kind, 2, 60_000);
    let everyone = nodes.shops[0].log_in(0, 4).await;
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    for round in 0..count(20, 2) as usize {
        let (owner, next) = (&everyone[round % 2], &everyone[(round + 1) % 2]);
        if round == 0 {
            sell_out(&nodes, &history, sale, std::slice::from_ref(owner), &everyone[3]).await;
        }
        let order = history.buy(&mut nodes.shops[0].client().await, sale, owner).await.order.unwrap();
        let mut client = nodes.shops[round % 2].client().await;
        assert_eq!(history.cancel(&mut client, sale, owner, order).await.response, Response::Cancelled);
        let mut client = nodes.shops[(round + 1) % 2].client().await;
        let delay = until("the next buyer gets it", async || {
            history.buy(&mut client, sale, next).await.response != Response::SoldOut
        })
        .await;
        assert!(delay < Duration::from_secs(5), "{delay:?}");
        for shop in &nodes.shops {
            wait_for_shield(shop, &history, sale, &everyone[3]).await;
        }
    }
    // A top-up, too.
    let added = json!({ "add": 1, "request_id": "one-more" });
    assert_eq!(nodes.shops[0].admin(&format!("sales/{sale}/top-ups"), &added).await.status, 200);
    let mut client = nodes.shops[1].client().await;
    until("one more is sold", async || {
        history.buy(&mut client, sale, &everyone[2]).await.response != Response::SoldOut
    })
    .await;
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

/// A node that receives no messages sells returned stock after the expiry, and owners get their orders meanwhile.
async fn without_messages_the_expiry_limits_wrong_refusals(kind: Kind) {
    let nodes = start(kind, 1, 1000);
    let (_storage, deaf) = deaf_node(&nodes, 1000);
    let everyone = nodes.shops[0].log_in(0, 3).await;
    let sale = nodes.create_sale(1).await;
    deaf.wait_for_sale(sale).await;
    let history = Arc::new(Recorder::default());
    let order = history.buy(&mut nodes.shops[0].client().await, sale, &everyone[0]).await.order.unwrap();
    wait_for_shield(&deaf, &history, sale, &everyone[2]).await;
    let owned = history.buy(&mut deaf.client().await, sale, &everyone[0]).await;
    assert_eq!(owned.order, Some(order), "the owner gets the order back");
    let cancelled = history.cancel(&mut nodes.shops[0].client().await, sale, &everyone[0], order).await;
    assert_eq!(cancelled.response, Response::Cancelled);
    let started = Instant::now();
    let mut client: Client = deaf.client().await;
    until("the next buyer gets it", async || {
        history.buy(&mut client, sale, &everyone[1]).await.response != Response::SoldOut
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// Buyers get the real reason once the sale is paused or over, although it is sold out and the last answer has not expired.
async fn paused_and_ended_sales_are_not_called_sold_out(kind: Kind) {
    let nodes = start(kind, 2, 60_000);
    let everyone = nodes.shops[0].log_in(0, 2).await;
    let (owner, other) = (std::slice::from_ref(&everyone[0]), &everyone[1]);
    let answer = async |history: &Recorder, sale: SaleId, shop: &Shop| {
        history.buy(&mut shop.client().await, sale, other).await.response
    };
    let sale = nodes.create_sale(1).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, owner, other).await;
    assert_eq!(nodes.shops[0].admin(&format!("sales/{sale}/pause"), &Value::Null).await.status, 200);
    for shop in &nodes.shops {
        until("buyers hear of the pause", async || answer(&history, sale, shop).await == Response::Paused).await;
        // What the node asks the gate for meanwhile does not make it refuse by itself.
        for _ in 0..20 {
            assert_eq!(answer(&history, sale, shop).await, Response::Paused);
        }
    }

    let now = stampede_core::Clock::now(&stampede_core::SystemClock);
    let sale = nodes.shops[0].create_sale_between(1, now, now.plus(Duration::from_secs(4))).await;
    for shop in &nodes.shops {
        shop.wait_for_sale(sale).await;
    }
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, owner, 1).await;
    for shop in &nodes.shops {
        until("buyers hear that it is over", async || answer(&history, sale, shop).await == Response::Ended).await;
    }
    let delay = stampede_core::Clock::now(&stampede_core::SystemClock).ms() - now.ms() - 4000;
    assert!(delay < 10_000, "{delay} ms after its end");
}

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

/// The load test starts its own servers and two nodes.
#[test]
fn load_test_finds_no_violation() {
    let mut bench = small_bench(1);
    bench.args(["--tier", "shielded", "--nodes", "2", "--private-servers", "--database", "postgres"]);
    let report = run_without_violation(bench);
    assert_eq!((&report["tier"], &report["nodes"]), (&json!("shielded"), &json!(2)));
    assert_eq!(report["orders"]["other"], json!(0), "every buyer got an order");
}

on_each_database!(
    servers: paused_and_ended_sales_are_not_called_sold_out,
    returned_stock_is_sold_at_once,
    without_messages_the_expiry_limits_wrong_refusals
);

//! The tier `shielded`: each node refuses by itself who comes too late or too early.
//!
//! - here: after the sell-out; [`crowd`]: what that costs
//! - [`checks`]: what is checked before the shield, and what after it
//! - [`missed_messages`]: stock comes back while a node receives no messages
//! - [`rabbitmq`]: with RabbitMQ as the queue; [`rebuilds`]: the gate is rebuilt meanwhile
//! - [`window`]: before the begin and after the end of a sale

mod checks;
mod crowd;
mod missed_messages;
mod rabbitmq;
mod rebuilds;
mod window;

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::check::Rules;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Server, count, redis, until};

use crate::proof::{run_without_violation, small_bench};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, command, verify_with};

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
    node_of_redis_user(nodes, "deaf", &["+@all", "-subscribe"], expiry_ms)
}

/// A further node, with a user in Redis of its own that has these rights.
fn node_of_redis_user(nodes: &Nodes, user: &str, rights: &[&str], expiry_ms: u64) -> (Storage, Shop) {
    let port = nodes.redis.port();
    let user_rights = [&["acl", "setuser", user, "on", ">word", "~*", "&*"][..], rights].concat();
    redis::ask(port, &user_rights).unwrap();
    let storage = Storage::with(Some(nodes.storages[0].url()));
    let mut node = shielded(command(&storage), expiry_ms);
    node.args(["--redis", &format!("redis://{user}:word@127.0.0.1:{port}/")]);
    (storage, Shop::run(node))
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

/// Waits until this many nodes receive the messages about sales.
async fn wait_for_listeners(redis: &Server, nodes: usize) {
    let ask = |command: &[&str]| redis::ask(redis.port(), command).unwrap().trim().to_owned();
    until("nodes have subscribed", async || {
        let channel = ask(&["pubsub", "channels", "stampede:*:sales"]);
        let reply = ask(&["pubsub", "numsub", &channel]);
        reply.lines().next_back() == Some(nodes.to_string().as_str())
    })
    .await;
}

/// How often Redis has executed scripts.
fn script_calls(redis: &Server) -> u64 {
    let stats = redis::ask(redis.port(), &["info", "commandstats"]).unwrap();
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls.and_then(|rest| rest.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
}

/// The message of a sell-out makes the other node read who has an order, so that it refuses by itself from its first request on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sell_out_on_one_node_reaches_the_shield_of_the_other() {
    const READS: &str = "stampede_shield_buyer_reads_total";
    let nodes = start(Kind::Postgres, 2, 60_000);
    let [first, second] = &nodes.shops[..] else { panic!("two nodes") };
    let everyone = first.log_in(0, 2).await;
    let (owner, other) = (&everyone[0], &everyone[1]);
    wait_for_listeners(&nodes.redis, 2).await;
    for _ in 0..count(20, 3) {
        let sale = nodes.create_sale(1).await;
        let history = Recorder::default();
        let (reads, refused) = (second.metric(READS).await, second.metric(REFUSED).await);
        let bought = history.buy(&mut first.client().await, sale, owner).await;
        assert_eq!(bought.response, Response::Pending);
        until("the second node has read who has an order", async || second.metric(READS).await > reads).await;
        let mut client = second.client().await;
        assert_eq!(history.buy(&mut client, sale, other).await.response, Response::SoldOut);
        assert_eq!(second.metric(REFUSED).await - refused, 1.0, "the shield has refused it");
        let owned = history.buy(&mut client, sale, owner).await;
        assert!(owned.response.is_confirmation() && owned.order == bought.order, "the owner gets the order: {owned:?}");
        assert_eq!(nodes.verify(&history, sale).await, 1);
    }
}

/// Stock that comes back, from cancelled orders or a top-up, is sold by every node at once, also by the one that was asked for the change,
/// although the last answer of the gate has not expired. Owners get their orders on every node, also while stock comes back.
async fn returned_stock_is_sold_at_once(kind: Kind) {
    let nodes = start(kind, 3, 60_000);
    let everyone = nodes.shops[0].log_in(0, 12).await;
    let (other, all_buyers) = everyone.split_last().unwrap();
    // Two keep their orders, the others cancel them.
    let (keepers, buyers) = all_buyers.split_at(2);
    let sale = nodes.create_sale(5).await;
    let history = Arc::new(Recorder::default());
    sell_out(&nodes, &history, sale, &all_buyers[..5], other).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let asking = tokio::spawn(ask_until(is_over.clone(), nodes.addresses(), history.clone(), sale, keepers.to_vec()));
    let rounds = count(20, 2) as usize;
    for round in 0..rounds {
        let (owners, next) =
            if round.is_multiple_of(2) { (&buyers[..3], &buyers[3..6]) } else { (&buyers[3..6], &buyers[..3]) };
        let mut client = nodes.shops[round % 3].client().await;
        let mut orders = Vec::new();
        for owner in owners {
            orders.push(history.buy(&mut client, sale, owner).await.order.unwrap());
        }
        for (owner, order) in owners.iter().zip(orders) {
            let cancelled = history.cancel(&mut client, sale, owner, order).await;
            assert_eq!(cancelled.response, Response::Cancelled);
        }
        each_node_sells_one(&nodes, &history, sale, next, other).await;
    }
    let added = json!({ "add": 3, "request_id": "three-more" });
    assert_eq!(nodes.shops[0].admin(&format!("sales/{sale}/top-ups"), &added).await.status, 200);
    each_node_sells_one(&nodes, &history, sale, &buyers[6..], other).await;
    is_over.store(true, Ordering::Relaxed);
    let asked = asking.await.unwrap();
    assert!(asked > rounds, "owners have asked {asked} times");
    let owners = if rounds.is_multiple_of(2) { &buyers[..3] } else { &buyers[3..6] };
    for shop in &nodes.shops {
        for owner in owners.iter().chain(&buyers[6..]) {
            let owned = history.buy(&mut shop.client().await, sale, owner).await;
            assert!(owned.response.is_confirmation(), "{owned:?}");
        }
    }
    // Messages arrive, so no node refuses for as long as its answer of the gate would be valid.
    let rules = Rules { max_sold_out_delay: Duration::from_secs(2), ..Rules::default() };
    let shops: Vec<&Shop> = nodes.shops.iter().collect();
    assert_eq!(verify_with(rules, &history, &nodes.storages[0], &shops, sale).await, 8);
}

/// Owners ask every node again and again until the test is over, and get their orders. Returns how often each of them has asked each node.
async fn ask_until(
    is_over: Arc<AtomicBool>,
    nodes: Vec<SocketAddr>,
    history: Arc<Recorder>,
    sale: SaleId,
    owners: Vec<Buyer>,
) -> usize {
    let mut clients = Vec::new();
    for address in nodes {
        clients.push(Client::connect(address).await.unwrap());
    }
    let mut asked = 0;
    while !is_over.load(Ordering::Relaxed) {
        for client in &mut clients {
            for owner in &owners {
                let owned = history.buy(client, sale, owner).await;
                assert!(owned.response.is_confirmation(), "{owned:?}");
            }
        }
        asked += 1;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    asked
}

/// Each node sells an item that came back, to a buyer of its own. Then waits until every node refuses by itself again.
async fn each_node_sells_one(nodes: &Nodes, history: &Recorder, sale: SaleId, next: &[Buyer], other: &Buyer) {
    for (shop, buyer) in nodes.shops.iter().zip(next) {
        let mut client = shop.client().await;
        let delay = until("the node sells what came back", async || {
            history.buy(&mut client, sale, buyer).await.response.is_confirmation()
        })
        .await;
        assert!(delay < Duration::from_secs(5), "{delay:?}");
    }
    for shop in &nodes.shops {
        wait_for_shield(shop, history, sale, other).await;
    }
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
    returned_stock_is_sold_at_once
);

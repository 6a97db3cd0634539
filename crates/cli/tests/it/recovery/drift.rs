//! Differences between gate and ledger are repaired while sales run.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::{Clock as _, OrderId, SaleId, SystemClock, Timestamp, UserId};
use stampede_proof::history::{Action, Attempt, Response};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, redis, until};

use crate::cluster::{Cluster, Servers};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, read_only, verify};

use super::alerts::sum;
use super::foreign_lock::ForeignLock;
use super::rebuilds::rebuild;

/// Two nodes that do not reconcile by themselves, and repair what is found twice within half a second.
pub(super) fn start(kind: Kind) -> Nodes {
    Nodes::start_with(kind, 2, |_, command| with_reconcile(command, 3_600_000))
}

pub(super) fn with_reconcile(mut command: Command, interval_ms: u64) -> Command {
    command.env("STAMPEDE__RECONCILE__INTERVAL_MS", interval_ms.to_string());
    command.env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "500");
    command
}

/// A key of a sale in Redis.
pub(super) fn key(nodes: &Nodes, sale: SaleId, part: &str) -> String {
    let keys = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:{part}")]).unwrap();
    assert!(!keys.is_empty() && !keys.contains('\n'), "{part}: {keys}");
    keys
}

pub(super) async fn reconcile(shop: &Shop, dry_run: bool) -> Value {
    let done = shop.admin("reconcile", &json!({ "dry_run": dry_run })).await;
    assert_eq!(done.status, 200, "{:?}", done.body);
    done.json()
}

/// The findings of a report: what, about which order, and the outcome. Sorted.
pub(super) fn findings(report: &Value) -> Vec<(String, String, String)> {
    let text = |finding: &Value, member: &str| finding[member].as_str().unwrap_or_default().to_owned();
    let found = report["findings"].as_array().unwrap().iter();
    let mut found: Vec<_> =
        found.map(|one| (text(one, "finding"), text(one, "order_id"), text(one, "outcome"))).collect();
    found.sort();
    found
}

/// Buys for everyone until `stop`, cancels half of the orders, and buys again.
fn load(
    nodes: &Nodes,
    history: &Arc<Recorder>,
    sale: SaleId,
    buyers: &[Buyer],
    stop: &Arc<AtomicBool>,
) -> Vec<tokio::task::JoinHandle<()>> {
    let address = |n: usize| nodes.shops[n % nodes.shops.len()].address;
    let tasks = buyers.iter().enumerate().map(|(n, buyer)| {
        let (history, buyer, address, stop) = (history.clone(), buyer.clone(), address(n), stop.clone());
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                let attempt = history.buy(&mut client, sale, &buyer).await;
                if attempt.response == Response::Unknown {
                    let Ok(next) = Client::connect(address).await else { return };
                    client = next;
                }
                if let (true, Some(order)) = (n % 2 == 0, attempt.order) {
                    history.cancel(&mut client, sale, &buyer, order).await;
                }
            }
        })
    });
    tasks.collect()
}

/// Adds to the history that this user has tried to buy and got no answer, as if the node had died before: that explains a planted mark.
pub(super) fn note_request(history: &Recorder, sale: SaleId, user: UserId) {
    let (action, response, order) = (Action::Buy, Response::Unknown, None);
    history.add(Attempt { action, sale, user, start_us: now_us(), end_us: u64::MAX, response, order });
}

/// A user who has never bought.
pub(super) const GHOST: i64 = 4_000_000_000_000_000_001;

/// The present time as in a history.
fn now_us() -> u64 {
    u64::try_from(SystemClock.now().ms()).unwrap() * 1000
}

/// Every kind of difference is planted while buyers buy and cancel, found, and repaired; the orders on their way are left alone.
async fn differences_are_repaired_under_load(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, 24).await;
    let victims = nodes.shops[0].log_in(1000, 3).await;
    for _ in 0..count(20, 1) {
        let sale = nodes.create_sale(500).await;
        let history = Arc::new(Recorder::default());
        let mut client = nodes.shops[0].client().await;
        let mut orders = Vec::new();
        for victim in &victims {
            let bought = history.buy(&mut client, sale, victim).await;
            assert_eq!(bought.response, Response::Created);
            orders.push(bought.order.unwrap());
        }
        until("the outbox is empty", async || {
            redis::ask(nodes.redis.port(), &["xlen", &key(&nodes, sale, "out")]).unwrap() == "0"
        })
        .await;
        let stop = Arc::new(AtomicBool::new(false));
        let load = load(&nodes, &history, sale, &buyers, &stop);
        let live = key(&nodes, sale, "live");
        let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();

        // Three differences at once: a mark without an order, the mark of a cancelled order, and a higher cap.
        let dead: OrderId = orders[0];
        assert_eq!(history.cancel(&mut client, sale, &victims[0], dead).await.response, Response::Cancelled);
        until("the mark is released", async || ask(&["hexists", &live, &victims[0].id.to_string()]) == "0").await;
        ask(&["hset", &live, &victims[0].id.to_string(), &dead.to_string()]);
        // The next id of the same millisecond, which is not used.
        let ghost = OrderId::new(dead.get() + 1).unwrap().to_string();
        ask(&["hset", &live, &GHOST.to_string(), &ghost]);
        note_request(&history, sale, UserId::new(GHOST).unwrap());
        ask(&["hset", &key(&nodes, sale, "sale"), "cap", "600"]);
        let mut expected = [
            ("cap_differs".to_owned(), String::new()),
            ("dead_row_with_mark".to_owned(), dead.to_string()),
            ("mark_without_row".to_owned(), ghost),
        ];
        expected.sort();
        let with = |outcome: &str| -> Vec<_> {
            expected.iter().map(|(what, order)| (what.clone(), order.clone(), outcome.to_owned())).collect()
        };
        // A dry run changes nothing, so it finds the same twice.
        for _ in 0..2 {
            assert_eq!(findings(&reconcile(&nodes.shops[1], true).await), with("reported"));
        }
        assert_eq!(findings(&reconcile(&nodes.shops[1], false).await), with("repaired"));
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), vec![]);
        assert_eq!(ask(&["hexists", &live, &victims[0].id.to_string()]), "0");
        assert_eq!(ask(&["hget", &key(&nodes, sale, "sale"), "cap"]), "500");

        // A cap that the gate cannot have set by itself is not taken over.
        let capped_us = now_us();
        ask(&["hset", &key(&nodes, sale, "sale"), "cap", "1"]);
        let cap = ("cap_differs".to_owned(), String::new(), "repaired".to_owned());
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), [cap]);
        assert_eq!(ask(&["hget", &key(&nodes, sale, "sale"), "cap"]), "500");
        let repaired_us = now_us();

        // A lower cap with room for all marks is what a reduction would leave: the ledger takes it over.
        ask(&["hset", &key(&nodes, sale, "sale"), "cap", "400"]);
        let cap = ("cap_differs".to_owned(), String::new(), "repaired".to_owned());
        assert_eq!(findings(&reconcile(&nodes.shops[1], false).await), [cap]);
        let stock = async || {
            let ledger = read_only(&nodes.storages[0]).await;
            let sale = ledger.sale(sale).await.unwrap().unwrap();
            ledger.close().await;
            (sale.cap, sale.total)
        };
        assert_eq!((stock().await, ask(&["hget", &key(&nodes, sale, "sale"), "cap"]).as_str()), ((400, 400), "400"));

        // A live row without a mark: the whole gate is rebuilt.
        ask(&["hdel", &live, &victims[1].id.to_string()]);
        let lost = ("live_row_without_mark".to_owned(), orders[1].to_string(), "repaired".to_owned());
        assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), [lost]);
        // Another node may have begun the rebuild, which then goes on.
        let live = key(&nodes, sale, "live");
        until("the mark is back", async || ask(&["hget", &live, &victims[1].id.to_string()]) == orders[1].to_string())
            .await;
        stop.store(true, Ordering::Relaxed);
        for task in load {
            task.await.unwrap();
        }
        nodes.wait_until_ready().await;
        assert_eq!(findings(&reconcile(&nodes.shops[0], true).await), vec![], "nothing is left");
        assert_eq!((stock().await, ask(&["hget", &key(&nodes, sale, "sale"), "cap"]).as_str()), ((400, 400), "400"));
        // With that cap the gate was right to say so.
        history.retain(|attempt| {
            attempt.response != Response::SoldOut || attempt.end_us < capped_us || attempt.start_us > repaired_us
        });
        nodes.verify(&history, sale).await;
    }
    let log = nodes.shops[1].client().await.get("/admin/v1/reconcile?limit=100", TOKEN).await.unwrap().json();
    let logged = findings(&log);
    assert_eq!(logged.len() as u64, (6 * count(20, 1)).min(100));
    assert!(logged.iter().all(|(_, _, outcome)| outcome == "repaired"), "{logged:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_are_repaired_under_load_on_mariadb() {
    differences_are_repaired_under_load(Kind::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_are_repaired_under_load_on_postgres() {
    differences_are_repaired_under_load(Kind::Postgres).await;
}

/// Versions of the gate that are not the ledger's are planted while buyers buy and cancel. With an older one, the nodes repeat the edit by
/// themselves, within about a second. With a newer one the gate takes no edit; reconciling rebuilds it with the ledger's settings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_that_differ_are_repaired_under_load() {
    let nodes = Nodes::start_with(Kind::Postgres, 2, |_, command| {
        let mut command = with_reconcile(command, 3_600_000);
        command.env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "20");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 24).await;
    let stranger = nodes.shops[0].log_in(1000, 1).await.remove(0);
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    // With so short a pause, marks that are about to be released may be found as well.
    let has = |report: &Value, finding: &str, outcome: &str| {
        findings(report).contains(&(finding.to_owned(), String::new(), outcome.to_owned()))
    };
    for _ in 0..count(20, 1) {
        let sale = nodes.create_sale(500).await;
        let settings = key(&nodes, sale, "sale");
        let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
        let load = load(&nodes, &history, sale, &buyers, &stop);
        let edit = async |what: &str| nodes.shops[1].admin(&format!("sales/{sale}/{what}"), &Value::Null).await.status;
        assert_eq!(ask(&["hmget", &settings, "ver", "cap", "state"]), "1\n500\non_sale");

        ask(&["hset", &settings, "ver", "0", "cap", "400"]);
        until("an edit with the settings of the ledger is repeated", async || {
            ask(&["hmget", &settings, "ver", "cap", "state"]) == "1\n500\non_sale"
        })
        .await;

        ask(&["hset", &settings, "ver", "1000", "cap", "600"]);
        for _ in 0..2 {
            assert!(has(&reconcile(&nodes.shops[1], true).await, "newer_version", "reported"));
        }
        assert_eq!(edit("pause").await, 200);
        assert_eq!(ask(&["hmget", &settings, "ver", "cap", "state"]), "1000\n600\non_sale", "it takes no edit");
        assert!(has(&reconcile(&nodes.shops[0], false).await, "newer_version", "repaired"));
        // Another node may have begun the rebuild, which then goes on.
        until("the gate has the settings of the ledger", async || {
            ask(&["hmget", &settings, "ver", "cap", "state"]) == "2\n500\npaused"
        })
        .await;
        let answer = async |shop: &Shop| history.buy(&mut shop.client().await, sale, &stranger).await.response;
        for shop in &nodes.shops {
            until("the sale is paused", async || answer(shop).await == Response::Paused).await;
        }
        assert_eq!(edit("resume").await, 200);
        assert_eq!(ask(&["hmget", &settings, "ver", "cap", "state"]), "3\n500\non_sale");
        for shop in &nodes.shops {
            until("the sale is sold", async || answer(shop).await.is_confirmation()).await;
        }

        stop.store(true, Ordering::Relaxed);
        for task in load {
            task.await.unwrap();
        }
        nodes.wait_until_ready().await;
        assert_eq!(findings(&reconcile(&nodes.shops[0], true).await), vec![], "nothing is left");
        nodes.verify(&history, sale).await;
    }
}

/// An order that is recorded from its mark when the sale is over, by reconciling or by a rebuild, was admitted before the end.
async fn orders_of_marks_have_a_time_of_their_sale(kind: Kind) {
    let cluster = Cluster::start_with(Servers::on(kind), 2, |_, command| with_reconcile(command, 3_600_000)).await;
    let (nodes, sale) = (&cluster.nodes, cluster.nodes.create_sale(5).await);
    let history = Recorder::default();
    let bought = history.buy(&mut nodes.shops[0].client().await, sale, &cluster.buyers[0]).await;
    let order = bought.order.unwrap();
    // The sale is over by the clocks of the nodes.
    (0..2).for_each(|n| cluster.set_clock(n, 2 * 3600));
    for shop in &nodes.shops {
        until("the sale is over", async || {
            shop.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap().text("state") == "ended"
        })
        .await;
    }
    let live = key(nodes, sale, "live");
    let plant = |user: i64, n: i64| {
        let ghost = OrderId::new(order.get() + n).unwrap().to_string();
        note_request(&history, sale, UserId::new(user).unwrap());
        cluster.ask(&["hset", &live, &user.to_string(), &ghost]);
        ghost
    };
    let ghost = plant(GHOST, 1);
    let repaired = ("mark_without_row".to_owned(), ghost, "repaired".to_owned());
    assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), [repaired]);
    let log = nodes.shops[0].client().await.get("/admin/v1/reconcile", TOKEN).await.unwrap().json();
    let logged_at: Timestamp = serde_json::from_value(log["findings"][0]["at"].clone()).unwrap();
    assert!(logged_at < SystemClock.now().plus(Duration::from_secs(60)), "by the clock of the database: {log}");
    plant(GHOST + 1, 2);
    assert_eq!(rebuild(&cluster, 1).await, Some(200));
    let shops: Vec<&Shop> = nodes.shops.iter().collect();
    assert_eq!(verify(&history, &cluster.direct, &shops, sale).await, 3);
    cluster.stop();
}

/// Another client of the database keeps the row of one sale locked: the other one is repaired all the same, and soon.
async fn locked_sale_holds_up_no_repair_of_another(kind: Kind) {
    let nodes = start(kind);
    let (locked, other) = (nodes.create_sale(9).await, nodes.create_sale(9).await);
    let (of_locked_sale, of_other_sale) = (Recorder::default(), Recorder::default());
    let plant = |sale: SaleId, n: i64| {
        let ghost = OrderId::new(sale.get() + n).unwrap().to_string();
        let user = UserId::new(GHOST + n).unwrap();
        note_request(if sale == locked { &of_locked_sale } else { &of_other_sale }, sale, user);
        redis::ask(nodes.redis.port(), &["hset", &key(&nodes, sale, "live"), &user.to_string(), &ghost]).unwrap();
        ghost
    };
    let mark = |ghost: String, outcome: &str| ("mark_without_row".to_owned(), ghost, outcome.to_owned());
    let of_other: Vec<_> = (1..=3).map(|n| mark(plant(other, n), "repaired")).collect();
    let of_locked: Vec<String> = (4..=9).map(|n| plant(locked, n)).collect();
    let lock = ForeignLock::on_sales(kind, &nodes.storages[0], &[locked]).await;
    let found = findings(&reconcile(&nodes.shops[0], false).await);
    let (repaired, failed): (Vec<_>, Vec<_>) = found.into_iter().partition(|(_, _, outcome)| outcome == "repaired");
    assert_eq!(repaired, of_other);
    assert!(matches!(&failed[..], [one] if of_locked.contains(&one.1)), "one is tried: {failed:?}");
    lock.release().await;
    until("the locked sale is repaired", async || {
        reconcile(&nodes.shops[0], false).await;
        findings(&reconcile(&nodes.shops[0], true).await).is_empty()
    })
    .await;
    assert_eq!(nodes.verify(&of_other_sale, other).await, 3);
    assert_eq!(nodes.verify(&of_locked_sale, locked).await, 6);
}

on_each_database!(servers: orders_of_marks_have_a_time_of_their_sale, locked_sale_holds_up_no_repair_of_another);

/// A node has died after an admission, and its entry in the outbox is lost. The order is recorded when its owner asks again, with a time of
/// its sale, which is over by then.
async fn order_of_an_owner_who_asks_after_the_end_has_a_time_of_its_sale(kind: Kind) {
    let nodes = start(kind);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let (history, other) = (Recorder::default(), nodes.create_sale(1).await);
    let mut client = nodes.shops[1].client().await;
    let bought = Recorder::default().buy(&mut client, other, &buyers[0]).await.order.unwrap();
    let order = OrderId::new(bought.get() + 1).unwrap();
    let sale = nodes.create_ended_sale_with_mark(buyers[1].id, order).await;
    let mine = history.buy(&mut client, sale, &buyers[1]).await;
    assert_eq!((mine.response, mine.order), (Response::Already, Some(order)));
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

on_each_database!(
    @module of_owners, Postgres,
    order_of_an_owner_who_asks_after_the_end_has_a_time_of_its_sale
);

/// How often Redis has executed a command.
pub(super) fn calls(nodes: &Nodes, command: &str) -> u64 {
    let stats = redis::ask(nodes.redis.port(), &["info", "commandstats"]).unwrap();
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

/// One of two sales cannot be compared for the second time, because the node has lost the right to read its keys: the other one is repaired
/// all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sale_that_cannot_be_compared_again_holds_up_no_other() {
    let kind = Kind::Postgres;
    let server = kind.server().unwrap();
    let storage = Storage::with(Some(kind.create_database(server, server.port())));
    let redis = redis::start().unwrap();
    let port = redis.port();
    let ask = |command: &[&str]| redis::ask(port, command).unwrap();
    ask(&["acl", "setuser", "node", "on", ">word", "~*", "&*", "+@all"]);
    let mut node = with_reconcile(command(&storage), 3_600_000);
    node.args(["--tier", "shared", "--redis", &format!("redis://node:word@127.0.0.1:{port}/")]);
    node.env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "3000");
    let shops = vec![Shop::run(node)];
    let nodes = Nodes { redis, storages: vec![storage], shops };
    let shop = &nodes.shops[0];
    let (hidden, other) = (nodes.create_sale(3).await, nodes.create_sale(3).await);
    let ghost = |n: i64| OrderId::new(hidden.get() + n).unwrap().to_string();
    for (n, sale) in [(1, hidden), (2, other)] {
        ask(&["hset", &key(&nodes, sale, "live"), &GHOST.to_string(), &ghost(n)]);
    }

    let read = || (calls(&nodes, "hscan"), calls(&nodes, "xrange"));
    let before = read();
    let address = shop.address;
    let reconciling = tokio::spawn(async move {
        let mut client = Client::connect(address).await.unwrap();
        client.post("/admin/v1/reconcile", TOKEN, &json!({ "dry_run": false })).await.unwrap()
    });
    until("every sale is compared once", async || {
        let now = read();
        now.0 >= before.0 + 2 && now.1 >= before.1 + 2
    })
    .await;
    let all = ask(&["keys", "*"]);
    let of_hidden = format!("{{{hidden}}}");
    // All keys of the other sales, those too that do not exist.
    let of_sale = |key: &str| key.split_once('}').map_or(format!("~{key}"), |(sale, _)| format!("~{sale}}}*"));
    let allowed: Vec<String> = all.lines().filter(|key| !key.contains(&of_hidden)).map(of_sale).collect();
    // Keys of no sale.
    let others = format!("~{}:[a-z]*", key(&nodes, hidden, "live").split_once(":{").unwrap().0);
    let fixed = ["acl", "setuser", "node", "resetkeys", &others];
    ask(&fixed.into_iter().chain(allowed.iter().map(String::as_str)).collect::<Vec<_>>());
    let reply = reconciling.await.unwrap();
    assert_eq!(reply.status, 503, "one sale could not be compared: {:?}", reply.body);
    let log = shop.client().await.get("/admin/v1/reconcile", TOKEN).await.unwrap().json();
    assert_eq!(findings(&log), [("mark_without_row".to_owned(), ghost(2), "repaired".to_owned())]);

    ask(&["acl", "setuser", "node", "~*"]);
    nodes.wait_until_open(hidden).await;
    let found = findings(&reconcile(shop, false).await);
    assert_eq!(found, [("mark_without_row".to_owned(), ghost(1), "repaired".to_owned())]);
    for sale in [hidden, other] {
        let history = Recorder::default();
        note_request(&history, sale, UserId::new(GHOST).unwrap());
        assert_eq!(nodes.verify(&history, sale).await, 1);
    }
}

/// Orders that are on their way for seconds are found by no comparison: their entry in the outbox says that they are not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_on_their_way_are_not_repaired() {
    // Neither node settles an order before the other one has compared gate and ledger several times.
    let slow = "buy.admitted=pause:1500;outbox.settle=pause:1000";
    let nodes = Nodes::start_with(Kind::MariaDb, 2, |n, command| {
        let mut command = with_reconcile(command, 200);
        if n == 1 {
            command.env("STAMPEDE_FAILPOINTS", slow);
        }
        command
    });
    let buyers = nodes.shops[0].log_in(0, 12).await;
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    for _ in 0..count(20, 1) {
        let sale = nodes.create_sale(8).await;
        let (history, outbox) = (Arc::new(Recorder::default()), key(&nodes, sale, "out"));
        let tasks: Vec<_> = buyers
            .iter()
            .cloned()
            .map(|buyer| {
                let (history, address) = (history.clone(), nodes.shops[1].address);
                tokio::spawn(async move {
                    let mut client = Client::connect(address).await.unwrap();
                    history.buy(&mut client, sale, &buyer).await;
                })
            })
            .collect();
        until("an order is on its way", async || ask(&["xlen", &outbox]) != "0").await;
        let mut compared = 0;
        while tasks.iter().any(|task| !task.is_finished()) || ask(&["xlen", &outbox]) != "0" {
            assert_eq!(findings(&reconcile(&nodes.shops[0], false).await), vec![]);
            compared += 1;
        }
        assert!(compared > 2, "{compared} comparisons");
        nodes.storm(&history, sale, &buyers, 1).await;
        let shops: Vec<&Shop> = nodes.shops.iter().collect();
        assert_eq!(verify(&history, &nodes.storages[0], &shops, sale).await, 8);
    }
    let log = nodes.shops[0].client().await.get("/admin/v1/reconcile", TOKEN).await.unwrap().json();
    assert_eq!(findings(&log), vec![], "nothing was repaired");
}

/// The interval is that of all nodes together: more nodes do not compare more often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_the_nodes_reconciles_in_each_interval() {
    const INTERVAL: Duration = Duration::from_secs(2);
    const TIMES: f64 = 6.0;
    let nodes = Nodes::start_with(Kind::Postgres, 3, |_, command| with_reconcile(command, INTERVAL.as_millis() as u64));
    let (buyers, sale) = (nodes.shops[0].log_in(0, 3).await, nodes.create_sale(3).await);
    let history = Arc::new(Recorder::default());
    let compared = async || sum(&nodes, "stampede_reconcile_seconds_count").await;
    let before = compared().await;
    until("the gate is compared", async || compared().await > before).await;
    let (first, started) = (compared().await, Instant::now());
    nodes.storm(&history, sale, &buyers, 1).await;
    until("the gate is compared several times", async || compared().await >= first + TIMES).await;
    let times = compared().await - first;
    let took = started.elapsed();
    // The first of them may have begun an interval before it was seen, and one may be late.
    assert!(INTERVAL.mul_f64(times - 1.0) <= took, "{times} comparisons in {took:?}");
    assert_eq!(nodes.verify(&history, sale).await, 3);
}

//! A sale with many live orders: for how long a rebuild of the gate closes it, and whether it can be compared with the gate.

use std::time::{Duration, Instant};

use serde_json::json;
use stampede_core::ports::Admitted;
use stampede_core::{Clock as _, OrderId, SaleId, SystemClock, UserId};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{count, redis, until};

use crate::rebuild::buy_when_open;
use crate::shared::Nodes;
use crate::shop::{Kind, Storage, TOKEN, ledger, verify};

use super::drift::{findings, key, note_request};

/// Records this many orders without asking the gate.
async fn record(storage: &Storage, sale: SaleId, orders: i64) {
    let stores = ledger(storage).await;
    let epoch = stores.ledger.sale(sale).await.unwrap().unwrap().epoch;
    let at = SystemClock.now();
    let order = |n| Admitted { order: OrderId::new(n).unwrap(), user: UserId::new(n).unwrap(), seq: n, at };
    let recorded: Vec<Admitted> = (1..=orders).map(order).collect();
    for batch in recorded.chunks(1000) {
        stores.ledger.record(sale, epoch, batch).await.unwrap();
    }
    stores.ledger.close().await;
}

/// Adds to the history that the users of these orders have requested them and got no answer.
fn note_requests(history: &Recorder, sale: SaleId, orders: i64) {
    (1..=orders).for_each(|n| note_request(history, sale, UserId::new(n).unwrap()));
}

/// A sale with so many marks that Redis needs longer than it is waited for to return all of them at once: it is rebuilt with the marks still
/// in Redis, and compared with the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_with_millions_of_marks_is_rebuilt_and_compared() {
    // A comparison of millions of orders takes longer than requests may take by default.
    const LONGEST_COMPARISON: Duration = Duration::from_secs(300);
    let orders = count(1_500_000, 20_000) as i64;
    let with_time = |_, mut command: std::process::Command| {
        command.env("STAMPEDE__HTTP__ANSWER_TIMEOUT_MS", LONGEST_COMPARISON.as_millis().to_string());
        command
    };
    let nodes = Nodes::start_with(Kind::Postgres, 1, with_time);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 2).await;
    let sale = nodes.create_sale(2_000_000).await;
    record(&nodes.storages[0], sale, orders).await;
    let history = Recorder::default();
    for buyer in &buyers {
        // The first time the marks are loaded from the ledger.
        redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
        buy_when_open(shop, &history, sale, buyer).await;
        let marks = redis::ask(nodes.redis.port(), &["hlen", &key(&nodes, sale, "live")]).unwrap();
        assert!(marks.parse::<i64>().unwrap() > orders, "{marks} marks");
    }
    // While the marks are read, a call of the gate may take too long on a busy machine. The comparison is refused then.
    let compare = async || {
        let mut client = shop.client().await.with_timeout(LONGEST_COMPARISON);
        client.post("/admin/v1/reconcile", TOKEN, &json!({ "dry_run": true })).await.unwrap()
    };
    let mut compared = compare().await;
    until("gate and database can be compared", async || {
        if compared.status == 503 {
            compared = compare().await;
        }
        compared.status != 503
    })
    .await;
    assert_eq!(compared.status, 200, "{:?}", compared.body);
    assert_eq!(findings(&compared.json()), []);
    note_requests(&history, sale, orders);
    assert_eq!(verify(&history, &nodes.storages[0], &[shop], sale).await as i64, orders + 2);
}

/// A sale with 100,000 live orders is rebuilt, from the ledger alone and with the marks still in Redis. It is sold again within 5 s after
/// Redis answers.
async fn a_large_sale_is_rebuilt(kind: Kind) {
    // The fast run has fewer orders and a build that is not optimized, so its limit is only that of `until`.
    let (orders, limit) = (count(100_000, 10_000) as i64, Duration::from_secs(count(5, 30)));
    let nodes = Nodes::start(kind, 1);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 2).await;
    let sale = nodes.create_sale(200_000).await;
    record(&nodes.storages[0], sale, orders).await;
    let history = Recorder::default();
    let lost_memory = || {
        nodes.redis.kill().unwrap();
        nodes.redis.restart().unwrap();
    };
    let lost_scripts = || drop(redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap());
    let losses: [(&str, &dyn Fn()); 2] = [("memory", &lost_memory), ("scripts", &lost_scripts)];
    for (n, (what, lose)) in losses.into_iter().enumerate() {
        lose();
        let answers = Instant::now();
        buy_when_open(shop, &history, sale, &buyers[n]).await;
        let closed = answers.elapsed();
        let rebuild = shop.metric("stampede_gate_rebuild_seconds_sum").await;
        eprintln!("{kind:?}: lost its {what}: sold again after {closed:?}; all rebuilds took {rebuild:.3} s");
        assert!(closed <= limit, "lost its {what}: sold again after {closed:?}");
        let marks = redis::ask(nodes.redis.port(), &["hlen", &key(&nodes, sale, "live")]).unwrap();
        assert_eq!(marks, (orders + 2 + n as i64).to_string(), "the marks and the epoch");
    }
    note_requests(&history, sale, orders);
    let live = verify(&history, &nodes.storages[0], &[shop], sale).await;
    assert_eq!(live as i64, orders + 2);
}

on_each_database!(servers: a_large_sale_is_rebuilt);

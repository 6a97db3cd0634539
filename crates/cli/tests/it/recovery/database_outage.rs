//! The database is killed and restarted, slow, away, or in a deadlock with another client.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::{AssertSqlSafe, Connection as _};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{count, until};

use crate::cluster::{BUYERS, Cluster, Servers};
use crate::quarantine::execute;
use crate::shop::{Buyer, Kind, Shop, Storage, verify};

use super::{OUTAGES, seeds};

async fn the_database_is_killed(kind: Kind) {
    let cluster = Cluster::start_with(Servers::with_own_database(kind), 2, |_, command| command).await;
    let database = cluster.database.as_ref().unwrap();
    for seed in seeds(OUTAGES) {
        // The first time for long: pauses between retries are at their maximum by then.
        let away = match seed {
            0 => count(30_000, 500),
            _ => StdRng::seed_from_u64(seed).random_range(0..count(5_000, 500)),
        };
        let away = Duration::from_millis(away);
        eprintln!("{kind:?}, seed {seed}: away for {away:?}");
        let round = cluster.begin().await;
        database.kill().unwrap();
        tokio::time::sleep(away).await;
        database.restart().unwrap();
        cluster.until_selling(&round).await;
        round.assert_bounded_latency();
        cluster.end(round).await;
    }
    cluster.stop();
}

/// The database is slow for all nodes, or cannot be reached by all or one of them.
async fn the_database_is_slow_or_away(kind: Kind) {
    let cluster = Cluster::start(kind, 2).await;
    let faults = [Fault::Delay(Duration::from_millis(40)), Fault::Cut, Fault::Hang, Fault::DropResponses];
    for seed in 0..count(4 * OUTAGES, 4) {
        let mut rng = StdRng::seed_from_u64(seed);
        let fault = faults[seed as usize % faults.len()];
        let (affected, span) = (rng.random_range(1..=2), rng.random_range(500..count(5_000, 1_200)));
        eprintln!("{kind:?}, seed {seed}: {fault:?} for {span} ms on {affected} nodes");
        let round = cluster.begin().await;
        let wires = &cluster.to_database[..affected];
        wires.iter().for_each(|wire| wire.set(fault));
        tokio::time::sleep(Duration::from_millis(span)).await;
        wires.iter().for_each(|wire| wire.set(Fault::None));
        if fault == Fault::DropResponses {
            // Requests without a response are never answered; their connections are closed.
            wires.iter().for_each(stampede_testkit::Proxy::cut_all);
        }
        cluster.until_selling(&round).await;
        round.assert_bounded_latency();
        cluster.end(round).await;
    }
    cluster.stop();
}

/// The first buyers wait for the database until their timeout. From then on buyers are refused at once, and no crowd waits; soon after the
/// database is back, every node sells.
async fn buyers_are_refused_at_once_while_the_database_is_away(kind: Kind) {
    const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
    const AT_ONCE: Duration = Duration::from_secs(1);
    const SELLS_WITHIN: Duration = Duration::from_secs(3);
    let cluster = Cluster::start_with(Servers::on(kind), 2, |_, mut command| {
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", ANSWER_TIMEOUT.as_millis().to_string());
        command
    })
    .await;
    let (nodes, buyers) = (&cluster.nodes, &cluster.buyers);
    let (sale, history) = (nodes.create_sale(BUYERS as u32).await, Recorder::default());
    let buy = async |shop: &Shop, buyer: &Buyer| {
        let started = Instant::now();
        let response = history.buy(&mut shop.client().await, sale, buyer).await.response;
        (response, started.elapsed())
    };
    // Sessions are known on every node, without the database.
    for (shop, buyer) in nodes.shops.iter().flat_map(|shop| buyers.iter().map(move |buyer| (shop, buyer))) {
        assert_eq!(shop.client().await.get("/v1/orders", &buyer.token).await.unwrap().status, 200);
    }
    // In the second outage the first ones have orders, which are read.
    for fault in [Fault::Cut, Fault::Hang] {
        cluster.to_database.iter().for_each(|wire| wire.set(fault));
        let (first, second) = (buy(&nodes.shops[0], &buyers[0]), buy(&nodes.shops[1], &buyers[1]));
        let ((one, _), (other, _)) = tokio::join!(first, second);
        assert_eq!((one, other), (Response::Unknown, Response::Unknown), "{fault:?}");
        for shop in &nodes.shops {
            let open = async || shop.metric("stampede_ledger_breaker_open").await == 1.0;
            let after = until("the breaker is open", open).await;
            assert!(after < AT_ONCE, "{fault:?}: {after:?}");
            for buyer in &buyers[2..] {
                let (response, took) = buy(shop, buyer).await;
                assert!(response == Response::Unknown && took < AT_ONCE, "{fault:?}: {response:?} after {took:?}");
            }
        }
        cluster.to_database.iter().for_each(|wire| wire.set(Fault::None));
        let back = Instant::now();
        for (shop, buyer) in nodes.shops.iter().zip(buyers) {
            until("the node sells", async || buy(shop, buyer).await.0.is_confirmation()).await;
        }
        assert!(back.elapsed() < SELLS_WITHIN, "{fault:?}: {:?}", back.elapsed());
    }
    for shop in &nodes.shops {
        assert_eq!(shop.metric("stampede_ledger_breaker_open").await, 0.0);
    }
    for buyer in buyers {
        until("everyone has an order", async || buy(&nodes.shops[0], buyer).await.0.is_confirmation()).await;
    }
    let shops: Vec<&Shop> = nodes.shops.iter().collect();
    assert_eq!(verify(&history, &cluster.direct, &shops, sale).await, buyers.len());
    cluster.stop();
}

/// Locks the live orders of a sale and then the sale: the other way round than the nodes, which lock the sale first. Rolls back.
async fn lock_in_the_other_order(kind: Kind, storage: &Storage, sale: SaleId) {
    let url = storage.url();
    let orders = AssertSqlSafe(format!("SELECT id FROM orders WHERE sale_id = {sale} AND live = 1 FOR UPDATE"));
    let then = AssertSqlSafe(format!("SELECT id FROM sale WHERE id = {sale} FOR UPDATE"));
    // Meanwhile a node locks the sale and waits for an order.
    let pause = Duration::from_millis(60);
    // The node is the victim of the deadlock. Should the database choose this client, whose transaction is rolled back anyway, the next
    // try follows.
    if kind == Kind::MariaDb {
        let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        // A transaction that has written more than the other one is not the victim.
        let rows = vec!["(1)"; 300].join(",");
        sqlx::raw_sql(AssertSqlSafe(format!("INSERT INTO weight VALUES {rows}"))).execute(&mut *tx).await.unwrap();
        sqlx::raw_sql(orders).execute(&mut *tx).await.unwrap();
        tokio::time::sleep(pause).await;
        let _ = sqlx::raw_sql(then).execute(&mut *tx).await;
        tx.rollback().await.unwrap();
    } else {
        let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        // The session that looks for deadlocks first is the victim.
        sqlx::raw_sql("SET LOCAL deadlock_timeout = '5s'").execute(&mut *tx).await.unwrap();
        sqlx::raw_sql(orders).execute(&mut *tx).await.unwrap();
        tokio::time::sleep(pause).await;
        let _ = sqlx::raw_sql(then).execute(&mut *tx).await;
        tx.rollback().await.unwrap();
    }
}

/// How many deadlocks the server has resolved.
async fn deadlocks(kind: Kind, storage: &Storage) -> i64 {
    let url = storage.url();
    if kind == Kind::MariaDb {
        let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
        let sql = "SELECT CAST(variable_value AS INT) FROM information_schema.global_status WHERE variable_name = 'INNODB_DEADLOCKS'";
        sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap()
    } else {
        let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
        let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap()
    }
}

async fn nodes_are_in_deadlocks_with_another_client(kind: Kind) {
    let mut cluster = Cluster::start(kind, 2).await;
    let storage = &cluster.direct;
    if kind == Kind::MariaDb {
        execute(kind, storage, "CREATE TABLE weight (n INT)").await;
    } else {
        // A session looks for a deadlock once, this long after it began to wait: after the other client's pause, so that there is one by
        // then. Nodes that are started again have only such sessions.
        let name = storage.url().rsplit('/').next().unwrap().to_owned();
        execute(kind, storage, &format!("ALTER DATABASE {name} SET deadlock_timeout = '200ms'")).await;
        (0..2).for_each(|n| cluster.restart(n));
    }
    let (wanted, storage) = (count(50, 3) as i64, &cluster.direct);
    let round = cluster.begin().await;
    let (before, deadline) = (deadlocks(kind, storage).await, Instant::now() + Duration::from_secs(300));
    while deadlocks(kind, storage).await < before + wanted {
        lock_in_the_other_order(kind, storage, round.sale).await;
        assert!(Instant::now() < deadline, "there are hardly any deadlocks");
    }
    cluster.until_selling(&round).await;
    cluster.end(round).await;
    cluster.stop();
}

on_each_database!(
    servers: the_database_is_killed,
    the_database_is_slow_or_away,
    buyers_are_refused_at_once_while_the_database_is_away,
    nodes_are_in_deadlocks_with_another_client
);

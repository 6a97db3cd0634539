//! The database is killed and restarted, slow, away, or in a deadlock with another client.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::{AssertSqlSafe, Connection as _};
use stampede_core::SaleId;
use stampede_testkit::count;
use stampede_testkit::proxy::Fault;

use crate::cluster::{Cluster, Servers};
use crate::quarantine::execute;
use crate::shop::{Kind, Storage};

use super::{OUTAGES, seeds};

async fn the_database_is_killed(kind: Kind) {
    let cluster = Cluster::start_with(Servers::with_own_database(kind), 2, |_, command| command).await;
    let database = cluster.database.as_ref().unwrap();
    for seed in seeds(OUTAGES) {
        let away = Duration::from_millis(StdRng::seed_from_u64(seed).random_range(0..count(5_000, 500)));
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
        // Sessions of nodes look for deadlocks soon. Nodes that are started again have only such sessions.
        let name = storage.url().rsplit('/').next().unwrap().to_owned();
        execute(kind, storage, &format!("ALTER DATABASE {name} SET deadlock_timeout = '20ms'")).await;
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
    nodes_are_in_deadlocks_with_another_client
);

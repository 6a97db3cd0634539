//! `/readyz` while the database is away: a node that answers buyers before their orders are recorded goes on, others do not.

use std::time::{Duration, Instant};

use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, redis, until};

use super::{consumer_command, queued};
use crate::shop::{Kind, Shop, Storage, command};

/// The status of `/readyz`, and whether the answer says that everything can be used.
async fn readiness(shop: &Shop) -> (u16, bool) {
    let reply = shop.client().await.get("/readyz", "").await.unwrap();
    (reply.status.as_u16(), reply.body == "ready\n")
}

async fn until_readiness_is(expected: [(u16, bool); 3], shops: &[Shop; 3], when: &str) {
    for (shop, expected) in shops.iter().zip(expected) {
        until(when, async || readiness(shop).await == expected).await;
    }
}

async fn nodes_that_accept_orders_are_ready_without_the_database(kind: Kind) {
    const READY: (u16, bool) = (200, true);
    const WITHOUT_DATABASE: (u16, bool) = (200, false);
    const UNREADY: (u16, bool) = (503, false);
    let server = kind.server().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let url = kind.create_database(server, proxy.address().port());
    let redis = redis::start_durable().unwrap();
    let redis_url = redis::url(redis.port());
    let storages = [(); 3].map(|()| Storage::with(Some(url.clone())));
    let node = |storage: &Storage, answer_after: &str| {
        let mut command = queued(command(storage));
        command.args(["--redis", &redis_url]).env("STAMPEDE__QUEUE__ANSWER_AFTER", answer_after);
        Shop::run(command)
    };
    let shops = [
        node(&storages[0], "queue"),
        node(&storages[1], "ledger"),
        Shop::run(consumer_command(&storages[2], &redis_url)),
    ];
    until_readiness_is([READY; 3], &shops, "everything can be used").await;

    proxy.set(Fault::Cut);
    let accepting = [WITHOUT_DATABASE, UNREADY, UNREADY];
    until_readiness_is(accepting, &shops, "the database is away").await;
    proxy.set(Fault::None);
    until_readiness_is([READY; 3], &shops, "the database is back").await;
    proxy.set(Fault::Hang);
    until_readiness_is(accepting, &shops, "the database does not answer").await;

    redis.kill().unwrap();
    until_readiness_is([UNREADY; 3], &shops, "Redis is away, too").await;
    // It has lost the scripts, so the gate must be rebuilt, which needs the database.
    proxy.set(Fault::Cut);
    redis.restart().unwrap();
    let restarted_at = Instant::now();
    while restarted_at.elapsed() < Duration::from_secs(3) {
        assert_eq!(readiness(&shops[0]).await, UNREADY);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    proxy.set(Fault::None);
    until_readiness_is([READY; 3], &shops, "everything is back").await;
}

on_each_database!(@module on_postgres, Postgres, nodes_that_accept_orders_are_ready_without_the_database);

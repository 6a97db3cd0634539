//! Ids from a counter in Redis (`ids = "redis"`).

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use stampede_core::ids::Origin;
use stampede_core::{Clock as _, SystemClock};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage, command, temporary_storage, verify};

fn with_redis_ids(mut command: Command) -> Command {
    command.env("STAMPEDE__IDS", "redis");
    command
}

/// Whether the orders of all confirmed attempts have ids from the counter.
fn are_from_the_counter(history: &Recorder) -> bool {
    let now = SystemClock.now();
    let mut orders = history.ended().into_iter().filter_map(|attempt| attempt.order).peekable();
    orders.peek().is_some() && orders.all(|order| matches!(Origin::of(order.get(), now), Origin::Counter { .. }))
}

fn refused(mut command: Command) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

/// Nodes share the counter, also after Redis has lost it, and `check` accepts the ids.
async fn nodes_share_a_counter_in_redis(kind: Kind) {
    let nodes = Nodes::start_with(kind, 2, |_, command| with_redis_ids(command));
    let everyone = nodes.shops[0].log_in(0, 40).await;
    let sale = nodes.create_sale(20).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..15], 1).await;
    assert_eq!(history.count(Response::Created), 15);

    nodes.redis.kill().unwrap();
    nodes.redis.restart().unwrap();
    for prefix in ["order", "other"] {
        until("the counter has begun again", async || {
            let pattern = format!("stampede:*:ids:{prefix}:20*");
            !redis::ask(nodes.redis.port(), &["keys", &pattern]).unwrap().is_empty()
        })
        .await;
    }
    until("the sale goes on", async || {
        let mut client = nodes.shops[1].client().await;
        history.buy(&mut client, sale, &everyone[20]).await.response == Response::Created
    })
    .await;
    nodes.storm(&history, sale, &everyone, 2).await;
    assert!(are_from_the_counter(&history));
    assert_eq!(nodes.verify(&history, sale).await, 20);
    for shop in nodes.shops {
        assert!(shop.stop().success());
    }

    // Later snowflakes could repeat what was made.
    let error = refused(command(&Storage::with(Some(nodes.storages[0].url()))));
    assert!(error.contains("set ids = \"redis\""), "{error}");
}

on_each_database!(servers: nodes_share_a_counter_in_redis);

/// A shop that began with snowflakes goes on with ids from Redis. While Redis is unavailable, it reports that and sells nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn solo_can_change_to_redis_and_waits_for_it() {
    let (storage, redis) = (temporary_storage(), redis::start_durable().unwrap());
    let history = Recorder::default();
    let shop = Shop::open(&storage);
    let buyers = shop.log_in(0, 3).await;
    let sale = shop.create_sale(5).await;
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyers[0]).await.response, Response::Created);
    assert!(!are_from_the_counter(&history));
    assert!(shop.stop().success());

    let mut changed = with_redis_ids(command(&storage));
    changed.args(["--redis", &redis::url(redis.port())]);
    let shop = Shop::run(changed);
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyers[1]).await.response, Response::Created);
    redis.kill().unwrap();
    until("the shop is not ready", async || {
        let reply = shop.client().await.get("/readyz", "").await.unwrap();
        reply.status == 503 && reply.text("detail").contains("ids")
    })
    .await;
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyers[2]).await.response, Response::Unknown);
    redis.restart().unwrap();
    until("the shop is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200).await;
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyers[2]).await.response, Response::Created);
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 3);
    assert!(shop.stop().success());
}

/// After the last number of a day, buyers are refused at once and may retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buyers_get_503_once_the_ids_of_a_day_are_used_up() {
    let (storage, redis) = (temporary_storage(), redis::start().unwrap());
    let run = || {
        let mut command = with_redis_ids(command(&storage));
        command.args(["--redis", &redis::url(redis.port())]);
        Shop::run(command)
    };
    let shop = run();
    let buyers = shop.log_in(0, 2).await;
    let sale = shop.create_sale(5).await;
    let history = Recorder::default();
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyers[0]).await.response, Response::Created);
    assert!(shop.stop().success());

    let keys = redis::ask(redis.port(), &["keys", "stampede:*:ids:order:20*"]).unwrap();
    let (prefix, _) = keys.lines().next().unwrap().rsplit_once(':').unwrap();
    // Also on the next day, which may begin during the test.
    for days in 0..2 {
        let date = SystemClock.now().plus(Duration::from_secs(days * 86_400)).to_string();
        let key = format!("{prefix}:{}", &date[..10]);
        redis::ask(redis.port(), &["hset", &key, "used", &u32::MAX.to_string()]).unwrap();
    }
    let shop = run();
    let reply = shop.client().await.get("/readyz", "").await.unwrap();
    assert_eq!(reply.status, 503);
    assert!(reply.text("detail").contains("no ids can be made"), "{:?}", reply.body);
    let path = format!("/v1/sales/{sale}/orders");
    let asked = Instant::now();
    let reply = shop.client().await.post(&path, &buyers[1].token, &Value::Null).await.unwrap();
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    assert_eq!((reply.status.as_u16(), reply.text("code").as_str()), (503, "busy"));
    assert_eq!(reply.header("retry-after"), "1");
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 1);
    assert!(shop.stop().success());
}

#[test]
fn ids_from_redis_need_a_redis() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["config", "check"]).env("STAMPEDE__IDS", "redis");
    let error = refused(command);
    assert!(error.contains("ids = \"redis\" needs a Redis: set --redis"), "{error}");
}

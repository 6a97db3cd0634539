//! Redis loses what it holds: everything, one key of a sale, or the end of its append-only file.

use std::path::PathBuf;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;
use stampede_core::{Clock as _, SaleId, SystemClock};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Server, count, redis, until};

use crate::cluster::{Cluster, Servers};
use crate::shop::Kind;

use super::{CRASHES, seeds};

async fn random_pause(rng: &mut StdRng) {
    tokio::time::sleep(Duration::from_millis(rng.random_range(0..200))).await;
}

async fn redis_restarts_empty(kind: Kind) {
    let cluster = Cluster::start(kind, 3).await;
    for seed in seeds(CRASHES / 2) {
        eprintln!("{kind:?}, seed {seed}");
        let round = cluster.begin().await;
        random_pause(&mut StdRng::seed_from_u64(seed)).await;
        let before = cluster.rebuilds().await;
        cluster.nodes.redis.kill().unwrap();
        cluster.nodes.redis.restart().unwrap();
        cluster.until_rebuilt(before).await;
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

on_each_database!(servers: redis_restarts_empty);

/// Each key of a sale is lost in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_a_sale_is_lost() {
    let parts = ["sale", "live", "out"];
    let cluster = Cluster::start(Kind::MariaDb, 2).await;
    for seed in 0..count(CRASHES, parts.len() as u64) {
        let part = parts[seed as usize % parts.len()];
        eprintln!("seed {seed}: {part}");
        let round = cluster.begin().await;
        random_pause(&mut StdRng::seed_from_u64(seed)).await;
        let before = cluster.rebuilds().await;
        cluster.ask(&["del", &cluster.key(round.sale, part).unwrap()]);
        cluster.until_rebuilt(before).await;
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

/// The list of those who may not buy again is lost while nobody buys: the gate is rebuilt with it, and a cancelled order is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_ended_orders_of_a_sale_are_lost() {
    let cluster = Cluster::start(Kind::Postgres, 2).await;
    let (nodes, buyers) = (&cluster.nodes, &cluster.buyers[..3]);
    for seed in 0..count(CRASHES, 2) {
        eprintln!("seed {seed}");
        let voucher = nodes.shops[0].create_voucher().await;
        let begin = SystemClock.now();
        let end = begin.plus(Duration::from_secs(3600));
        let new = json!({ "voucher_id": voucher, "stock": 2, "begin": begin, "end": end, "buy_again": false });
        let sale: SaleId = nodes.shops[0].admin("sales", &new).await.text("id").parse().unwrap();
        nodes.wait_until_open(sale).await;
        let (history, mut client) = (Recorder::default(), nodes.shops[0].client().await);
        let mut orders = Vec::new();
        for buyer in &buyers[..2] {
            orders.push(history.buy(&mut client, sale, buyer).await.order.unwrap());
        }
        let cancelled = history.cancel(&mut client, sale, &buyers[0], orders[0]).await;
        assert_eq!(cancelled.response, Response::Cancelled);
        let key = |part: &str| cluster.key(sale, part).unwrap();
        let ended = key("ended");
        until("the order is in the list", async || cluster.ask(&["hlen", &ended]) == "2").await;
        let before = cluster.rebuilds().await;
        cluster.ask(&["del", &ended]);
        let has_cancelled = seed.is_multiple_of(2);
        if has_cancelled {
            let cancelled = history.cancel(&mut client, sale, &buyers[1], orders[1]).await;
            assert_eq!(cancelled.response, Response::Cancelled);
        }
        cluster.until_rebuilt(before).await;
        if has_cancelled {
            until("both orders are in the list", async || cluster.ask(&["hlen", &ended]) == "3").await;
        }
        nodes.wait_until_open(sale).await;
        for shop in &nodes.shops {
            let mut client = shop.client().await;
            until("a buyer whose order has ended is refused", async || {
                history.buy(&mut client, sale, &buyers[0]).await.response == Response::BoughtBefore
            })
            .await;
            until("another buyer gets what was cancelled", async || {
                history.buy(&mut client, sale, &buyers[2]).await.response.is_confirmation()
            })
            .await;
        }
        nodes.verify(&history, sale).await;
    }
    cluster.stop();
}

/// The file to which a server appends.
fn append_only_file(redis: &Server) -> PathBuf {
    let files = std::fs::read_dir(redis.directory().join("appendonlydir")).unwrap();
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(".incr.aof"));
    files.sort();
    files.pop().unwrap()
}

/// Redis dies, and a part of what it has confirmed is not on its disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_append_only_file_is_cut_short() {
    let servers = Servers { redis: redis::start_durable().unwrap(), ..Servers::on(Kind::Postgres) };
    let cluster = Cluster::start_with(servers, 2, |_, command| command).await;
    for seed in seeds(CRASHES) {
        let mut rng = StdRng::seed_from_u64(seed);
        let lost = rng.random_range(1..5_000);
        eprintln!("seed {seed}: {lost} bytes");
        let round = cluster.begin().await;
        random_pause(&mut rng).await;
        let before = cluster.rebuilds().await;
        cluster.nodes.redis.kill().unwrap();
        let file = std::fs::File::options().write(true).open(append_only_file(&cluster.nodes.redis)).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length.saturating_sub(lost)).unwrap();
        drop(file);
        cluster.nodes.redis.restart().unwrap();
        cluster.until_rebuilt(before).await;
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

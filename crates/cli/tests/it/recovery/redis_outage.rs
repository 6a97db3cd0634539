//! Redis is paused, slow, or refuses writes, or one node is cut off from it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_proof::history::{Action, Response};
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{count, redis, until};

use crate::cluster::{BUYERS, Cluster, MAX_LATENCY, Round, Servers};
use crate::rebuild::buy_when_open;
use crate::shared::gate_calls::{Monitor, requested_orders};
use crate::shop::{Buyer, Kind, TOKEN};

use super::{OUTAGES, seeds};

/// A buyer who has an order in this round and keeps it.
async fn owner(cluster: &Cluster, round: &Round, phone: u64) -> Buyer {
    let buyer = cluster.nodes.shops[0].log_in(phone, 1).await.remove(0);
    let mut client = cluster.nodes.shops[0].client().await;
    until("the owner buys", async || {
        let bought = round.history.buy(&mut client, round.sale, &buyer).await;
        matches!(bought.response, Response::Created | Response::Already)
    })
    .await;
    buyer
}

/// A node that cannot ask Redis, or cannot write to it, refuses within a bounded time, and says when to try again.
async fn assert_refused(cluster: &Cluster, n: usize, round: &Round, buyer: &Buyer) {
    let asked = Instant::now();
    let reply = cluster.ask_again(n, round.sale, buyer).await;
    assert_eq!(reply.status, 503, "{reply:?}");
    assert!(!reply.header("retry-after").is_empty(), "{reply:?}");
    assert!(asked.elapsed() < MAX_LATENCY, "{:?}", asked.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_paused() {
    let cluster = Cluster::start(Kind::Postgres, 2).await;
    for seed in seeds(OUTAGES) {
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        let owner = owner(&cluster, &round, 1000 + seed).await;
        let span = Duration::from_millis(rng.random_range(2_000..count(10_000, 3_000)));
        eprintln!("seed {seed}: {span:?}");
        cluster.nodes.redis.signal("STOP").unwrap();
        let paused = Instant::now();
        while paused.elapsed() < span {
            assert_refused(&cluster, 0, &round, &owner).await;
            assert_refused(&cluster, 1, &round, &owner).await;
        }
        cluster.nodes.redis.signal("CONT").unwrap();
        let closed = cluster.until_selling(&round).await;
        assert!(closed < Duration::from_secs(10), "{closed:?} until all nodes sell");
        round.assert_bounded_latency();
        cluster.end(round).await;
    }
    cluster.stop();
}

/// Redis answers, but later than it is waited for: buyers are refused within a bounded time, and no admission is sent again, because Redis
/// may carry it out later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_slow() {
    let cluster = Cluster::start_with(Servers::on(Kind::MariaDb), 2, |_, mut command| {
        command.env("STAMPEDE__REDIS__RESPONSE_TIMEOUT_MS", "200");
        command
    })
    .await;
    let (nodes, (owner, buyers)) = (&cluster.nodes, cluster.buyers.split_first().unwrap());
    for seed in seeds(OUTAGES) {
        // In each direction.
        let delay = Duration::from_millis(StdRng::seed_from_u64(seed).random_range(150..600));
        eprintln!("seed {seed}: {delay:?}");
        let (sale, history) = (nodes.create_sale_after_outage(BUYERS as u32).await, Arc::new(Recorder::default()));
        buy_when_open(&nodes.shops[0], &history, sale, owner).await;
        let monitor = Monitor::start(&nodes.redis, nodes.storages[0].path()).await;
        // An admission may be lost with its connection, or the nodes notice that Redis is slow before they send one. Then it becomes slow once
        // more.
        let mut polls = 0;
        let mut admissions = async || {
            polls += 1;
            requested_orders(sale, &monitor.received(&format!("seed {seed}, poll {polls}.")).await).len()
        };
        for tries in 1.. {
            until("the nodes hear of sessions that end, so that they need not ask for each", async || {
                let listening = redis::ask(nodes.redis.port(), &["client", "list", "type", "pubsub"]).unwrap();
                listening.lines().filter(|line| !line.is_empty()).count() >= nodes.shops.len()
            })
            .await;
            for shop in &nodes.shops {
                let mut client = shop.client().await;
                for buyer in buyers {
                    assert_eq!(client.get("/v1/me", &buyer.token).await.unwrap().status, 200);
                }
            }
            let before = admissions().await;
            cluster.to_redis.iter().for_each(|wire| wire.set(Fault::Delay(delay)));
            nodes.storm(&history, sale, buyers, 3).await;
            for n in 0..2 {
                let reply = cluster.ask_again(n, sale, owner).await;
                assert_eq!(reply.status, 503, "{reply:?}");
                assert!(!reply.header("retry-after").is_empty(), "{reply:?}");
            }
            let (asked, mut has_arrived) = (Instant::now(), false);
            while !has_arrived && asked.elapsed() < 5 * delay {
                has_arrived = admissions().await > before;
            }
            if has_arrived {
                break;
            }
            assert!(tries < 10, "no admission was sent");
            cluster.to_redis.iter().for_each(|wire| wire.set(Fault::None));
            for n in 0..2 {
                until("the owner gets the order", async || cluster.ask_again(n, sale, owner).await.status == 200).await;
            }
        }
        let attempts = history.ended();
        let answers = attempts.iter().filter(|attempt| attempt.response != Response::Unknown).count();
        assert_eq!(answers, 1, "after the order of the owner no answer comes in time");
        let slowest = attempts.iter().map(|attempt| attempt.end_us - attempt.start_us).max().unwrap();
        assert!(Duration::from_micros(slowest) < MAX_LATENCY, "an attempt took {slowest} us");

        cluster.to_redis.iter().for_each(|wire| wire.set(Fault::None));
        for (n, buyer) in buyers.iter().enumerate() {
            until("the buyer has an order", async || {
                let mut client = nodes.shops[n % 2].client().await;
                history.buy(&mut client, sale, buyer).await.response.is_confirmation()
            })
            .await;
        }
        let requested = requested_orders(sale, &monitor.received(&format!("end {seed}")).await);
        let distinct: HashSet<&String> = requested.iter().collect();
        assert_eq!(distinct.len(), requested.len(), "an admission was sent twice: {requested:?}");
        drop(monitor);
        assert_eq!(nodes.verify(&history, sale).await, BUYERS as usize);
    }
    cluster.stop();
}

/// What the attempts to buy were answered that were begun after the first `before` attempts of a round, and have ended.
fn answers_after(round: &Round, before: usize) -> Vec<Response> {
    let attempts = round.history.all().split_off(before);
    let ended = attempts.iter().filter(|attempt| attempt.action == Action::Buy && attempt.end_us != u64::MAX);
    ended.map(|attempt| attempt.response).collect()
}

/// The memory of Redis is full, so that it answers and refuses writes: buyers without an order get 503 while there is stock, never a refusal.
/// Owners may get their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_refuses_writes() {
    let cluster = Cluster::start(Kind::Postgres, 2).await;
    let stranger = cluster.nodes.shops[0].log_in(5000, 1).await.remove(0);
    for seed in seeds(OUTAGES) {
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        let span = Duration::from_millis(rng.random_range(500..1_500));
        eprintln!("seed {seed}: {span:?}");
        cluster.ask(&["config", "set", "maxmemory", "1"]);
        for shop in &cluster.nodes.shops {
            until("the node says why it is not ready", async || {
                let ready = shop.client().await.get("/readyz", "").await.unwrap();
                ready.status == 503 && ready.text("detail").contains("Redis refuses writes")
            })
            .await;
        }
        // Orders are cancelled and none is admitted, so that from then on there is stock.
        let path = format!("/admin/v1/sales/{}/gate", round.sale);
        until("there is stock", async || {
            let gate = cluster.nodes.shops[0].client().await.get(&path, TOKEN).await.unwrap().json();
            gate["marks"].as_u64().is_some_and(|marks| marks < gate["cap"].as_u64().unwrap())
        })
        .await;
        let (before, started) = (round.history.all().len(), Instant::now());
        while started.elapsed() < span {
            assert_refused(&cluster, 0, &round, &stranger).await;
            assert_refused(&cluster, 1, &round, &stranger).await;
        }
        until("buyers have got an answer", async || answers_after(&round, before).contains(&Response::Unknown)).await;
        let answers = answers_after(&round, before);
        let is_right = |response: &Response| matches!(response, Response::Unknown | Response::Already);
        assert!(answers.iter().all(is_right), "{answers:?}");
        cluster.ask(&["config", "set", "maxmemory", "0"]);
        let closed = cluster.until_selling(&round).await;
        assert!(closed < Duration::from_secs(10), "{closed:?} until all nodes sell");
        round.until_sold(3).await;
        round.assert_bounded_latency();
        cluster.end(round).await;
    }
    cluster.stop();
}

/// One node is cut off from Redis while the others sell. Then it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_cut_off_from_redis() {
    let cluster = Cluster::start(Kind::MariaDb, 3).await;
    let faults = [Fault::Hang, Fault::Cut, Fault::DropResponses];
    for seed in 0..count(3 * OUTAGES, 3) {
        let fault = faults[seed as usize % faults.len()];
        eprintln!("seed {seed}: {fault:?}");
        let round = cluster.begin().await;
        let owner = owner(&cluster, &round, 1000 + seed).await;
        cluster.to_redis[1].set(fault);
        let end = Instant::now() + Duration::from_millis(StdRng::seed_from_u64(seed).random_range(500..2_500));
        while Instant::now() < end {
            assert_refused(&cluster, 1, &round, &owner).await;
            let others = cluster.until_selling_on(&[0, 2], &round).await;
            assert!(others < Duration::from_secs(3), "{others:?}");
        }
        cluster.to_redis[1].set(Fault::None);
        if fault == Fault::DropResponses {
            // Requests without a response are never answered; their connections are closed.
            cluster.to_redis[1].cut_all();
        }
        let closed = cluster.until_selling(&round).await;
        assert!(closed < Duration::from_secs(10), "{closed:?} until all nodes sell");
        round.assert_bounded_latency();
        cluster.end(round).await;
    }
    cluster.stop();
}

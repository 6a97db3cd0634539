//! Redis is paused, or one node is cut off from it.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_proof::history::Response;
use stampede_testkit::count;
use stampede_testkit::proxy::Fault;

use crate::cluster::{Cluster, MAX_LATENCY, Round};
use crate::shop::{Buyer, Kind};

use super::{OUTAGES, seeds};

/// A buyer who has an order in this round and keeps it.
async fn owner(cluster: &Cluster, round: &Round, phone: u64) -> Buyer {
    let buyer = cluster.nodes.shops[0].log_in(phone, 1).await.remove(0);
    let mut client = cluster.nodes.shops[0].client().await;
    stampede_testkit::until("the owner buys", async || {
        let bought = round.history.buy(&mut client, round.sale, &buyer).await;
        matches!(bought.response, Response::Created | Response::Already)
    })
    .await;
    buyer
}

/// A node that cannot reach Redis refuses within a bounded time, and says when to try again.
async fn assert_refused(cluster: &Cluster, n: usize, round: &Round, owner: &Buyer) {
    let asked = Instant::now();
    let reply = cluster.ask_again(n, round.sale, owner).await;
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
        let until = Instant::now() + Duration::from_millis(StdRng::seed_from_u64(seed).random_range(500..2_500));
        while Instant::now() < until {
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

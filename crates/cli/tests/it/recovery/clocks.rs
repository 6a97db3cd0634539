//! Clocks that are wrong: of one node, and of a server that becomes the Redis of the cluster.

use std::time::Duration;

use stampede_proof::check::Rules;
use stampede_proof::history::Response;
use stampede_testkit::{FakeClock, redis, until};

use crate::cluster::{Cluster, Round, Servers};
use crate::shop::Kind;

use super::alerts::sent;
use super::drift::calls;
use super::replicas::Replica;
use super::{OUTAGES, seeds};

const HOUR_S: i64 = 3600;

/// The sale is on, so no buyer may get `not_started` or `ended`.
fn assert_window_by_one_clock(round: &Round) {
    for wrong in [Response::NotStarted, Response::Ended] {
        assert_eq!(round.history.count(wrong), 0, "{wrong:?}");
    }
}

/// The clock of one node goes back by an hour under load, and forth: Redis decides whether the sale runs, and ids stay unique.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_of_a_node_is_wrong() {
    let cluster = Cluster::start(Kind::MariaDb, 2).await;
    for seed in seeds(OUTAGES) {
        for offset_s in [-HOUR_S, HOUR_S] {
            eprintln!("seed {seed}: {offset_s} s");
            let round = cluster.begin().await;
            cluster.set_clock(1, offset_s);
            round.until_sold(5).await;
            cluster.until_selling(&round).await;
            cluster.set_clock(1, 0);
            round.until_sold(5).await;
            cluster.until_selling(&round).await;
            assert_window_by_one_clock(&round);
            // The ids of that node may be of another hour.
            let max_clock_skew = Duration::from_secs(HOUR_S.unsigned_abs() + 60);
            cluster.end_with(Rules { max_clock_skew, ..Rules::default() }, round).await;
        }
    }
    cluster.stop();
}

/// A server is promoted whose clock is wrong by an hour: nothing is sold and no buyer gets a wrong answer until the clock is right.
async fn a_server_with_another_clock_is_promoted(offset_s: i64) {
    let clock = FakeClock::new().unwrap();
    for seed in seeds(OUTAGES) {
        eprintln!("seed {seed}");
        let mut cluster = Cluster::start(Kind::Postgres, 2).await;
        clock.set(offset_s).unwrap();
        let mut replica = Replica::attach(&cluster, redis::start_with_clock(&clock).unwrap()).await;
        let round = cluster.begin().await;
        replica.promote(&mut cluster);
        for shop in &cluster.nodes.shops {
            until("the node says that the clock is wrong", async || {
                let reply = shop.client().await.get("/readyz", "").await.unwrap();
                reply.status == 503 && reply.text("detail").contains("clock of Redis")
            })
            .await;
        }
        until("an operator is told", async || sent(&cluster.nodes, "redis_unsuitable").await > 0.0).await;
        // Each check asks for this setting as well, and measures another difference of the clocks.
        let checked = calls(&cluster.nodes, "config|get") + 8;
        until("Redis is checked several times", async || calls(&cluster.nodes, "config|get") >= checked).await;
        assert_eq!(sent(&cluster.nodes, "redis_unsuitable").await, 1.0, "one case, one alert");
        let before = round.confirmed();
        let refused = round.history.count(Response::Unknown);
        until("buyers are refused", async || round.history.count(Response::Unknown) > refused + 20).await;
        assert_eq!(round.confirmed(), before, "nothing is sold by a wrong clock");
        clock.set(0).unwrap();
        cluster.until_selling(&round).await;
        assert_window_by_one_clock(&round);
        cluster.end(round).await;
        cluster.stop();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_promoted_whose_clock_is_an_hour_behind() {
    a_server_with_another_clock_is_promoted(-HOUR_S).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_promoted_whose_clock_is_an_hour_ahead() {
    a_server_with_another_clock_is_promoted(HOUR_S).await;
}

/// The clock of Redis is set back while it runs: what it has seen counts, and the nodes notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_of_redis_goes_back() {
    let clock = FakeClock::new().unwrap();
    let servers = Servers { redis: redis::start_with_clock(&clock).unwrap(), ..Servers::on(Kind::MariaDb) };
    let cluster = Cluster::start_with(servers, 2, |_, command| command).await;
    for _ in seeds(OUTAGES) {
        let round = cluster.begin().await;
        clock.set(-HOUR_S).unwrap();
        for shop in &cluster.nodes.shops {
            until("the node notices", async || {
                shop.client().await.get("/readyz", "").await.unwrap().text("detail").contains("clock of Redis")
            })
            .await;
        }
        clock.set(0).unwrap();
        cluster.until_selling(&round).await;
        assert_window_by_one_clock(&round);
        // Orders have the highest time that Redis has seen, while ids follow the clocks of the nodes.
        let max_clock_skew = Duration::from_secs(20);
        cluster.end_with(Rules { max_clock_skew, ..Rules::default() }, round).await;
    }
    cluster.stop();
}

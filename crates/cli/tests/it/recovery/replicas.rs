//! A replica of Redis that lags behind is promoted, and a server comes back with an older copy of the gate.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, count, redis};

use crate::cluster::{Cluster, Round};
use crate::shop::Kind;

use super::{OUTAGES, seeds};

/// A replica of the Redis of a cluster, and the way of its replication.
pub struct Replica {
    pub server: Server,
    replication: Proxy,
}

impl Replica {
    pub async fn attach(cluster: &Cluster, server: Server) -> Self {
        let replication = Proxy::start(cluster.nodes.redis.address()).await.unwrap();
        redis::replicate(&server, replication.address().port()).unwrap();
        Self { server, replication }
    }

    /// From now on the replica misses everything.
    pub fn cut_off(&self) {
        self.replication.set(Fault::Cut);
    }

    /// Promotes the replica, and leads every node to it. The server that was the master before is no longer reached.
    pub fn promote(&mut self, cluster: &mut Cluster) {
        redis::promote(&self.server).unwrap();
        for wire in &cluster.to_redis {
            wire.set_target(self.server.address());
        }
        std::mem::swap(&mut self.server, &mut cluster.nodes.redis);
    }

    /// Makes the server that was the master before a replica of the present one, with nothing of its own.
    pub fn attach_again(&self, cluster: &Cluster) {
        self.server.kill().unwrap();
        self.server.restart().unwrap();
        self.replication.set(Fault::None);
        self.replication.set_target(cluster.nodes.redis.address());
        redis::replicate(&self.server, self.replication.address().port()).unwrap();
    }
}

/// Buyers get orders that the replica does not have.
async fn fall_behind(replica: &Replica, round: &Round, rng: &mut StdRng) {
    replica.cut_off();
    let missed = rng.random_range(1..20);
    eprintln!("{missed} orders are missed");
    round.until_sold(missed).await;
}

/// With nodes running, or all of them killed and started again.
async fn a_lagging_replica_is_promoted(kind: Kind, with_restart: bool) {
    let mut cluster = Cluster::start(kind, 2).await;
    let mut replica = Replica::attach(&cluster, redis::start().unwrap()).await;
    for seed in seeds(OUTAGES) {
        eprintln!("{kind:?}, seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        fall_behind(&replica, &round, &mut rng).await;
        if with_restart {
            (0..2).for_each(|n| cluster.kill(n));
        }
        replica.promote(&mut cluster);
        if with_restart {
            (0..2).for_each(|n| cluster.restart(n));
        }
        cluster.until_selling(&round).await;
        cluster.end(round).await;
        replica.attach_again(&cluster);
    }
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lagging_replica_is_promoted_while_nodes_run() {
    a_lagging_replica_is_promoted(Kind::MariaDb, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lagging_replica_is_promoted_and_all_nodes_are_restarted() {
    a_lagging_replica_is_promoted(Kind::Postgres, true).await;
}

/// Nodes notice the promotion one after the other: meanwhile one sells from the old master, and another from the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_sell_from_two_masters_for_a_while() {
    let mut cluster = Cluster::start(Kind::Postgres, 2).await;
    let mut replica = Replica::attach(&cluster, redis::start().unwrap()).await;
    for seed in seeds(OUTAGES) {
        let mut rng = StdRng::seed_from_u64(seed);
        let round = cluster.begin().await;
        fall_behind(&replica, &round, &mut rng).await;
        redis::promote(&replica.server).unwrap();
        cluster.to_redis[0].set_target(replica.server.address());
        cluster.until_selling_on(&[0], &round).await;
        replica.promote(&mut cluster);
        cluster.until_selling(&round).await;
        cluster.end(round).await;
        replica.attach_again(&cluster);
    }
    cluster.stop();
}

/// The master becomes a replica of a server that lags behind, copies its data, and is the master again. It is the same process, which has
/// the scripts of the gate, but not the marks of the orders that the other server has missed.
async fn the_master_comes_back_with_older_data(with_restart: bool) {
    let mut cluster = Cluster::start(Kind::Postgres, 2).await;
    for seed in 0..count(OUTAGES, 1) {
        eprintln!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let replica = Replica::attach(&cluster, redis::start().unwrap()).await;
        let round = cluster.begin().await;
        fall_behind(&replica, &round, &mut rng).await;
        cluster.to_redis.iter().for_each(|wire| wire.set(Fault::Cut));
        if with_restart {
            (0..2).for_each(|n| cluster.kill(n));
        }
        redis::promote(&replica.server).unwrap();
        redis::replicate(&cluster.nodes.redis, replica.server.port()).unwrap();
        redis::promote(&cluster.nodes.redis).unwrap();
        let memory = cluster.ask(&["info", "memory"]);
        assert!(!memory.contains("number_of_cached_scripts:0"), "the scripts are there: {memory}");
        cluster.to_redis.iter().for_each(|wire| wire.set(Fault::None));
        if with_restart {
            (0..2).for_each(|n| cluster.restart(n));
        }
        cluster.until_selling(&round).await;
        cluster.end(round).await;
    }
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_master_comes_back_with_older_data_while_nodes_run() {
    the_master_comes_back_with_older_data(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_master_comes_back_with_older_data_and_all_nodes_are_restarted() {
    the_master_comes_back_with_older_data(true).await;
}

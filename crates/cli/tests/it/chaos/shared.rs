//! Random faults of nodes, Redis, the database and operators, on three nodes of the tier `shared` under load: in each round one, or two
//! at once.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::check::Rules;
use stampede_testkit::{Client, FakeClock, proxy, redis, until};

use crate::cluster::{Cluster, Round, Servers};
use crate::recovery::replicas::Replica;
use crate::shop::{Kind, TOKEN};

use super::for_minutes;

const NODES: usize = 3;
/// How far ids may be from the times of orders while all clocks are right, and if one was wrong by an hour.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(1);
const MAX_WRONG_CLOCK_SKEW: Duration = Duration::from_secs(2 * 3600 + 60);
/// Rounds of one seed.
const ROUNDS: u64 = 4;

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A fault of the connection between a node and the database.
    DatabaseWire(usize, proxy::Fault),
    /// SIGKILL, then a restart on the same data.
    DatabaseKilled,
    /// SIGSTOP, then SIGCONT.
    DatabasePaused,
    /// The clock of the database server jumps by this many seconds, and back.
    DatabaseClock(i64),
    /// A fault of the connection between a node and Redis.
    RedisWire(usize, proxy::Fault),
    /// SIGKILL, then a restart without data.
    RedisKilled,
    RedisPaused,
    /// The clock of Redis jumps by this many seconds, and back.
    RedisClock(i64),
    /// A key of the sale is deleted.
    KeyLost(&'static str),
    /// The scripts of the gate are deleted.
    ScriptsLost,
    /// A replica that has missed some orders becomes the master.
    Promoted,
    NodeKilled(usize),
    /// A node aborts at a failpoint.
    NodeAborted(usize, &'static str),
    NodePaused(usize),
    /// The clock of a node jumps by this many seconds, and back.
    NodeClock(usize, i64),
    /// An operator adds stock, some of it twice with the same request id.
    ToppedUp(usize),
    PausedAndResumed(usize),
    Rebuilt(usize),
    Reconciled(usize),
}

/// What a fault affects. Faults that happen at once affect different parts; they end in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Database,
    Redis,
    Node,
    Operator,
}

const FAULTS: [fn(&mut StdRng) -> Fault; 19] = [
    |rng| Fault::DatabaseWire(node(rng), wire(rng)),
    |_| Fault::DatabaseKilled,
    |_| Fault::DatabasePaused,
    |rng| Fault::DatabaseClock(rng.random_range(-3600..3600)),
    |rng| Fault::RedisWire(node(rng), wire(rng)),
    |_| Fault::RedisKilled,
    |_| Fault::RedisPaused,
    // Not beyond the end of the sale: a time that Redis has seen is never taken back.
    |rng| Fault::RedisClock(rng.random_range(-3600..600)),
    |rng| Fault::KeyLost(["sale", "live", "out"][rng.random_range(0..3)]),
    |_| Fault::ScriptsLost,
    |_| Fault::Promoted,
    |rng| Fault::NodeKilled(node(rng)),
    |rng| Fault::NodeAborted(node(rng), ["buy.admitted", "buy.answer"][rng.random_range(0..2)]),
    |rng| Fault::NodePaused(node(rng)),
    |rng| Fault::NodeClock(node(rng), rng.random_range(-3600..3600)),
    |rng| Fault::ToppedUp(node(rng)),
    |rng| Fault::PausedAndResumed(node(rng)),
    |rng| Fault::Rebuilt(node(rng)),
    |rng| Fault::Reconciled(node(rng)),
];

fn node(rng: &mut StdRng) -> usize {
    rng.random_range(0..NODES)
}

fn wire(rng: &mut StdRng) -> proxy::Fault {
    let delay = proxy::Fault::Delay(Duration::from_millis(rng.random_range(5..80)));
    [proxy::Fault::Cut, delay, proxy::Fault::Hang, proxy::Fault::DropResponses][rng.random_range(0..4)]
}

impl Fault {
    const fn part(self) -> Part {
        match self {
            Self::DatabaseWire(..) | Self::DatabaseKilled => Part::Database,
            Self::DatabasePaused | Self::DatabaseClock(_) => Part::Database,
            Self::RedisWire(..) | Self::RedisKilled | Self::RedisPaused | Self::RedisClock(_) => Part::Redis,
            Self::KeyLost(_) | Self::ScriptsLost | Self::Promoted => Part::Redis,
            Self::NodeKilled(_) | Self::NodeAborted(..) | Self::NodePaused(_) | Self::NodeClock(..) => Part::Node,
            Self::ToppedUp(_) | Self::PausedAndResumed(_) | Self::Rebuilt(_) | Self::Reconciled(_) => Part::Operator,
        }
    }

    /// Not with another one: a node that is started again needs all servers; one whose clock is wrong gives the marks that a rebuild
    /// records a wrong time, and of three clocks only one may be wrong; a pause that is not answered may come after the sale was resumed.
    const fn is_alone(self) -> bool {
        self.is_of_a_clock() || matches!(self, Self::NodeAborted(..) | Self::PausedAndResumed(_))
    }

    const fn is_of_a_clock(self) -> bool {
        matches!(self, Self::NodeClock(..) | Self::RedisClock(_) | Self::DatabaseClock(_))
    }

    /// One fault, or two of different parts.
    fn draw(rng: &mut StdRng) -> Vec<Self> {
        let mut one = || FAULTS[rng.random_range(0..FAULTS.len())](rng);
        let (first, second) = (one(), one());
        if first.is_alone() || second.is_alone() || first.part() == second.part() {
            vec![first]
        } else {
            vec![first, second]
        }
    }
}

struct Chaos {
    cluster: Cluster,
    replica: Replica,
    /// Of Redis and its replica.
    redis_clock: FakeClock,
    database_clock: FakeClock,
    /// How far ids may be from the times of orders. After the clock of the database was wrong, nodes have leases of that time.
    max_clock_skew: Duration,
    /// Request ids of top-ups.
    top_ups: u32,
}

impl Chaos {
    async fn start(kind: Kind) -> Self {
        let reconciling = |_, mut command: std::process::Command| {
            command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "1000");
            command.env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "1000");
            command
        };
        let (redis_clock, database_clock) = (FakeClock::new().unwrap(), FakeClock::new().unwrap());
        let new_redis = || redis::start_with_clock(&redis_clock).unwrap();
        let database = Some(kind.own_server_with_clock(&database_clock));
        let servers = Servers { kind, redis: new_redis(), database };
        let cluster = Cluster::start_with(servers, NODES, reconciling).await;
        let replica = Replica::attach(&cluster, new_redis()).await;
        Self { cluster, replica, redis_clock, database_clock, max_clock_skew: MAX_CLOCK_SKEW, top_ups: 0 }
    }

    /// Sends a request of an operator. Whether a node can answer it depends on the other faults.
    async fn operate(&self, n: usize, path: &str, body: &Value) -> Option<u16> {
        let mut client = Client::connect(self.cluster.nodes.shops[n].address).await.ok()?;
        Some(client.post(&format!("/admin/v1/{path}"), TOKEN, body).await.ok()?.status.as_u16())
    }

    async fn begin_fault(&mut self, fault: Fault, sale: SaleId, rng: &mut StdRng) {
        let cluster = &mut self.cluster;
        match fault {
            Fault::DatabaseWire(n, fault) => cluster.to_database[n].set(fault),
            Fault::DatabaseKilled => cluster.database.as_ref().unwrap().kill().unwrap(),
            Fault::DatabasePaused => cluster.database.as_ref().unwrap().signal("STOP").unwrap(),
            Fault::DatabaseClock(offset_s) => self.database_clock.set(offset_s).unwrap(),
            Fault::RedisWire(n, fault) => cluster.to_redis[n].set(fault),
            Fault::RedisKilled => cluster.nodes.redis.kill().unwrap(),
            Fault::RedisPaused => cluster.nodes.redis.signal("STOP").unwrap(),
            Fault::RedisClock(offset_s) => self.redis_clock.set(offset_s).unwrap(),
            Fault::KeyLost(part) => {
                // It is missing while the gate is rebuilt.
                if let Some(key) = cluster.key(sale, part) {
                    cluster.ask(&["del", &key]);
                }
            }
            Fault::ScriptsLost => drop(cluster.ask(&["script", "flush"])),
            Fault::Promoted => self.replica.cut_off(),
            Fault::NodeKilled(n) => cluster.kill(n),
            Fault::NodeAborted(n, failpoint) => {
                cluster.restart_with_failpoint(n, &format!("{failpoint}=abort@{}", rng.random_range(1..20)));
            }
            Fault::NodePaused(n) => cluster.nodes.shops[n].process.signal("STOP").unwrap(),
            Fault::NodeClock(n, offset_s) => cluster.set_clock(n, offset_s),
            Fault::ToppedUp(n) => {
                self.top_ups += 1;
                let top_up = json!({ "add": 2, "request_id": format!("chaos-{}", self.top_ups) });
                for _ in 0..2 {
                    self.operate(n, &format!("sales/{sale}/top-ups"), &top_up).await;
                }
            }
            Fault::PausedAndResumed(n) => drop(self.operate(n, &format!("sales/{sale}/pause"), &Value::Null).await),
            Fault::Rebuilt(n) => drop(self.operate(n, "gate/rebuild", &Value::Null).await),
            Fault::Reconciled(n) => drop(self.operate(n, "reconcile", &json!({ "dry_run": false })).await),
        }
    }

    async fn end_fault(&mut self, fault: Fault, sale: SaleId) {
        let cluster = &mut self.cluster;
        match fault {
            Fault::DatabaseWire(n, fault) => heal(&cluster.to_database[n], fault),
            Fault::DatabaseKilled => cluster.database.as_ref().unwrap().restart().unwrap(),
            Fault::DatabasePaused => cluster.database.as_ref().unwrap().signal("CONT").unwrap(),
            Fault::DatabaseClock(_) => self.database_clock.set(0).unwrap(),
            Fault::RedisWire(n, fault) => heal(&cluster.to_redis[n], fault),
            Fault::RedisKilled => cluster.nodes.redis.restart().unwrap(),
            Fault::RedisPaused => cluster.nodes.redis.signal("CONT").unwrap(),
            Fault::RedisClock(_) => self.redis_clock.set(0).unwrap(),
            Fault::Promoted => {
                self.replica.promote(cluster);
                self.replica.attach_again(cluster);
            }
            Fault::NodeKilled(n) | Fault::NodeAborted(n, _) => cluster.restart(n),
            Fault::NodePaused(n) => cluster.nodes.shops[n].process.signal("CONT").unwrap(),
            Fault::NodeClock(n, _) => cluster.set_clock(n, 0),
            Fault::PausedAndResumed(n) => {
                let resume = format!("sales/{sale}/resume");
                // 409: it is on sale, because the pause has failed.
                until("the sale is resumed", async || {
                    matches!(self.operate(n, &resume, &Value::Null).await, Some(200 | 409))
                })
                .await;
            }
            Fault::KeyLost(_) | Fault::ScriptsLost => {}
            Fault::ToppedUp(_) | Fault::Rebuilt(_) | Fault::Reconciled(_) => {}
        }
    }

    /// A sale under load with these faults; then everything is sold, and all invariants hold.
    async fn round(&mut self, mut faults: Vec<Fault>, rng: &mut StdRng) {
        let round: Round = self.cluster.begin().await;
        for &fault in &faults {
            self.begin_fault(fault, round.sale, rng).await;
            tokio::time::sleep(Duration::from_millis(rng.random_range(100..1_000))).await;
        }
        faults.sort_by_key(|fault| fault.part());
        let has_clock = faults.iter().any(|fault| fault.is_of_a_clock());
        if faults.iter().any(|fault| matches!(fault, Fault::DatabaseClock(_))) {
            self.max_clock_skew = MAX_WRONG_CLOCK_SKEW;
        }
        for fault in faults {
            self.end_fault(fault, round.sale).await;
        }
        let max_clock_skew = if has_clock { MAX_WRONG_CLOCK_SKEW } else { self.max_clock_skew };
        self.cluster.until_selling(&round).await;
        self.cluster.end_with(Rules { max_clock_skew, ..Rules::default() }, round).await;
    }
}

fn heal(wire: &proxy::Proxy, fault: proxy::Fault) {
    wire.set(proxy::Fault::None);
    if fault == proxy::Fault::DropResponses {
        // Requests without a response are never answered; their connections are closed.
        wire.cut_all();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_on_three_nodes() {
    for_minutes(async |seed| {
        let kind = [Kind::MariaDb, Kind::Postgres][seed as usize % 2];
        let mut rng = StdRng::seed_from_u64(seed);
        let mut chaos = Chaos::start(kind).await;
        for n in 0..ROUNDS {
            let faults = Fault::draw(&mut rng);
            eprintln!("shared, {kind:?}, seed {seed}, round {n}: {faults:?}");
            chaos.round(faults, &mut rng).await;
        }
        chaos.cluster.stop();
        ROUNDS
    })
    .await;
}

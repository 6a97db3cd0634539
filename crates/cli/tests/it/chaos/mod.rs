//! Random faults with random seeds for `CHAOS_MINUTES`; one round without it.
//! A failure prints its seed; `CHAOS_SEED=n` repeats the same faults at the same times.
//!
//! Here for the tier `solo`; [`shared`] for three nodes of the tier `shared`.

mod shared;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_core::{Clock as _, SystemClock, failpoint};
use stampede_proof::check::Rules;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{FakeClock, Proxy, Server, count, proxy};

use crate::crash;
use crate::outage::{BUYERS, STOCK, spawn_buyers_on, verify_sold_out_on};
use crate::shop::{Buyer, Kind, Shop, Storage, command};

/// A fault that a running system must survive without intervention. Kills of a node are in [`crash`].
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A fault of the connection between a node and its database.
    Wire(proxy::Fault),
    /// SIGKILL, then a restart on the same data.
    DatabaseKilled,
    /// SIGSTOP, then SIGCONT.
    DatabasePaused,
    NodePaused,
    /// The clock of a node jumps by this many seconds, and back.
    NodeClock(i64),
    /// The clock of the database server jumps.
    DatabaseClock(i64),
}

const ON_EVERY_DATABASE: [fn(&mut StdRng) -> Fault; 2] =
    [|_| Fault::NodePaused, |rng| Fault::NodeClock(random_clock_jump(rng))];

const ON_SERVERS: [fn(&mut StdRng) -> Fault; 7] = [
    |_| Fault::Wire(proxy::Fault::Cut),
    |rng| Fault::Wire(proxy::Fault::Delay(Duration::from_millis(rng.random_range(5..80)))),
    |_| Fault::Wire(proxy::Fault::Hang),
    |_| Fault::Wire(proxy::Fault::DropResponses),
    |_| Fault::DatabaseKilled,
    |_| Fault::DatabasePaused,
    |rng| Fault::DatabaseClock(random_clock_jump(rng)),
];

/// Up to an hour, forwards or backwards.
fn random_clock_jump(rng: &mut StdRng) -> i64 {
    rng.random_range(-3600..3600)
}

fn faults_of(kind: Kind) -> Vec<fn(&mut StdRng) -> Fault> {
    let servers: &[fn(&mut StdRng) -> Fault] = if kind == Kind::Sqlite { &[] } else { &ON_SERVERS };
    ON_EVERY_DATABASE.iter().chain(servers).copied().collect()
}

/// A separate database server with a clock that can be set, behind a faulty proxy.
struct Database {
    server: Server,
    clock: FakeClock,
    wire: Proxy,
}

/// One node on SQLite; two on a database server, the first of them behind the proxy.
struct Cluster {
    database: Option<Database>,
    storages: Vec<Storage>,
    shops: Vec<Shop>,
    buyers: Vec<Buyer>,
}

impl Cluster {
    async fn start(kind: Kind) -> Self {
        let (database, urls) = match kind {
            Kind::Sqlite => (None, vec![None]),
            Kind::MariaDb | Kind::Postgres => {
                let clock = FakeClock::new().unwrap();
                let server = kind.own_server_with_clock(&clock);
                let wire = Proxy::start(server.address()).await.unwrap();
                let direct = kind.create_database(&server, server.port());
                let behind = direct.replace(&format!(":{}/", server.port()), &format!(":{}/", wire.address().port()));
                (Some(Database { server, clock, wire }), vec![Some(behind), Some(direct)])
            }
        };
        let storages: Vec<Storage> = urls.into_iter().map(Storage::with).collect();
        let shops: Vec<Shop> = storages.iter().map(|storage| Shop::run(serving(storage))).collect();
        let buyers = shops[0].log_in(0, BUYERS).await;
        Self { database, storages, shops, buyers }
    }

    fn set_node_clock(&self, offset_s: i64) {
        std::fs::write(clock_file(&self.storages[0]), (offset_s * 1000).to_string()).unwrap();
    }

    /// Injects the fault for this time.
    async fn inject(&self, fault: Fault, span: Duration) {
        let lasting = || tokio::time::sleep(span);
        let database = || self.database.as_ref().expect("a fault of a database server");
        match fault {
            Fault::Wire(fault) => {
                database().wire.set(fault);
                lasting().await;
                database().wire.set(proxy::Fault::None);
                if fault == proxy::Fault::DropResponses {
                    // Requests without a response are never answered; their connections are closed.
                    database().wire.cut_all();
                }
            }
            Fault::DatabaseKilled => {
                database().server.kill().unwrap();
                lasting().await;
                database().server.restart().unwrap();
            }
            Fault::DatabasePaused => {
                database().server.signal("STOP").unwrap();
                lasting().await;
                database().server.signal("CONT").unwrap();
            }
            Fault::NodePaused => {
                self.shops[0].process.signal("STOP").unwrap();
                lasting().await;
                self.shops[0].process.signal("CONT").unwrap();
            }
            Fault::NodeClock(offset_s) => {
                self.set_node_clock(offset_s);
                lasting().await;
                self.set_node_clock(0);
            }
            Fault::DatabaseClock(offset_s) => {
                database().clock.set(offset_s).unwrap();
                lasting().await;
                database().clock.set(0).unwrap();
            }
        }
    }

    /// A sale with buyers who try until they get a definite response, and the fault during it; then verifies all invariants.
    async fn round(&self, fault: Fault, rng: &mut StdRng) {
        let shops: Vec<&Shop> = self.shops.iter().collect();
        // A window wider than any clock jump.
        let (now, day) = (SystemClock.now(), Duration::from_secs(24 * 3600));
        let sale = shops[0].create_sale_between(STOCK, now.minus(day), now.plus(day)).await;
        for shop in &shops {
            shop.wait_for_sale(sale).await;
        }
        // Two clocks may each jump by an hour and back.
        let rules = Rules { max_clock_skew: Duration::from_secs(2 * 3600 + 60), ..Rules::default() };
        let history = Arc::new(Recorder::default());
        let buyers = spawn_buyers_on(&shops, sale, &self.buyers, &history, Duration::from_millis(400));
        tokio::time::sleep(Duration::from_millis(rng.random_range(20..300))).await;
        self.inject(fault, Duration::from_millis(rng.random_range(300..900))).await;
        verify_sold_out_on(rules, buyers, (&self.storages[self.storages.len() - 1], &shops), sale, &history).await;
    }

    fn stop(self) {
        for shop in self.shops {
            assert!(shop.stop().success());
        }
    }
}

fn clock_file(storage: &Storage) -> std::path::PathBuf {
    storage.path().join("clock")
}

fn serving(storage: &Storage) -> std::process::Command {
    let mut command = command(storage);
    std::fs::write(clock_file(storage), "0").unwrap();
    command
        .env("STAMPEDE_CLOCK_FILE", clock_file(storage))
        .env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000")
        // Sessions must not expire when the clock jumps.
        .env("STAMPEDE__LOGIN__SESSION_TTL_MS", (24 * 3600 * 1000).to_string())
        .env("STAMPEDE__LOG__LEVEL", "off");
    command
}

/// Injects these faults one after the other.
async fn faults(kind: Kind, seed: u64, faults: impl IntoIterator<Item = fn(&mut StdRng) -> Fault>) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    let cluster = Cluster::start(kind).await;
    let mut all = 0;
    for fault in faults {
        let fault = fault(&mut rng);
        eprintln!("{kind:?}, seed {seed}, round {all}: {fault:?}");
        cluster.round(fault, &mut rng).await;
        all += 1;
    }
    cluster.stop();
    all
}

/// A kill, or an abort at a failpoint.
fn random_crash(rng: &mut StdRng) -> crash::Fault {
    match rng.random_range(0..=failpoint::BUYING.len()) {
        0 => crash::Fault::random_kill(rng),
        n => crash::Fault::random_abort(rng, failpoint::BUYING[n - 1]),
    }
}

/// Runs `rounds` with one seed after the other for `CHAOS_MINUTES`, at least once. It returns the number of its rounds.
async fn for_minutes(mut rounds: impl AsyncFnMut(u64) -> u64) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a whole number"));
    let until = Instant::now() + Duration::from_secs(60 * number("CHAOS_MINUTES").unwrap_or(0));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let mut seed = number("CHAOS_SEED").unwrap_or(now.as_nanos() as u64 % 1_000_000);
    let mut all = 0;
    loop {
        all += rounds(seed).await;
        if Instant::now() >= until {
            break;
        }
        seed += 1;
    }
    eprintln!("{all} rounds, no violation");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults() {
    for_minutes(async |seed| {
        let kind = [Kind::Sqlite, Kind::MariaDb, Kind::Postgres][seed as usize % 3];
        let crashes = crash::rounds(kind, seed, [random_crash as fn(&mut StdRng) -> crash::Fault; 2]).await.1;
        // The faults are drawn from the same seed.
        let (mut rng, choice) = (StdRng::seed_from_u64(seed), faults_of(kind));
        let drawn: Vec<_> = (0..3).map(|_| choice[rng.random_range(0..choice.len())]).collect();
        crashes + faults(kind, seed, drawn).await
    })
    .await;
}

/// Every fault that this database can have.
async fn every_fault(kind: Kind) {
    for seed in 0..count(5, 1) {
        faults(kind, seed, faults_of(kind)).await;
    }
}

on_each_database!(every_fault);
